"""Files and tensors: finds checkpoints, reads safetensors into parameters, writes them back."""

from tigon.hub import Repository
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.decoded import Decoded
from tigon.weights.entries import entries
from tigon.weights.fp8 import BlockScales
from tigon.weights.ggml import GGMLTensor
from tigon.weights.gguf_file import GGUF
from tigon.weights.header import TensorInfo, read_header, write_header
from tigon.weights.layout import Layout, Part, Rows
from tigon.weights.loading import STAGING_BYTES, load_into
from tigon.weights.mapping import map_parameters
from tigon.weights.plan import own_rows, own_slices
from tigon.weights.writer import Entry, as_bytes, fsync, new_directory, write_checkpoint

__all__ = [
    "GGUF",
    "STAGING_BYTES",
    "BlockScales",
    "Checkpoint",
    "Decoded",
    "Entry",
    "GGMLTensor",
    "Layout",
    "Part",
    "Repository",
    "Rows",
    "TensorInfo",
    "as_bytes",
    "entries",
    "fsync",
    "load_into",
    "map_parameters",
    "new_directory",
    "own_rows",
    "own_slices",
    "read_header",
    "write_checkpoint",
    "write_header",
]
