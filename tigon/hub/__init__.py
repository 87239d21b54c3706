"""The Hugging Face hub and local folders: where a model's files are, which may be read, uploads."""

from tigon.hub.folders import check_folder, is_own_file
from tigon.hub.repository import Repository

__all__ = ["Repository", "check_folder", "is_own_file"]
