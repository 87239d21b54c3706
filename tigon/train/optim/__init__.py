"""Optimizers, parameter groups, learning-rate schedules and clipping."""

from tigon.train.optim.build import OPTIMIZERS, build_optimizer, check_local_model, state_bytes
from tigon.train.optim.clip import clip, clip_gradients
from tigon.train.optim.ema import Ema, build_ema
from tigon.train.optim.groups import freeze, hidden_matrices, learning_rate, parameter_groups
from tigon.train.optim.in_backward import InBackward, check_ranks, parameter_buckets

__all__ = [
    "OPTIMIZERS", "Ema", "InBackward", "build_ema", "build_optimizer",
    "check_local_model", "check_ranks", "clip", "clip_gradients", "freeze",
    "hidden_matrices", "learning_rate", "parameter_buckets", "parameter_groups", "state_bytes",
]  # fmt: skip
