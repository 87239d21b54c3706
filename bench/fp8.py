"""What a layer of Llama-3.1-8B in fp8 consists of beside its products, and how exact these sum.

Passes: the casts as they are in a step, beside the same results by separate operators, and beside
the time of a copy that moves as many bytes. Products: dX and dW with the tensor cores' fast
accumulation and without, back to back in turns, with errors beside fp32, and the factor by which
the fast sums are smaller.

    python -m bench fp8   # half a minute
"""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Job, Record, figure, markdown, progress, report
from bench.measure import Effort, randn
from bench.timing import in_blocks, relative_l2
from tigon.kernels.linear import fp8_mlp
from tigon.kernels.linear.fp8 import scaled_product
from tigon.kernels.linear.fp8_casts import (
    _cast_normed,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
)
from tigon.kernels.linear.maxima import Maxima
from tigon.kernels.mlp.gated_act import gated_act, gradient_and_product
from tigon.kernels.norm.rms_norm import backward_norm, recompute_norm

SIZES = {"T": 8192, "C": 4096, "I": 14336, "K": 6144}
TINY_SIZES = {"T": 64, "C": 64, "I": 128, "K": 96}
LAYERS, SECONDS = 32, 0.8
FUSED, SEPARATE = "fused", "separate"
Run = Callable[[], Any]
Passes = dict[str, tuple[int, dict[str, Run]]]  # bytes that the fused way moves, and the ways


def columns_of(x: Tensor) -> Tensor:
    """The largest magnitudes of its columns, as bits."""
    return x.float().abs().amax(0).view(torch.int32)


def gated(n: dict[str, int]) -> Passes:
    """The passes between the two products of a gated MLP."""
    y, d = randn(n["T"], 2 * n["I"]), randn(n["T"], n["I"])
    size = n["T"] * n["I"]

    def separate() -> None:
        gradient, product = gradient_and_product(d, y, "silu", False)  # writes over d
        cast_both(gradient)
        cast_columns(product)

    backward: dict[str, Run] = {FUSED: lambda: fp8_mlp.cast_gated_gradients(d, y, "silu")}
    forward: dict[str, Run] = {FUSED: lambda: fp8_mlp.cast_gated_rows(y, "silu")}
    return {
        "gated, forward": (5 * size, forward | {SEPARATE: lambda: cast_rows(gated_act(y, "silu"))}),
        "gated, backward": (17 * size, backward | {SEPARATE: separate}),
    }


def norms(n: dict[str, int]) -> Passes:
    """The passes between a norm and the products before and behind it."""
    x, scale = randn(n["T"], n["C"]), randn(n["C"])
    dy, dtotal = (randn(n["T"], n["C"], scale=1e-3) for _ in range(2))
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
    norm = rstd, None, scale, 0.0, True
    bits = columns_of(recompute_norm(x, *norm))
    needs = [True, False, False, True, False]
    size = x.numel()

    def backward(maxima: bool) -> None:
        given = x, None, None, scale, None, needs, maxima, rstd, dy, dtotal, 0.0, True
        dx, _, *found = backward_norm(*given)
        cast_both(dx, Maxima(*found) if maxima else Maxima(None, None))

    return {
        "norm again, by columns": (
            3 * size,
            {
                FUSED: lambda: _cast_normed(x, bits, rstd, scale, 0.0, True),
                SEPARATE: lambda: cast_columns(recompute_norm(x, *norm), bits),
            },
        ),
        "norm backward, both ways": (
            12 * size,
            {FUSED: lambda: backward(True), SEPARATE: lambda: backward(False)},
        ),
    }


def weights(n: dict[str, int]) -> Passes:
    """The casts of a weight, which nothing else computes."""
    w = randn(2 * n["I"], n["C"], scale=0.02)
    bits = columns_of(w)
    return {
        "weight by rows, and maxima": (3 * w.numel(), {FUSED: lambda: cast_rows_and_maxima(w)}),
        "weight by columns": (3 * w.numel(), {FUSED: lambda: cast_columns(w, bits)}),
    }


PASSES = {"gated": gated, "norms": norms, "weights": weights}
PRODUCTS = {"qkv": ("K", "C"), "o": ("C", "C"), "gate_up": ("2I", "C"), "down": ("C", "I")}


