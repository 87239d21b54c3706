"""What a step took: time, tokens, operations and memory."""

import resource
import sys
from typing import Any

import numpy as np
import torch

from tigon.models import CausalLM
from tigon.train.flops import Cost, peak_flops
from tigon.train.parallel import World


class Meter:
    """What metrics.jsonl has of the speed of steps, for a model that `dtype` computes."""

    def __init__(self, model: CausalLM, world: World, dtype: torch.dtype):
        # Ranks of tensor parallelism have a share of each product
        self.cost, self.ranks = Cost.of(model), world.size // world.sizes.tensor
        self.world = world
        self.peak = peak_flops(world.device, dtype)  # of one GPU, in FLOPs a second
        self.dtype = str(dtype).removeprefix("torch.")

    @property
    def convention(self) -> str | None:
        """What MFU is a share of; None on a CPU, where nobody asks."""
        if self.world.device.type != "cuda":
            return None
        gpu = torch.cuda.get_device_name(self.world.device)
        if self.peak is None:
            return f"MFU: not known, for there is no figure of what {gpu} can do in {self.dtype}"
        return (
            f"MFU: of {self.peak / 1e12:g} TFLOP/s ({gpu}, {self.dtype}, dense); 6 FLOPs for each "
            "parameter of a product and token, attention only where a token sees, nothing twice"
        )

    def __call__(
        self, lengths: np.ndarray, before: np.ndarray, targets: int, seconds: float, waited: float
    ) -> dict[str, Any]:
        """Of a step over sequences of these lengths, which go on from so many tokens of others, on
        all ranks together; `waited` for data."""
        tokens, mfu = int(lengths.sum()), None
        if self.peak is not None:
            mfu = self.cost(lengths, before) / seconds / (self.peak * self.ranks)
        return {
            "tokens": tokens,
            "supervised_tokens": targets,
            "step_seconds": seconds,
            "data_seconds": waited,
            "data_share": waited / seconds,
            "tokens_per_second": tokens / seconds,
            "mfu": mfu,
            **memory(self.world.device),
        }


def memory(device: torch.device) -> dict[str, float | None]:
    """The most so far, in GiB: that tensors had and that the allocator took of the GPU; on a CPU
    what this process had."""
    if device.type == "cuda":
        had, taken = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"memory_gib": had / 2**30, "memory_reserved_gib": taken / 2**30}
    unit = 1 if sys.platform == "darwin" else 1024
    had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory_gib": had / 2**30, "memory_reserved_gib": None}
