"""Products of a layer of Llama-3.1-8B with what follows them in their epilogue, and apart.

Prints JSON lines: of each case and way its errors beside fp32, then the time of each. Ways take
turns in blocks of products back to back, so that each is measured at the GPU's power limit.

T tokens, C model dim, I intermediate size, K columns of q, k and v

python bench/epilogues_side.py '{"cases": ["gate_up"], "seconds": 1.0, "tiny": false}'
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.epilogue_kernels import gated_product, gradient_product
from bench.harness import Record, progress
from bench.peers import imported
from bench.timing import deadline, relative_l2
from tigon.kernels import gated_act, rms_norm
from tigon.kernels.mlp.gated_act import gradient_and_product

SIZES = {"T": 8192, "C": 4096, "I": 14336, "K": 6144}
TINY_SIZES = {"T": 128, "C": 128, "I": 256, "K": 192}
BLOCK = 0.12  # seconds of one way at a time
PATIENCE = 40.0  # seconds in which a way must have compiled and run once
EPS = 1e-5
CUBLAS, ALONE, TRITON, QUACK = "cuBLAS, then a pass", "product alone", "Triton", "QuACK"
BETA = "cuBLAS, beta = 1"
TILES = {  # of QuACK: rows, columns, and whether two groups of warps take turns at the tensor cores
    "128 x 192, pingpong": (128, 192, True),
    "256 x 128": (256, 128, False),
    "128 x 256": (128, 256, False),
}
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Request:
    """What a process is asked to measure."""

    cases: tuple[str, ...]
    seconds: float  # of each way
    tiny: bool


@dataclass(frozen=True)
class Way:
    """One way to compute a case: `make` imports and compiles, and returns what is timed."""

    make: Callable[[], Run]
    names: tuple[str, ...]  # of its outputs, as the truth has them
    pairs: tuple[str, ...] = ()  # outputs whose columns are pairs of gate and up


@dataclass(frozen=True)
class Case:
    """Ways by their names, and the same numbers in fp32."""

    ways: dict[str, Way]
    truth: Callable[[], dict[str, Tensor]]


def config(tile: str) -> Any:
    """QuACK's description of a tile."""
    rows, columns, pingpong = TILES[tile]
    make: Any = imported("quack.gemm_config:GemmConfig")
    return make(tile_m=rows, tile_n=columns, pingpong=pingpong, is_dynamic_persistent=False)


def quack_ways(
    run: Callable[[Any], Run], names: tuple[str, ...], *pairs: str, tiles: int = len(TILES)
) -> dict[str, Way]:
    """A way for each of QuACK's first `tiles` tiles; `run` makes it from a tile's description."""
    return {
        f"{QUACK}, {tile}": Way(lambda tile=tile: run(config(tile)), names, pairs)
        for tile in list(TILES)[:tiles]
    }


def quack_product(a: Tensor, b: Tensor, rows: int, columns: int, chosen: Any, **more: Any) -> Run:
    """QuACK's a @ b with the tile `chosen`."""
    product: Any = imported("quack.gemm_interface:gemm_tuned").fn

    def run() -> tuple[Tensor, ...]:
        out = a.new_empty(rows, columns)
        product(a, b, out, config=chosen, **more)
        return (out,)

    return run


def interleave(x: Tensor) -> Tensor:
    """Columns [gate, up] as pairs of one of each."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def split_pairs(x: Tensor) -> Tensor:
    """Pairs of columns as [gate, up]."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def draw(*shape: int, scale: float = 1.0, device: str) -> Tensor:
    """Random numbers: on a GPU in bf16, of which Triton's interpreter has no products."""
    x = torch.randn(*shape, device=device).mul_(scale)
    return x.bfloat16() if x.is_cuda else x


