"""Models divided over ranks in ways that torch.distributed.fsdp does not have."""

from tigon.parallel.zero import Zero, find_zero, shard_gradients

__all__ = ["Zero", "find_zero", "shard_gradients"]
