"""Files and tensors: finds checkpoints, reads safetensors into parameters, writes them back."""

from tigon.hub import Repository
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.converted import Stored, converted
from tigon.weights.decoded import Decoded, Drawn
from tigon.weights.directory import check_free, fsync, keep_files, new_directory, recover
from tigon.weights.disk import DiskFull, named_if_full, require_space
from tigon.weights.entries import entries
from tigon.weights.finite import all_finite
from tigon.weights.fp8 import BlockScales, Fp8Tensor
from tigon.weights.gguf import GGUF, GGMLTensor
from tigon.weights.header import TensorInfo, read_header, write_header
from tigon.weights.layout import Copy, Cut, Layout, Part, Rows, cut_parts
from tigon.weights.loading import STAGING_BYTES, load_into, pinned_ahead
from tigon.weights.lock import Locked, locked
from tigon.weights.mapping import map_parameters
from tigon.weights.matching import Misfits, compare, listing, match
from tigon.weights.pieces import Entry, Piece, cut, height
from tigon.weights.plan import local_part, own_rows, own_slices, row_group
from tigon.weights.reading import Reader
from tigon.weights.resized import ResizedTensor
from tigon.weights.staging import as_bytes
from tigon.weights.writer import copied, write_checkpoint
from tigon.weights.writers import RankError, Writers

__all__ = [
    "GGUF",
    "STAGING_BYTES",
    "BlockScales",
    "Checkpoint",
    "Copy",
    "Cut",
    "Decoded",
    "DiskFull",
    "Drawn",
    "Entry",
    "Fp8Tensor",
    "GGMLTensor",
    "Layout",
    "Locked",
    "Misfits",
    "Part",
    "Piece",
    "RankError",
    "Reader",
    "Repository",
    "ResizedTensor",
    "Rows",
    "Stored",
    "TensorInfo",
    "Writers",
    "all_finite",
    "as_bytes",
    "check_free",
    "compare",
    "converted",
    "copied",
    "cut",
    "cut_parts",
    "entries",
    "fsync",
    "height",
    "keep_files",
    "listing",
    "load_into",
    "local_part",
    "locked",
    "map_parameters",
    "match",
    "named_if_full",
    "new_directory",
    "own_rows",
    "own_slices",
    "pinned_ahead",
    "read_header",
    "recover",
    "require_space",
    "row_group",
    "write_checkpoint",
    "write_header",
]
