"""Learning-rate schedules."""

import math
from collections.abc import Callable

from tigon.train.config import Config

# Share of the peak, 1 to 0, at a share of the steps after warm-up, 0 to 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "wsd": lambda done: min(1.0, 5.0 * (1.0 - done)),
}


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Of optimizer step `step`, counted from 0: up to lr by warmup_steps, then the schedule."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    share = SCHEDULES[config.schedule](done)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
