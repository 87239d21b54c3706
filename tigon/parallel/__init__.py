"""Models split and sharded over the dimensions of a device mesh."""

from tigon.parallel.context_parallel import check_context, share_context
from tigon.parallel.expert_parallel import check_experts, share_experts
from tigon.parallel.fsdp import reduction_dtype, shard_blocks
from tigon.parallel.load import cut_layers, from_pretrained
from tigon.parallel.mesh import Meshes, MeshSizes, Place
from tigon.parallel.tensor_parallel import TensorParallel, cut_model, find_tensor, take_part
from tigon.parallel.zero2 import IN_FLIGHT, find_zero, in_order, shard_gradients

__all__ = [
    "IN_FLIGHT",
    "MeshSizes",
    "Meshes",
    "Place",
    "TensorParallel",
    "check_context",
    "check_experts",
    "cut_layers",
    "cut_model",
    "find_tensor",
    "find_zero",
    "from_pretrained",
    "in_order",
    "reduction_dtype",
    "shard_blocks",
    "shard_gradients",
    "share_context",
    "share_experts",
    "take_part",
]
