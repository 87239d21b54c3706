"""Learning-rate schedules."""

import math
from collections.abc import Callable

from tigon.train.config import Config

# Share of the peak, 1 to 0, when a share of the way to the end is done, 0 to 1
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Of optimizer step `step`, counted from 0: up to lr in the warm-up, then the schedule."""
    warmup = count(config.warmup_steps, steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    shape: str = config.schedule
    length = max(1, steps - warmup)  # of the schedule's way down
    if config.schedule == "wsd":
        length, shape = min(length, max(1, count(config.decay_steps, steps))), config.decay_type
    done = max(0, step - (steps - length)) / length
    share = SHAPES[shape](done)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def count(value: float, steps: int) -> int:
    """A number of steps; below 1, a share of all."""
    return round(value * steps) if value < 1 else int(value)