def pass_times(n: dict[str, int], job: Job, names: list[str]) -> None:
    """Adds the milliseconds of each way, and of a copy of as many bytes."""
    effort = Effort(rounds=1, total=60.0, least=5, most=60)
    for name in names:
        for what, (moved, ways) in PASSES[name](n).items():
            found = {}
            for way, run in ways.items():
                try:
                    found[way] = median(effort.times(run))
                except Exception as error:
                    progress(f"  {what}, {way}: {type(error).__name__}: {error}"[:160])
            copy = median(effort.copy(moved))
            progress(f"{what}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()))
            job.append("passes", {"name": what, "bytes": moved, "ms": found, "copy_ms": copy})


def product_errors(n: dict[str, int], name: str) -> Record:
    """Milliseconds and errors of dX and dW, whose sums are exact or fast."""
    rows, columns = (2 * n["I"] if k == "2I" else n[k] for k in PRODUCTS[name])
    x = randn(n["T"], columns) * torch.logspace(-1, 0.5, columns)
    w = randn(rows, columns, scale=1 / math.sqrt(columns))
    dy = randn(n["T"], rows)
    dy = (dy * torch.logspace(-4, 0, n["T"])[:, None]).bfloat16()
    x = x.bfloat16()
    found: Record = {"name": name}
    by_rows, by_columns = cast_both(dy)
    factors = {
        "dx": (by_rows, cast_columns(w), dy, w),
        "dw": (by_columns, cast_columns(x), dy.t(), x),
    }
    for what, (a, b, left, right) in factors.items():
        exact = left.float() @ right.float()
        ways: dict[str, Run] = {
            way: lambda a=a, b=b, fast=way == "fast": scaled_product(a, b, fast=fast)
            for way in ("exact", "fast")
        }
        sums = a.dequantize() @ b.dequantize().t()  # of the casts, in fp32
        errors = {way: relative_l2(run(), exact) for way, run in ways.items()}
        own = {way: relative_l2(run(), sums) for way, run in ways.items()}
        fast = ways["fast"]().double()
        factor = float((fast * sums.double()).sum() / sums.double().square().sum())
        del exact, sums, fast
        ms = {way: median(times) for way, times in in_blocks(ways, SECONDS).items()}
        found[what] = {"ms": ms, "errors": errors, "of_sums": own, "factor": factor}
    return found


def run(job: Job) -> None:
    n = TINY_SIZES if job.tiny else SIZES
    job.add(passes=[], products=[])
    torch.manual_seed(0)
    # Without high precision the truth would have tf32's 10 bits
    torch.set_float32_matmul_precision("highest")
    with torch.device("cpu" if job.tiny else "cuda"):
        for name in PRODUCTS:
            if name in job.only:
                job.append("products", product_errors(n, name))
        pass_times(n, job, [name for name in PASSES if name in job.only])


def show(record: Record) -> str:
    rows = []
    for row in record["passes"]:
        for way, ms in row["ms"].items():
            share = "" if way == SEPARATE else figure(row["copy_ms"] / ms)
            rows.append([row["name"], way, figure(ms), share])
    passes = markdown(("pass", "way", "ms", "speed over that of a copy"), rows)
    rows, saved = [], 0.0
    for row in record["products"]:
        for what in ("dx", "dw"):
            of = row[what]
            saved += LAYERS * (of["ms"]["exact"] - of["ms"]["fast"])
            errors = (f"{of[k][way]:.3e}" for k in ("errors", "of_sums") for way in of["ms"])
            times = (figure(ms) for ms in of["ms"].values())
            rows.append([f"{row['name']}, {what}", *times, *errors, f"{of['factor']:.5f}"])
    head = ("product", "exact, ms", "fast, ms", "error", "error, fast", "of the sum", "fast")
    products = markdown((*head, "factor of fast sums"), rows)
    tail = f"Fast sums would save {saved:.1f} ms of a step of {LAYERS} layers."
    return report(record, passes, products, tail)


BENCH = Bench(run, show, (*PRODUCTS, *PASSES), tiny=True)
