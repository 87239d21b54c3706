"""What a run will take, before it begins."""

from tigon.train.estimate.memory import Estimate, estimate

__all__ = ["Estimate", "estimate"]
