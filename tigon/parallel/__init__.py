"""Models sharded over the dimensions of a device mesh."""

from tigon.parallel.context_parallel import check_context as check_context
from tigon.parallel.context_parallel import gather_output as gather_output
from tigon.parallel.context_parallel import share_context as share_context
from tigon.parallel.expert_parallel import check_experts as check_experts
from tigon.parallel.expert_parallel import shard_experts as shard_experts
from tigon.parallel.fsdp import reduction_dtype as reduction_dtype
from tigon.parallel.fsdp import shard_blocks as shard_blocks
from tigon.parallel.load import from_pretrained as from_pretrained
from tigon.parallel.load import shard_layers as shard_layers
from tigon.parallel.mesh import DataRank as DataRank
from tigon.parallel.mesh import Meshes as Meshes
from tigon.parallel.mesh import MeshSizes as MeshSizes
from tigon.parallel.tensor_parallel import TensorParallel as TensorParallel
from tigon.parallel.tensor_parallel import keep_rank_zero as keep_rank_zero
from tigon.parallel.tensor_parallel import shard_model as shard_model
from tigon.parallel.zero2 import IN_FLIGHT as IN_FLIGHT
from tigon.parallel.zero2 import forward_order as forward_order
from tigon.parallel.zero2 import shard_gradients as shard_gradients
