"""Files and tensors: finds checkpoints, reads safetensors into parameters, writes them back."""

from tigon.hub import Repository
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.entries import entries
from tigon.weights.header import TensorInfo, read_header, write_header
from tigon.weights.layout import Layout, Part, Rows
from tigon.weights.loading import load_into, own_rows, own_slices
from tigon.weights.writer import Entry, as_bytes, fsync, new_directory, write_checkpoint

__all__ = [
    "Checkpoint",
    "Entry",
    "Layout",
    "Part",
    "Repository",
    "Rows",
    "TensorInfo",
    "as_bytes",
    "entries",
    "fsync",
    "load_into",
    "new_directory",
    "own_rows",
    "own_slices",
    "read_header",
    "write_checkpoint",
    "write_header",
]
