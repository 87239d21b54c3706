"""Files and tensors: finds checkpoints, reads safetensors into parameters, writes them back."""

from tigon.hub import Repository
from tigon.weights.checkpoint import BlockScales, Checkpoint
from tigon.weights.convert import convert_entries
from tigon.weights.decoded import DecodedTensor
from tigon.weights.entries import TensorEntry, WriterGroup, make_entries
from tigon.weights.gguf import GGUF, GGMLTensor
from tigon.weights.header import TensorInfo
from tigon.weights.layout import (
    Layout,
    ReplicaIndex,
    RowSpan,
    ShardSpec,
    TensorSlice,
    local_blocks,
    local_rows,
    local_shard,
    row_group,
    shard_slices,
)
from tigon.weights.load import (
    STAGING_BYTES,
    Misfits,
    compare_tensors,
    format_misfits,
    load_into,
    map_parameters,
    match_tensors,
    prepin_staging,
)
from tigon.weights.write import write_checkpoint

__all__ = [
    "GGUF", "STAGING_BYTES", "BlockScales", "Checkpoint", "DecodedTensor", "GGMLTensor", "Layout",
    "Misfits", "ReplicaIndex", "Repository", "RowSpan", "ShardSpec",
    "TensorEntry", "TensorInfo", "TensorSlice", "WriterGroup", "compare_tensors", "convert_entries",
    "format_misfits", "load_into", "local_blocks", "local_rows", "local_shard", "make_entries",
    "map_parameters", "match_tensors", "prepin_staging", "row_group", "shard_slices",
    "write_checkpoint",
]  # fmt: skip
