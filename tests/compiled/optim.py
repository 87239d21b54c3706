"""Forms of the optimizer's kernels, and the kernel that asks whether any compiles."""

from functools import partial

import torch

from tests.compiled.compiling import BF16, FP32, Forms, zeros
from tigon.kernels import runtime
from tigon.kernels.norm.grad_norm import SquaredNorm
from tigon.kernels.optim import adamw
from tigon.kernels.optim.adamw import AdamWSettings, AdamWSlot, FusedAdamW
from tigon.kernels.optim.low_bits import CodeTables
from tigon.train.optim import low_precision

CODES = torch.uint8
SETTINGS = AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3, stream=-(2**62))
KINDS = {
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, BF16, BF16),
    "8 bits": (BF16, BF16, CODES),
    "fp32, bf16 gradient": (FP32, BF16, FP32),
    "bf16, fp32 gradient and states": (BF16, FP32, FP32),
    "fp32, bf16 states": (FP32, FP32, BF16),
    "fp32, 8 bits": (FP32, FP32, CODES),
}


def forms() -> Forms:
    yield "increment", lambda: runtime._increment[(1,)](zeros(1, dtype=FP32))
    for name, kinds in KINDS.items():
        yield f"adamw {name}", partial(_adamw, *kinds)
    nearest = partial(_adamw, BF16, BF16, BF16, False)
    lines = partial(_adamw, BF16, BF16, BF16, lines=(24, 96))
    yield "adamw bf16, lines", lines
    yield "adamw alone, bf16, lines", partial(lines, alone=True)
    yield "adamw alone, bf16, lines of one", partial(lines, alone=True, lines=(1, 2))
    yield "adamw to nearest, odd", partial(nearest, count=1001)
    yield "adamw unscaled", partial(_adamw, FP32, FP32, FP32, scale=False)
    for name in ("fp32", "bf16", "8 bits"):
        yield f"adamw alone, {name}", partial(_adamw, *KINDS[name], alone=True)
        yield f"adamw and squares, {name}", partial(_adamw, *KINDS[name], squares=True)
    yield "adamw alone, to nearest, odd", partial(nearest, count=1001, alone=True)
    yield (
        "adamw alone, unscaled, one",
        partial(_adamw, FP32, FP32, FP32, scale=False, count=1, alone=True),
    )
    for name, dtype in {"bf16": BF16, "fp32": FP32}.items():
        yield f"squared_norm {name}", partial(SquaredNorm(), [zeros(64, 64, dtype=dtype)])
    yield "squared_norm odd", partial(SquaredNorm(), [zeros(1001)])


def _adamw(
    weight: torch.dtype,
    gradient: torch.dtype,
    states: torch.dtype,
    stochastic: bool = True,
    *,
    scale: bool = True,
    count: int = 2048,
    alone: bool = False,  # in a launch of its own
    lines: tuple[int, int] | None = None,
    squares: bool = False,
) -> None:
    codes = None
    if states == CODES:
        cpu = torch.device("cpu")
        tables = (low_precision.tables(signed, cpu) for signed in (True, False))
        codes = CodeTables.build(*tables)
    scales = [zeros(count // 256, 1, dtype=FP32) if codes else None for _ in range(2)]
    tensors = (zeros(count, dtype=dtype) for dtype in (weight, gradient, states, states))
    adamw.OWN_LAUNCH = 1 if alone else None
    optimizer = FusedAdamW(stochastic, codes)
    optimizer(
        0,
        [AdamWSlot(*tensors, *scales, lines=lines)],
        SETTINGS,
        zeros(dtype=FP32) if scale else None,
        [] if squares else None,
    )
