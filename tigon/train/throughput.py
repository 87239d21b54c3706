"""Counts the floating-point operations of training on a sequence, and those a GPU can make.

The count is of what the mathematics needs, so that a model's utilisation (MFU) is comparable
between implementations. Of a matrix product with n parameters each token needs 2n operations
forward, 2n for the gradient of its input and 2n for that of its weights: 6n. These are all
projections, the experts that a token is routed to, routers, and the head, for every token whether
it is a target or not; looking up an embedding is none. Attention needs 6 operations for each dim of
a key and of a value, of each head and each position that a token sees, which are those before it
and itself, within the window of the layer: what is masked does not count, as in NVIDIA's figures
since 2025 and unlike in the appendix of PaLM (arXiv 2204.02311), which counts twice as many. Nor do
recomputed activations, norms, activation functions, the loss or the optimizer. What is frozen has
no gradient of its weights, and what nothing trained comes before has none of its input.
"""

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from tigon.layers import (
    GatedDeltaNet,
    GroupRouter,
    Linear,
    LMHead,
    LowRank,
    LowRankEmbedding,
    SoftmaxAttention,
    SparseMoE,
    TopKRouter,
)
from tigon.models import CausalLM
from tigon.train.distributed import World

# Products of 16-bit floats with sums in float32, without sparsity, in 10^12 a second, by words of a
# GPU's name; the first that fits. Source: NVIDIA's data sheets.
PEAKS = {
    "GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "GH200": 989.4,
    "H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.4,
    "H800": 989.4, "H20": 148.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "A10": 125.0,
    "A10G": 70.0, "L40S": 362.1, "L40": 181.1, "L4": 121.0, "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Counts operations of training on sequences: `Cost.of(model)(lengths)`."""

    per_token: float = 0.0  # of the matrix products with parameters
    # Of attention, for each position that a token sees: by window, None where it sees all before
    per_position: dict[int | None, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Returns the cost of a model: the sum of its modules' operations."""
        per_token, per_position = 0.0, dict[int | None, float]()
        trained = False  # anything so far, so that gradients go on to it
        for module in model.modules():
            trained_before = trained
            own = list(module.parameters(recurse=False))
            trained = trained or any(p.requires_grad for p in own)
            if isinstance(module, SoftmaxAttention):
                inside = trained or any(p.requires_grad for p in module.parameters())
                dims = module.head_dim + module.value_dim
                each = (6.0 if inside else 2.0) * module.heads * dims
                per_position[module.window] = per_position.get(module.window, 0.0) + each
            elif isinstance(module, GatedDeltaNet):
                # What a token reads from the state and adds to it, and the query's product
                inside = trained or any(p.requires_grad for p in module.parameters())
                size = module.value_heads * module.key_dim * module.value_dim
                per_token += (18.0 if inside else 6.0) * size
            elif isinstance(module, nn.Conv1d):
                per_token += _product(module.weight, trained_before)
            elif isinstance(module, SparseMoE):
                share = module.per_token / len(module.experts.down_proj)
                experts = list(module.experts.parameters())
                per_token += share * sum(_product(p, trained) for p in experts)
            elif isinstance(module, Linear):
                per_token += _product(module.weight_meta, trained_before)
            elif isinstance(module, LMHead | TopKRouter | GroupRouter):
                per_token += _product(module.weight, trained_before)
            elif isinstance(module, LowRank):  # A's input gradient where its layer's is needed
                per_token += sum(_product(p, trained_before or p is not module.lora_A) for p in own)
            elif isinstance(module, LowRankEmbedding):
                per_token += _product(module.lora_embedding_B, True)  # looking up A is none
        return cls(per_token, per_position)

    def __call__(self, sequences: Iterable[int], before: np.ndarray | int = 0) -> float:
        """Returns the operations of forward and backward for sequences of these lengths; `before`:
        the tokens of another sequence that each goes on from."""
        lengths = np.fromiter(sequences, np.int64)
        total = self.per_token * int(lengths.sum())
        for window, each in self.per_position.items():
            seen = positions_seen(before + lengths, window) - positions_seen(before, window)
            total += each * int(seen.sum())
        return total


def positions_seen(lengths: np.ndarray | int, window: int | None) -> Any:
    """Returns how many positions the tokens of each causal sequence see, added up over its tokens:
    token i sees i + 1, at most `window` (None: all)."""
    full = lengths if window is None else np.minimum(lengths, window)
    return full * (full + 1) // 2 + (lengths - full) * full


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of a GPU for matrices of this dtype.

    None if unknown: on a CPU, on GPUs that are not listed or a part of one (MIG), and in float32,
    where it depends on TF32.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """Returns the peak FLOP/s in 16 bits of a GPU by its name; None if unknown or a part (MIG)."""
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    fits = (peak * 1e12 for gpu, peak in PEAKS.items() if set(gpu.split()) <= set(words))
    return next(fits, None)


def _product(weight: Tensor, input_gradient: bool) -> float:
    """Returns the operations of a product with `weight` for each token, forward and backward; a
    DTensor has its whole size. `input_gradient`: backward computes that of the input too."""
    return (2.0 + 2.0 * weight.requires_grad + 2.0 * input_gradient) * weight.numel()


class Meter:
    """Measures the speed of steps for metrics.jsonl, of a model that computes in `dtype`."""

    def __init__(self, model: CausalLM, world: World, dtype: torch.dtype):
        # Ranks of tensor parallelism have a share of each product
        self.cost, self.ranks = Cost.of(model), world.size // world.sizes.tensor
        self.world = world
        self.peak = peak_flops(world.device, dtype)  # of one GPU, in FLOPs a second
        self.dtype = str(dtype).removeprefix("torch.")

    @property
    def convention(self) -> str | None:
        """Returns a text that says what MFU is a share of; None on a CPU."""
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
        """Returns tokens, seconds, speed, MFU (None without a known peak) and peak memory of a step
        over sequences of these lengths on all ranks; `before`: the tokens that each goes on from,
        `waited`: seconds without data."""
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
            **peak_memory(self.world.device),
        }


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Returns the peak GiB so far: of tensors and of the allocator; on a CPU of the process."""
    if device.type == "cuda":
        had, taken = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"memory_gib": had / 2**30, "memory_reserved_gib": taken / 2**30}
    unit = 1 if sys.platform == "darwin" else 1024
    had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory_gib": had / 2**30, "memory_reserved_gib": None}
