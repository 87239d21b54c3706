"""The Hugging Face hub and local folders: where a model's files are, which may be read, uploads."""

from tigon.hub.card import Metadata, write_card
from tigon.hub.config import config_file
from tigon.hub.folders import adapter_hint, check_folder, is_own_file
from tigon.hub.repository import Repository, Source
from tigon.hub.upload import Destination, check_repository, has_token

__all__ = [
    "Destination",
    "Metadata",
    "Repository",
    "Source",
    "adapter_hint",
    "check_folder",
    "check_repository",
    "config_file",
    "has_token",
    "is_own_file",
    "write_card",
]
