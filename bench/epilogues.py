"""What a layer gains if a product's epilogue does what a pass does after it, at the sizes of 8B.

SwiGLU, its backward and the residual addition: cuBLAS and Tigon's pass, the product alone, which is
the bound, cuBLAS with beta = 1, and QuACK's products, with errors beside fp32. Ways take turns in
blocks of products back to back, since products in a step run at the power limit. QuACK has gate and
up in pairs of columns, so its rows also count its products for dX and dW. Each case is a process.

    python -m bench epilogues                # a minute
    python -m bench epilogues --write-docs   # needs no GPU

# T tokens, C model dim, I intermediate size
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.harness import Bench, Job, Record, figure, markdown, progress, report
from bench.measure import randn
from bench.peers import imported
from bench.timing import deadline, in_blocks, relative_l2
from tigon.kernels import gated_act, rms_norm
from tigon.kernels.mlp.gated_act import gradient_and_product

SIZES, TINY_SIZES = (8192, 4096, 14336), (64, 64, 128)  # T, C, I
LAYERS, EPS = 32, 1e-5
PATIENCE = 40.0  # seconds in which a way must have compiled and run once
CUBLAS, ALONE, BETA, QUACK = "cuBLAS, then a pass", "product alone", "cuBLAS, beta = 1", "QuACK"
TILES = {  # of QuACK: rows, columns, and whether two groups of warps take turns at the tensor cores
    f"{QUACK}, 128 x 192, pingpong": (128, 192, True),
    f"{QUACK}, 256 x 128": (256, 128, False),
    f"{QUACK}, 128 x 256": (128, 256, False),
}
PAIRS = ("gate_up", "down, backward", "gate_up, dX", "gate_up, dW")  # that share a layout
RESIDUAL = "down, residual"
Run = Callable[[], tuple[Tensor, ...]]
# Ways by name, which import and compile when they are called, and the same numbers in fp32; QuACK's
# first output may be pairs of columns, and a way may leave out the last ones
Case = tuple[dict[str, Callable[[], Run]], Callable[[], list[Tensor]]]


def quack(name: str, *given: Any, tile: str, **more: Any) -> Run:
    """A call of bench's QuACK with one of its tiles."""
    rows, columns, pingpong = TILES[tile]
    config: Any = imported("quack.gemm_config:GemmConfig")
    chosen = config(tile_m=rows, tile_n=columns, pingpong=pingpong, is_dynamic_persistent=False)
    call: Any = imported(f"quack.gemm_interface:{name}")
    return partial(getattr(call, "fn", call), *given, config=chosen, **more)


def quack_ways(*given: Any, **more: Any) -> dict[str, Callable[[], Run]]:
    return {tile: partial(quack, *given, tile=tile, **more) for tile in TILES}


def written(make: Callable[[], Run], *outputs: Tensor) -> Callable[[], Run]:
    """A way whose product is written to tensors that are there."""

    def compiled() -> Run:
        run = make()
        return lambda: (run(), outputs)[1]

    return compiled


def interleave(x: Tensor) -> Tensor:
    """Columns [gate, up] as pairs of one of each."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def gate_up(t: int, c: int, i: int) -> Case:
    """The product of gate and up, and SwiGLU of it; both are kept."""
    x, w = randn(t, c), randn(2 * i, c, scale=0.02)

    def base() -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return y, gated_act(y, "silu")

    def truth() -> list[Tensor]:
        y = F.linear(x.float(), w.float())
        gate, up = y.chunk(2, -1)
        return [y, F.silu(gate) * up]

    how: Record = {"activation": "swiglu", "concat_layout": ("B",), "tuned": False}
    ways = {CUBLAS: lambda: base, ALONE: lambda: lambda: (F.linear(x, w),)}
    return ways | quack_ways("gemm_gated", x, w.t(), **how), truth


def down_backward(t: int, c: int, i: int) -> Case:
    """From the gradient of down's input those of gate and up, and SwiGLU again."""
    dy, w, y = randn(t, c, scale=1e-3), randn(c, i, scale=0.02), randn(t, 2 * i)

    def truth() -> list[Tensor]:
        leaf = y.float().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        product = F.silu(gate) * up
        return [*torch.autograd.grad(product, leaf, dy.float() @ w.float()), product.detach()]

    how: Record = {"activation": "swiglu", "tuned": False, "dynamic_scheduler": False}
    ways: dict[str, Callable[[], Run]] = {
        CUBLAS: lambda: lambda: gradient_and_product(dy @ w, y, "silu", False),
        ALONE: lambda: lambda: (dy @ w, y)[:0],
    }
    return ways | quack_ways("gemm_dgated", dy, w, interleave(y), **how), truth


def gradient(t: int, c: int, i: int, of_weight: bool) -> Case:
    """The gradient of gate and up's input, or of their weight, from pairs of columns."""
    dy = randn(t, 2 * i, scale=1e-3)
    other = randn(t, c) if of_weight else randn(2 * i, c, scale=0.02)
    left = (lambda d: d.t()) if of_weight else (lambda d: d)
    out = torch.empty(2 * i if of_weight else t, c, dtype=dy.dtype)
    how: Record = {"concat_layout": ("out" if of_weight else "B",)}
    ways = quack_ways("gemm_tuned", left(interleave(dy)), other, out, **how)
    found = {name: written(make, out) for name, make in ways.items()}
    base: dict[str, Callable[[], Run]] = {CUBLAS: lambda: lambda: (left(dy) @ other,)}
    return base | found, lambda: [left(dy.float()) @ other.float()]


