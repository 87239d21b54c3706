"""Tiny models and cases that several tests of benchmarks measure."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bench import kernels
from bench.attention_cases import Case as AttentionCase
from bench.generate_cases import LLAMA_8B
from bench.harness import Record

TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_LLAMA = LLAMA_8B | TINY | {"vocab_size": 1201, "head_dim": 16}
RAGGED_ATTENTION = AttentionCase("tiny", (5, 3, 1, 7), 8, (4, 2), 16, window=3)
SMALL_KERNELS = [
    kernels.streamed("rms_norm", 24, 64),
    kernels.streamed("rms_norm_residual", 24, 64),
    kernels.streamed("sandwich_norm", 24, 64),
    kernels.streamed("gated_act", 24, 32, variant="silu"),
    kernels.streamed("gated_act", 24, 32, variant="gelu_tanh"),
    kernels.streamed("sigmoid_gate", 24, 64),
    kernels.streamed("rope", 2, 7, 4, 2, 16),
    kernels.streamed("qk_norm_rope", 2, 7, 4, 2, 16),
    kernels.causal_conv_qkv(1, 7, 2, 3, 16),
    kernels.linear_attention("causal_conv", "B2 T7 24", 2, 7, 24, 3, elements=336),
    kernels.linear_attention("gated_norm", "24x16", 24, 16, elements=384, tensors=(3, 5)),
    kernels.cross_entropy(24, 97),
    *kernels.linear_cross_entropy(48, 32, 97, 1.05),
]
Patch = pytest.MonkeyPatch
Runs = dict[ModuleType, tuple[Callable[[Patch, Path], list[str]], Callable[[Record], None]]]


def pass_tiny(patch: Patch, root: Path) -> list[str]:
    """Its own tiny size is small enough."""
    return ["--tiny"]
