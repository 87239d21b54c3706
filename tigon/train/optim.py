"""AdamW, learning-rate schedules and clipping."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Weight decay on matrices only, not on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """The global norm of the gradients, before they are scaled down to max_norm; 0 leaves them."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
