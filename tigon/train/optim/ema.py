"""The exponential moving average of the weights."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tigon.train.config import Config
from tigon.train.distributed import local
from tigon.train.optim.adamw import SIZE
from tigon.train.optim.offload import HostMemory


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
        buckets = list(_buckets(weights))
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


def ema_bytes(config: Config) -> float:
    """Returns the bytes of the average per trained parameter, over all ranks."""
    return 4.0 if config.ema_decay else 0.0


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's rows of the trained weights by name."""
    return {n: local(p.detach()) for n, p in model.named_parameters() if p.requires_grad}


def _buckets(weights: Mapping[str, Tensor]) -> Iterator[list[tuple[str, slice]]]:
    """Yields the weights as lists of (name, slice of rows); each but the last has at least SIZE
    elements, and fewer than twice as many unless a row is longer than that."""
    bucket: list[tuple[str, slice]] = []
    size = 0
    for name, weight in weights.items():
        if not weight.numel():
            continue
        count = max(1, SIZE // (weight.numel() // len(weight)))
        for row in range(0, len(weight), count):
            bucket.append((name, slice(row, row + count)))
            size += weight[row : row + count].numel()
            if size >= SIZE:
                yield bucket
                bucket, size = [], 0
    if bucket:
        yield bucket
