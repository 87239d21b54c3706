"""Optimizers, learning-rate schedules and clipping."""

from tigon.train.optim.build import build_optimizer
from tigon.train.optim.clip import clip_gradients
from tigon.train.optim.schedule import learning_rate

__all__ = ["build_optimizer", "clip_gradients", "learning_rate"]