def residual(t: int, c: int, i: int) -> Case:
    """A product that ends a block, the stream added to it, and the next norm."""
    x, w, stream, scale = randn(t, i), randn(c, i, scale=0.02), randn(t, c), randn(c)

    def truth() -> list[Tensor]:
        total = torch.addmm(stream.float(), x.float(), w.float().t())
        return [F.rms_norm(total, (c,), scale.float(), EPS), total]

    def beta() -> tuple[Tensor, ...]:
        total = torch.addmm(stream, x, w.t())
        return rms_norm(total, scale, EPS), total

    ways: dict[str, Callable[[], Run]] = {
        CUBLAS: lambda: lambda: rms_norm(F.linear(x, w), scale, EPS, residual=stream),
        BETA: lambda: beta,
    }
    return ways, truth


CASES: dict[str, Callable[..., Case]] = {
    "gate_up": gate_up,
    "down, backward": down_backward,
    "gate_up, dX": partial(gradient, of_weight=False),
    "gate_up, dW": partial(gradient, of_weight=True),
    RESIDUAL: residual,
}


def measure(name: str, seconds: float, tiny: bool) -> Record:
    """Errors and median milliseconds of each way of a case, or why there are none."""
    torch.manual_seed(0)
    found, runs = {}, dict[str, Run]()
    with torch.device("cpu" if tiny else "cuda"):
        ways, truth = CASES[name](*(TINY_SIZES if tiny else SIZES))
        exact = truth()
        for way, make in ways.items():
            try:
                with deadline(PATIENCE):
                    run = make()
                    outputs = [y.detach() for y in run()]
                if way in TILES and name in PAIRS[:2]:
                    outputs[0] = outputs[0].unflatten(-1, (-1, 2)).mT.flatten(-2)
                errors = [relative_l2(y, z) for y, z in zip(outputs, exact, strict=False)]
                found[way], runs[way] = {"errors": errors}, run
            except Exception as error:
                found[way] = {"error": f"{type(error).__name__}: {error}"[:300]}
        del exact
        for way, ms in in_blocks(runs, seconds).items():
            found[way]["ms"] = median(ms)
    return found


def run(job: Job) -> None:
    for name in job.only:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            given = name, 0.01 if job.tiny else job.options.seconds, job.tiny
            try:
                found = pool.submit(measure, *given).result()
            except Exception as error:  # it has crashed
                found = {CUBLAS: {"error": f"{type(error).__name__}: {error}"}}
        progress(f"{name}: " + ", ".join(f"{k} {figure(v.get('ms'))}" for k, v in found.items()))
        job.add(cases=job.record.get("cases", {}) | {name: found})


def saved_ms(record: Record, cases: tuple[str, ...], of: str) -> float | None:
    """Milliseconds that a step is shorter if these cases are computed so, at their fastest."""
    total = 0.0
    for case in cases:
        ways = record["cases"].get(case, {})
        times = [w["ms"] for k, w in ways.items() if k.startswith(of) and "ms" in w]
        if not times or "ms" not in ways.get(CUBLAS, {}):
            return None
        total += LAYERS * (ways[CUBLAS]["ms"] - min(times))
    return total


def show(record: Record) -> str:
    rows = []
    for case, ways in record["cases"].items():
        base = ways.get(CUBLAS, {}).get("ms")
        for name, way in ways.items():
            ms, errors = way.get("ms"), way.get("errors", ())
            cells = [figure(ms), figure(ms / base if ms and base else None)]
            said = ", ".join(f"{error:.2e}" for error in errors)
            rows.append(
                [case, name, *([harness.failure(way)] if "error" in way else [*cells, said])]
            )
    sums = {
        f"{QUACK}, all four products of gate and up": saved_ms(record, PAIRS, QUACK),
        f"{QUACK}, weights in pairs: two products": saved_ms(record, PAIRS[:2], QUACK),
        "a pass that costs nothing": saved_ms(record, PAIRS[:2], ALONE),
        f"{RESIDUAL}: {BETA}": saved_ms(record, (RESIDUAL,), BETA),
    }
    lines = [(name, "not measured" if ms is None else f"{ms:.2f}") for name, ms in sums.items()]
    head = ("case", "way", "ms", "over the first", "relative errors")
    step = markdown((f"ms less in a step of {LAYERS} layers", ""), lines)
    return report(record, markdown(head, rows), step)


OPTIONS = (("--seconds", {"type": float, "default": 1.0, "help": "of each way"}),)
BENCH = Bench(
    run,
    show,
    tuple(CASES),
    options=OPTIONS,
    libraries={"QuACK": "quack-kernels", "CUTLASS DSL": "nvidia-cutlass-dsl", "triton": "triton"},
    tiny=True,
)