def gate_up(n: dict[str, int], device: str) -> Case:
    """The product of gate and up, and SwiGLU of it; both are kept."""
    x, w = (
        draw(n["T"], n["C"], device=device),
        draw(2 * n["I"], n["C"], scale=0.02, device=device),
    )
    names = ("gate_up", "product")

    def base() -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return y, gated_act(y, "silu")

    def fused(chosen: Any) -> Run:
        call: Any = imported("quack.gemm_interface:gemm_gated")
        options = {"activation": "swiglu", "concat_layout": ("B",), "tuned": False}
        return partial(call, x, w.t(), config=chosen, **options)

    def truth() -> dict[str, Tensor]:
        y = F.linear(x.float(), w.float())
        gate, up = y.chunk(2, -1)
        return {"gate_up": y, "product": F.silu(gate) * up}

    ways = {
        CUBLAS: Way(lambda: base, names),
        ALONE: Way(lambda: lambda: (F.linear(x, w),), names[:1]),
        TRITON: Way(lambda: partial(gated_product, x, w), names),
        **quack_ways(fused, names, "gate_up"),
    }
    return Case(ways, truth)


def down_backward(n: dict[str, int], device: str) -> Case:
    """The gradient of down_proj's input, and from it those of gate and up, and SwiGLU again."""
    dy = draw(n["T"], n["C"], scale=1e-3, device=device)
    w = draw(n["C"], n["I"], scale=0.02, device=device)
    y = draw(n["T"], 2 * n["I"], device=device)
    names = ("gradient", "product")

    def base() -> tuple[Tensor, ...]:
        return gradient_and_product(dy @ w, y, "silu", False)

    def fused(chosen: Any) -> Run:
        call: Any = imported("quack.gemm_interface:gemm_dgated")
        options = {"activation": "swiglu", "tuned": False, "dynamic_scheduler": False}
        return partial(call, dy, w, interleave(y), config=chosen, **options)

    def truth() -> dict[str, Tensor]:
        leaf = y.float().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        product = F.silu(gate) * up
        product.backward(dy.float() @ w.float())
        assert leaf.grad is not None
        return {"gradient": leaf.grad, "product": product.detach()}

    ways = {
        CUBLAS: Way(lambda: base, names),
        ALONE: Way(lambda: lambda: (dy @ w,), ()),
        TRITON: Way(lambda: partial(gradient_product, dy, w, y), names),
        **quack_ways(fused, names, "gradient"),
    }
    return Case(ways, truth)


