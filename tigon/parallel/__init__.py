"""Models divided over ranks, in dimensions of a mesh."""

from tigon.parallel.context import check_context, share_context
from tigon.parallel.mesh import Meshes, Place, Sizes
from tigon.parallel.zero import IN_FLIGHT, find_zero, in_order, shard_gradients

__all__ = [
    "IN_FLIGHT",
    "Meshes",
    "Place",
    "Sizes",
    "check_context",
    "find_zero",
    "in_order",
    "shard_gradients",
    "share_context",
]
