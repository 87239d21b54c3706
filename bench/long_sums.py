"""Which products in 16 bits lack some of their summands on this GPU: torch's own, and ours.

Gradients of weights are sums over all tokens. Both sides multiply the same dy [L, K] and x [L, C],
whose numbers are -1, 0 and 1, so that float32 sums are exact and a result is right or wrong; the
truth is torch's product in float32. L is each 128 j + 1 of some range, and other lengths.

    python bench/long_sums.py
"""

import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bench import harness
from bench.harness import Bench, Job, Record, heading, markdown
from tigon.kernels._long_sums import long_sum

TORCH, OURS = "torch", "tigon"
SIDES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {TORCH: torch.mm, OURS: long_sum}
# K and C: routers, factors of adapters with what they are multiplied by, and weights of small and
# of large models
SHAPES = {
    f"{k} x {c}": (k, c)
    for k, c in [
        *((8, 4096), (16, 4096), (64, 4096), (128, 4096), (16, 2048), (64, 2048), (128, 2048)),
        *((32, 576), (128, 64), (4096, 16), (1024, 16), (14336, 16), (4096, 64), (16, 14336)),
        *((576, 576), (960, 576), (256, 1152), (1152, 1024), (512, 1024), (576, 1536)),
        *((3072, 576), (1536, 1152), (1024, 1024), (2048, 2048), (4096, 4096)),
    ]
}


def lengths(least: int = 513, most: int = 16513) -> list[int]:
    """Every 128 j + 1, and lengths whose remainders of 64 are 1 or 2, or any."""
    return [n for n in range(least, most + 1) if n % 128 == 1 or n % 64 in (1, 2) or n % 37 == 0]


@torch.no_grad()
def wrong(
    side: Callable[[Tensor, Tensor], Tensor], k: int, c: int, given: list[int], device: str
) -> list[int]:
    """The lengths whose product is not the exact one, rounded to bfloat16."""
    draw = torch.Generator(device).manual_seed(0)
    dy, x = (
        torch.randint(-1, 2, (max(given), width), generator=draw, device=device).bfloat16()
        for width in (k, c)
    )
    differ = [
        (side(dy[:n].t(), x[:n]) != (dy[:n].float().t() @ x[:n].float()).bfloat16()).any()
        for n in given
    ]
    return [n for n, bad in zip(given, torch.stack(differ).tolist(), strict=True) if bad]


def run(job: Job) -> str:
    given = lengths(most=4096 if job.quick else 16513)
    job.record |= {"lengths": len(given), "wrong": {}}
    for name in job.only:
        found = {side: wrong(f, *SHAPES[name], given, "cuda") for side, f in SIDES.items()}
        job.record["wrong"][name] = found
        job.add()
    return show(job.record)


def show(record: Record) -> str:
    rows = []
    for name, found in record["wrong"].items():
        of_torch = found[TORCH]
        least = f"{of_torch[0]:,}" if of_torch else ""
        rest = f"{max(n % 64 for n in of_torch)}" if of_torch else ""
        rows.append([name, str(len(of_torch)), least, rest, str(len(found[OURS]))])
    head = [
        "K x C",
        "wrong",
        "the first at L =",
        "most summands behind a multiple of 64",
        "wrong with `long_sum`",
    ]
    title = f"{heading(record, {})}. {record['lengths']:,} lengths of each."
    return "\n\n".join([title, markdown(head, rows)])


BENCH = Bench("long_sums", __doc__, run, show, list(SHAPES))

if __name__ == "__main__":
    harness.main(BENCH)
