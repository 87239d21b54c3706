"""Files and tensors: finds checkpoints, reads safetensors into parameters, writes them back."""

from tigon.weights.checkpoint import Checkpoint
from tigon.weights.entries import entries
from tigon.weights.header import TensorInfo
from tigon.weights.hub import Repository
from tigon.weights.layout import Layout, Part, Rows
from tigon.weights.loading import load_into
from tigon.weights.writer import Entry, new_directory, write_checkpoint

__all__ = [
    "Checkpoint",
    "Entry",
    "Layout",
    "Part",
    "Repository",
    "Rows",
    "TensorInfo",
    "entries",
    "load_into",
    "new_directory",
    "write_checkpoint",
]
