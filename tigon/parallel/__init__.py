"""Models sharded over the dimensions of a device mesh."""

from tigon.parallel.context_parallel import check_context, gather_output, share_context
from tigon.parallel.expert_parallel import check_experts, shard_experts
from tigon.parallel.fsdp import reduction_dtype, shard_blocks
from tigon.parallel.load import from_pretrained, shard_layers
from tigon.parallel.mesh import DataRank, Meshes
from tigon.parallel.tensor_parallel import TensorParallel, keep_rank_zero, shard_model
from tigon.parallel.zero2 import IN_FLIGHT, forward_order, shard_gradients
from tigon.settings.mesh import MeshSizes

__all__ = [
    "IN_FLIGHT", "DataRank", "MeshSizes", "Meshes", "TensorParallel", "check_context",
    "check_experts", "forward_order", "from_pretrained", "gather_output", "keep_rank_zero",
    "reduction_dtype", "shard_blocks", "shard_experts", "shard_gradients", "shard_layers",
    "shard_model", "share_context",
]  # fmt: skip
