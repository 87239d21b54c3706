"""The exponential moving average of the weights."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tigon.settings.config import Config
from tigon.train.distributed import local
from tigon.train.optim.adamw import SIZE
from tigon.train.optim.offload import HostMemory
from tigon.utils.memory import split_by_size


class Ema:
    """Averages weights, decay * average + (1 - decay) * weights, float32 by name in `values`."""

    def __init__(self, model: nn.Module, decay: float, *, offload: bool = False) -> None:
        self.decay, self.average = decay, get_ema_multi_avg_fn(decay)
        self.memory = HostMemory(next(model.parameters()).device, offload)
        self.values = {
            name: self.memory.zeros(weight.shape, torch.float32)
            for name, weight in _trained(model).items()
        }
        self.begin(model)

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Sets the average to the current weights."""
        for name, weight in _trained(model).items():
            self.values[name].copy_(weight)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Updates the average; every rank calls this after each update of the weights."""
        weights = _trained(model)
        parts = [(name, rows) for name, weight in weights.items() for rows in _slices(weight)]
        buckets = list(split_by_size(parts, lambda part: weights[part[0]][part[1]].numel(), SIZE))
        self.memory.visit(
            [[self.values[name][rows] for name, rows in bucket] for bucket in buckets],
            lambda i, values: self.average(
                values, [weights[name][rows].float() for name, rows in buckets[i]], i
            ),
        )


def build_ema(model: nn.Module, config: Config) -> Ema | None:
    """Returns the moving average of the weights, or None without `ema_decay`."""
    if not config.ema_decay:
        return None
    return Ema(model, config.ema_decay, offload=config.optimizer_offload)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's rows of the trained weights by name."""
    return {n: local(p.detach()) for n, p in model.named_parameters() if p.requires_grad}


def _slices(weight: Tensor) -> Iterator[slice]:
    """Yields slices of rows of at most SIZE elements, unless a row has more."""
    if weight.numel():
        count = max(1, SIZE // (weight.numel() // len(weight)))
        yield from (slice(row, row + count) for row in range(0, len(weight), count))