def residual(n: dict[str, int], device: str, columns: str) -> Case:
    """A product that ends a block's half, the residual stream added to it, and the next norm."""
    x = draw(n["T"], n[columns], device=device)
    w = draw(n["C"], n[columns], scale=0.02, device=device)
    stream, scale = draw(n["T"], n["C"], device=device), draw(n["C"], device=device)
    names = ("normed", "sum")

    def norm(total: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(total, scale, EPS), total

    def fused(chosen: Any) -> Run:
        product: Any = imported("quack.gemm_interface:gemm_tuned").fn

        def run() -> tuple[Tensor, ...]:
            out = torch.empty_like(stream)
            product(x, w.t(), out, stream, config=chosen)
            return norm(out)

        return run

    def truth() -> dict[str, Tensor]:
        total = torch.addmm(stream.float(), x.float(), w.float().t())
        return {"sum": total, "normed": F.rms_norm(total, (n["C"],), scale.float(), EPS)}

    ways = {
        CUBLAS: Way(lambda: lambda: rms_norm(F.linear(x, w), scale, EPS, residual=stream), names),
        BETA: Way(lambda: lambda: norm(torch.addmm(stream, x, w.t())), names),
        **quack_ways(fused, names, tiles=2),
    }
    return Case(ways, truth)


def gate_up_dx(n: dict[str, int], device: str) -> Case:
    """The gradient of the input of gate and up; QuACK reads pairs and the weight as it is."""
    dy = draw(n["T"], 2 * n["I"], scale=1e-3, device=device)
    w = draw(2 * n["I"], n["C"], scale=0.02, device=device)

    def fused(chosen: Any) -> Run:
        layout = {"concat_layout": ("B",)}
        return quack_product(interleave(dy), w, n["T"], n["C"], chosen, **layout)

    ways = {CUBLAS: Way(lambda: lambda: (dy @ w,), ("dx",)), **quack_ways(fused, ("dx",))}
    return Case(ways, lambda: {"dx": dy.float() @ w.float()})


def gate_up_dw(n: dict[str, int], device: str) -> Case:
    """The gradient of the weight of gate and up; QuACK reads pairs and writes rows as they are."""
    dy = draw(n["T"], 2 * n["I"], scale=1e-3, device=device)
    x = draw(n["T"], n["C"], device=device)

    def fused(chosen: Any) -> Run:
        layout = {"concat_layout": ("out",)}
        return quack_product(interleave(dy).t(), x, 2 * n["I"], n["C"], chosen, **layout)

    ways = {CUBLAS: Way(lambda: lambda: (dy.t() @ x,), ("dw",)), **quack_ways(fused, ("dw",))}
    return Case(ways, lambda: {"dw": dy.float().t() @ x.float()})


def qkv_dx(n: dict[str, int], device: str) -> Case:
    """The gradient of the input of q, k and v: one product, or one added to the other."""
    dy = draw(n["T"], n["K"], scale=1e-3, device=device)
    w = draw(n["K"], n["C"], scale=0.02, device=device)
    parts = [n["K"] * 2 // 3, n["K"] // 6, n["K"] // 6]

    def each(add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        (d, v), *others = zip(dy.split(parts, 1), w.split(parts), strict=True)
        dx = d @ v
        for d, v in others:
            dx = add(dx, d, v)
        return (dx,)

    names = ("dx",)
    ways = {
        CUBLAS: Way(lambda: lambda: (dy @ w,), names),
        "cuBLAS, q, k, v, sums": Way(lambda: lambda: each(lambda t, d, v: t.add_(d @ v)), names),
        f"q, k, v, {BETA}": Way(lambda: lambda: each(torch.Tensor.addmm_), names),
    }
    return Case(ways, lambda: {"dx": dy.float() @ w.float()})


CASES: dict[str, Callable[[dict[str, int], str], Case]] = {
    "gate_up": gate_up,
    "down, backward": down_backward,
    "gate_up, dX": gate_up_dx,
    "gate_up, dW": gate_up_dw,
    "down, residual": partial(residual, columns="I"),
    "o, residual": partial(residual, columns="C"),
    "q, k, v, dX": qkv_dx,
}


def check(way: Way, truth: dict[str, Tensor]) -> tuple[Run, Record]:
    """What is timed, and the relative error of each of its outputs."""
    with deadline(PATIENCE):
        run = way.make()
        outputs = dict(zip(way.names, run(), strict=False))
    errors = {
        name: relative_l2(split_pairs(y) if name in way.pairs else y, truth[name])
        for name, y in outputs.items()
    }
    return run, errors


def block_ms(run: Run, count: int) -> float:
    """Milliseconds of one run, of so many back to back."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def measure(case: Case, seconds: float) -> Record:
    """Errors and median milliseconds of each way, which take turns; an error of one that fails."""
    found: Record = {}
    runs: dict[str, Run] = {}
    truth = case.truth()
    for name, way in case.ways.items():
        try:
            runs[name], errors = check(way, truth)
            found[name] = {"errors": errors}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            progress(f"  {name}: {found[name]['error'][:160]}")
    del truth
    blocks: dict[str, list[float]] = {name: [] for name in runs}
    counts = {name: max(1, round(1e3 * BLOCK / block_ms(run, 5))) for name, run in runs.items()}
    for _ in range(max(1, round(seconds / BLOCK))):
        for name, run in runs.items():
            blocks[name].append(block_ms(run, counts[name]))
    for name, times in blocks.items():
        found[name] |= {"ms": median(times), "blocks": times}
    return found


def say(kind: str, **found: Any) -> None:
    print(json.dumps({"kind": kind, **found}), flush=True)


def main(text: str) -> None:
    request = Request(**json.loads(text))
    device, sizes = ("cpu", TINY_SIZES) if request.tiny else ("cuda", SIZES)
    for name in request.cases:
        torch.manual_seed(0)
        case = CASES[name](sizes, device)
        say("case", case=name, ways=measure(case, request.seconds))
        del case
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
