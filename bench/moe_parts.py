"""Each launch of a layer of experts, beside what it must do and beside torch's operations.

A grouped product's bound is the dense product of as many rows; that of a pass are its bytes, each
read or written once, at the rate of a large copy.

# N tokens, C model dim, I intermediate size, E experts, K experts per token, S = N K slots
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Record, markdown
from bench.timing import copy_bandwidth, took
from tigon.kernels import softmax_topk, softmax_topk_ref
from tigon.kernels.mlp.gated_act import gated_act, gated_act_ref
from tigon.kernels.mlp.grouped_mlp_passes import _act_backward
from tigon.kernels.mlp.grouped_product import grouped_product, grouped_weight_gradient
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.mlp.slot_order import sort_slots, sort_slots_ref
from tigon.kernels.runtime import runs_triton

Run = Callable[[], Any]
BF16 = 2


@dataclass(frozen=True)
class Part:
    """One launch, or a few small ones."""

    name: str
    run: Run
    bound: Run | int | None = None  # a dense product, or bytes
    torch: Run | None = None


def routing(logits: Tensor, chosen: Tensor, experts: int, k: int) -> list[Part]:
    """The choice of experts and the order of their slots."""
    up, like = torch.randn(len(logits), k, dtype=logits.dtype), logits.detach()

    def forward(function: Any) -> Run:
        return lambda: function(logits, k, normalize=True, dtype=logits.dtype)

    def both(function: Any) -> Run:
        run = forward(function)
        return lambda: torch.autograd.grad(run().weights, logits, up)

    return [
        Part("choice of experts", forward(softmax_topk), None, forward(softmax_topk_ref)),
        Part("choice, with its gradient", both(softmax_topk), None, both(softmax_topk_ref)),
        Part(
            "order of the slots",
            lambda: sort_slots(chosen, experts, False, fused=runs_triton(like)),
            None,
            lambda: sort_slots_ref(chosen, experts),
        ),
    ]


def parts(n: int, c: int, i: int, e: int, k: int) -> list[Part]:
    """All that a layer launches in a training step, in turn."""
    bf16: Any = {"dtype": torch.bfloat16}
    s, x = n * k, torch.randn(n, c, **bf16)
    gate_up, down = (torch.randn(e, *shape, **bf16) * 0.02 for shape in ((2 * i, c), (c, i)))
    logits = torch.randn(n, e, **bf16).requires_grad_()
    _, chosen, weights = softmax_topk(logits.detach(), k, normalize=True, dtype=torch.bfloat16)
    order, inverse, ends = sort_slots(chosen, e, False, fused=runs_triton(x))
    token, rows, hidden = order // k, spread_rows(x, inverse, k, s), torch.randn(s, 2 * i, **bf16)
    h = gated_act(hidden, "silu")
    wide, narrow = torch.randn(2 * i, c, **bf16), torch.randn(c, i, **bf16)

    def product(name: str, a: Tensor, matrices: Tensor, dense: Tensor, transposed: bool) -> Part:
        """With the matrices of experts, and with one."""
        given, matrix = matrices if transposed else matrices.mT, dense if transposed else dense.T
        return Part(
            name,
            lambda: grouped_product(a, matrices, ends, transposed=transposed),
            lambda: a @ matrix,
            lambda: F.grouped_mm(a, given, offs=ends),
        )

    def gradient(name: str, dy: Tensor, a: Tensor) -> Part:
        return Part(name, lambda: grouped_weight_gradient(dy, a, ends), lambda: dy.T @ a)

    def spread(name: str) -> Part:
        moved = BF16 * (n + s) * c
        given = (x, inverse, k, s)
        return Part(name, lambda: spread_rows(*given), moved, lambda: x[token])

    def combine(name: str, scale: Tensor | None) -> Part:
        given = (rows, inverse, scale, k)
        return Part(name, lambda: combine_rows(*given), BF16 * (n + s) * c)

    act = (hidden, h, order, weights, "silu", ())
    return [
        *routing(logits, chosen, e, k),
        spread("rows of tokens to slots"),
        product("gate and up", rows, gate_up, wide, False),
        Part(
            "activation",
            lambda: gated_act(hidden, "silu"),
            BF16 * 3 * s * i,
            lambda: gated_act_ref(hidden, "silu"),
        ),
        product("down", h, down, narrow, False),
        combine("weighted sum of slots", weights),
        spread("gradient to slots"),
        product("gradient of h", rows, down, narrow, True),
        Part(
            "gradient of the activation",
            lambda: _act_backward(*act, overwrite=False),
            BF16 * 6 * s * i,
        ),
        gradient("gradient of down", rows, h),
        product("gradient of rows", hidden, gate_up, wide, True),
        combine("sum of slots' gradients", None),
        spread("rows to slots again"),
        gradient("gradient of gate and up", hidden, rows),
    ]


def measure_parts(sizes: tuple[int, ...], quick: bool, device: str = "cuda") -> Record:
    """Milliseconds of each part, of its bound and of torch's operations."""
    torch.manual_seed(0)
    with torch.device(device):
        bandwidth = copy_bandwidth(device, 2**20 if quick else 2**32)
        found = [measured(part, bandwidth, quick) for part in parts(*sizes)]
    return {"sizes": sizes, "bytes_per_second": bandwidth, "parts": found}


def measured(part: Part, bandwidth: float, quick: bool) -> Record:
    """The figures of one part; `bandwidth` in bytes per second."""
    row: Record = {"name": part.name, "ms": took(part.run, 1.0 if quick else 40.0)}
    if isinstance(part.bound, int):
        row |= {"bound": "bytes", "bound_ms": 1e3 * part.bound / bandwidth}
    elif part.bound is not None:
        row |= {"bound": "dense GEMM", "bound_ms": took(part.bound, 1.0 if quick else 40.0)}
    if part.torch is not None:
        row["torch_ms"] = took(part.torch, 1.0 if quick else 40.0)
    return row


def parts_table(record: Record) -> str:
    """The parts as Markdown."""
    head = "part", "ms", "bound", "ms of the bound", "time over it", "ms of torch's operations"
    rows = []
    for row in record["parts"]:
        cells = [row["name"], f"{row['ms']:.3g}", row.get("bound", "")]
        bound = row.get("bound_ms")
        cells += ["", ""] if bound is None else [f"{bound:.3g}", f"{row['ms'] / bound:.2f}"]
        rows.append([*cells, f"{row['torch_ms']:.3g}" if "torch_ms" in row else ""])
    rate = record["bytes_per_second"] / 1e12
    return f"Launch by launch, a copy at {rate:.3g} TB/s:\n\n{markdown(head, rows)}"
