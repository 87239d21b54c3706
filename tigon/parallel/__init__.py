"""Models divided over ranks: what torch.distributed.fsdp does not have."""

from tigon.parallel.context import check_context, share_context
from tigon.parallel.zero import IN_FLIGHT, find_zero, in_order, shard_gradients

__all__ = [
    "IN_FLIGHT",
    "check_context",
    "find_zero",
    "in_order",
    "shard_gradients",
    "share_context",
]
