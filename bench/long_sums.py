"""Which products in 16 bits lack some of their summands on this GPU: torch's own, and ours.

Gradients of weights are sums over all tokens. Both sides multiply the same dy [L, K] and x [L, C],
whose numbers are -1, 0 and 1, so that float32 sums are exact and a result is right or wrong; the
truth is torch's product in float32. L is each 128 j + 1 of some range, other lengths, and for
results of up to 2^20 numbers also lengths of long rows.

    python -m bench long_sums                # half a minute on a GPU
    python -m bench long_sums --write-docs   # needs no GPU
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness import Bench, Job, Record, markdown, report
from tigon.kernels.linear.linear import chunked_matmul

Side = Callable[[Tensor, Tensor], Tensor]
TORCH, OURS = "torch", "tigon"
SIDES: dict[str, Side] = {TORCH: torch.mm, OURS: chunked_matmul}
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


MOST, LONGEST = 16513, 131072  # lengths; the longest are of small results alone
FEW = 2**20  # numbers of a small result


def lengths(least: int = 513, most: int = MOST) -> list[int]:
    """Every 128 j + 1, and lengths whose remainders of 64 are 1 or 2, or any."""
    return [n for n in range(least, most + 1) if n % 64 in (1, 2) or n % 37 == 0]


def long_lengths() -> list[int]:
    """Of any remainder of 128, most of them, and multiples of 32."""
    return [n for n in range(MOST + 1, LONGEST) if n % 193 == 0 or n % (32 * 31) == 0]


@torch.no_grad()
def wrong(
    sides: dict[str, Side], k: int, c: int, given: list[int], device: str
) -> dict[str, list[int]]:
    """The lengths of which a side's product is not the exact one, rounded to bfloat16."""
    draw = torch.Generator(device).manual_seed(0)
    dy, x = (
        torch.randint(-1, 2, (max(given), width), generator=draw, device=device).bfloat16()
        for width in (k, c)
    )
    differ: dict[str, list[Tensor]] = {name: [] for name in sides}
    for n in given:
        exact = (dy[:n].float().t() @ x[:n].float()).bfloat16()
        for name, side in sides.items():
            differ[name].append((side(dy[:n].t(), x[:n]) != exact).any())
    return {
        name: [n for n, bad in zip(given, torch.stack(found).tolist(), strict=True) if bad]
        for name, found in differ.items()
    }


def run(job: Job) -> None:
    job.record |= {"lengths": {}, "wrong": {}}
    for name in job.only:
        k, c = SHAPES[name]
        given = lengths(most=4096) if job.options.quick else lengths()
        if k * c <= FEW and not job.options.quick:
            given += long_lengths()
        job.record["lengths"][name] = len(given)
        job.record["wrong"][name] = wrong(SIDES, k, c, given, "cuda")
        job.add()


def show(record: Record) -> str:
    rows = []
    for name, found in record["wrong"].items():
        lost = found[TORCH]
        of = f"{len(lost)} of {record['lengths'][name]:,}"
        first = f"{lost[0]:,}" if lost else ""
        behind = str(max(n % 64 for n in lost)) if lost else ""
        share = f"1 of {min(n / (n % 64 or 64) for n in lost):,.0f}" if lost else ""
        rows.append([name, of, first, behind, share, str(len(found[OURS]))])
    head = ["K x C", "wrong numbers of tokens", "the smallest of them"]
    head += ["most tokens past a multiple of 64", "largest share of tokens omitted"]
    head += ["wrong with `long_sum`"]
    return report(record, markdown(head, rows))


BENCH = Bench(run, show, list(SHAPES), "docs/kernels.md")
