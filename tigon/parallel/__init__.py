"""Models divided over ranks in ways that torch.distributed.fsdp does not have."""

from tigon.parallel.zero import IN_FLIGHT, find_zero, in_order, shard_gradients

__all__ = ["IN_FLIGHT", "find_zero", "in_order", "shard_gradients"]
