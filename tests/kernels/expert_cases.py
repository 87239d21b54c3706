"""Cases of experts and their routers, and of low-rank additions to them and to linear layers.

# C model dim, I inner dim, E experts, N rows
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels import definitions as exact
from tests.kernels.conftest import CUDA
from tests.kernels.op_case import HALF, Call, Inputs, OpCase
from tigon.kernels import grouped_mlp, grouped_mlp_ref, lora_linear, lora_linear_ref, softmax_topk
from tigon.kernels.linear.lora import LoRATerm
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.kernels.mlp.grouped_mlp import unchecked_grouped_mlp
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases, LoRAFactors


def experts(n: int, c: int, i: int, e: int, k: int) -> Inputs:
    """No token chooses the last expert but one."""
    chances = torch.rand(n, e)
    if e > k:
        chances[:, -2] = -1
    weights, chosen = chances.topk(k)
    return {
        "x": torch.randn(n, c),
        "gate_up": torch.randn(e, 2 * i, c) / c**0.5,
        "down": torch.randn(e, c, i) / i**0.5,
        "experts": chosen,
        "weights": weights,
    }


# C and I are multiples of 8, which the kernel needs in 16 bits; 7 and 5 start rows at no multiple
# of 16 bytes
EXPERTS = [
    *(
        (6, 16, 24, 5, 2),
        (13, 24, 40, 7, 3),
        (1, 24, 40, 7, 3),
        (1, 24, 40, 7, 1),
        (13, 24, 40, 7, 1),
    ),
    *((13, 24, 40, 1, 1), (13, 24, 40, 3, 3), (13, 24, 40, 90, 3)),
    *((13, 7, 5, 7, 3), (13, 8, 5, 7, 3), (13, 1, 1, 7, 3)),
]


def experts_case(act: str, sizes: Sequence[Any] = EXPERTS[:1]) -> OpCase:
    return OpCase(
        grouped_mlp, exact.grouped_mlp, experts, grouped_mlp_ref, {"act": act}, sizes,
        [(700, 328, 200, 7, 3)], [(0, 24, 40, 7, 3)],
        halves=HALF if CUDA else HALF[:1],  # the interpreter has no products of bf16
        autocast=("x", "gate_up", "down"), second="grouped_mlp",
    )  # fmt: skip


def topk_case(normalize: bool) -> OpCase:
    def run(**given: Any) -> tuple[Tensor, Tensor]:
        probs, _, weights = softmax_topk(**given)
        return probs, weights

    def make(n: int, e: int, k: int) -> Inputs:
        # No two as near as half precision's numbers: rounding does not choose the larger
        return {"logits": torch.rand(n, e).argsort(1) * (8.0 / e) - 4, "k": k}

    return OpCase(
        run, exact.softmax_topk, make, None, {"normalize": normalize},
        [(6, 5, 2), (70, 40, 3), (3, 9, 9), (1, 1, 1), (2, 3000, 5)], [], [(0, 5, 2)],
        result=torch.float32, second="softmax_topk",
    )  # fmt: skip


CLAMPED = ClampedSwiGLU(1.702, 0.6)


def biased_experts(transposed: bool) -> Callable[..., Inputs]:
    def make(n: int, c: int, i: int, e: int, k: int) -> Inputs:
        made = experts(n, c, i, e, k)
        if transposed:
            made |= {name: made[name].mT.contiguous() for name in ("gate_up", "down")}
        return made | {"gate_up_bias": torch.randn(e, 2 * i), "down_bias": torch.randn(e, c)}

    return make


def with_biases(function: Call) -> Call:
    def call(gate_up_bias: Tensor, down_bias: Tensor, **given: Any) -> Any:
        return function(**given, biases=ExpertBiases(gate_up_bias, down_bias))

    return call


def biased_case(act: Any, transposed: bool, sizes: Sequence[Any] = EXPERTS[:1]) -> OpCase:
    names = "x", "gate_up", "down", "gate_up_bias", "down_bias"
    return replace(
        experts_case("silu", sizes), operator=with_biases(grouped_mlp),
        definition=with_biases(exact.grouped_mlp), inputs=biased_experts(transposed),
        eager=with_biases(grouped_mlp_ref), options={"act": act, "transposed": transposed},
        autocast=names,
    )  # fmt: skip


# Low-rank additions

# Of each part the first column of y, columns, rank and scale
PARTS = {
    "ends": ((0, 30, 3, 0.5), (50, 20, 5, -1.5)),
    "one": ((0, 70, 4, 2.0),),
    "all": ((0, 30, 4, 2.0), (30, 20, 4, 2.0), (50, 20, 4, 2.0)),
    "inside": ((30, 20, 1, -2.0),),
}
FACTORS = {"both": (5, 8), "gate_up": (3, 0), "down": (0, 4)}


def lora_case(*constant: str, layout: str = "ends") -> OpCase:
    parts = PARTS[layout]
    names = [f"b{i}" for i in range(len(parts))]

    def additions(n: int, c: int, k: int) -> Inputs:
        made = {
            "x": torch.randn(2, n, c),
            "weight": torch.randn(k, c) / c**0.5,
            "bias": torch.randn(k),
            "a": torch.randn(sum(rank for *_, rank, _ in parts), c) / c**0.5,
        }
        return made | {n: torch.randn(p[1], p[2]) for n, p in zip(names, parts, strict=True)}

    def with_parts(function: Call) -> Call:
        def call(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, **bs: Tensor) -> Tensor:
            added = [LoRATerm(p[0], bs[n], p[3]) for n, p in zip(names, parts, strict=True)]
            return function(x, weight, bias, a, added)

        return call

    def definition(**inputs: Tensor) -> Tensor:
        return with_parts(lora_linear_ref)(**{n: x.double() for n, x in inputs.items()})

    return OpCase(
        with_parts(lora_linear), definition, additions, with_parts(lora_linear_ref),
        sizes=[(3, 48, 70), (1, 48, 70)], empty=[(0, 48, 70)], constant=constant,
        parameters=("weight", "bias", "a", *names),
        second="low-rank additions",
    )  # fmt: skip


def low_rank_experts(r: int, q: int) -> Inputs:
    n, c, i, e, k = EXPERTS[0]
    shapes = {"a_up": (e, r, c), "b_up": (e, 2 * i, r), "a_down": (e, q, i), "b_down": (e, c, q)}
    return experts(n, c, i, e, k) | {name: 0.3 * torch.randn(s) for name, s in shapes.items()}


def with_factors(function: Call) -> Call:
    def call(
        x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, **low: Any
    ) -> Any:
        low_rank = LoRAFactors(**low)
        return function(x, gate_up, down, experts, weights, "silu", low=low_rank)

    return call


def merged(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: str,
    low: LoRAFactors,
) -> Tensor:
    """By sums of matrices."""
    low = LoRAFactors(*(t.double() for t in low))
    whole = gate_up.double() + low.b_up @ low.a_up, down.double() + low.b_down @ low.a_down
    return exact.grouped_mlp(x, *whole, experts, weights, act)


def transposed_low_rank(r: int, q: int) -> Inputs:
    made = low_rank_experts(r, q)
    return made | {name: made[name].mT.contiguous() for name in ("gate_up", "down")}


def merged_transposed(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, act: str, **low: Any
) -> Tensor:
    return merged(x, gate_up.mT, down.mT, experts, weights, act, low["low"])


def lora_experts_case(*constant: str) -> OpCase:
    return OpCase(
        with_factors(unchecked_grouped_mlp), with_factors(merged), low_rank_experts, None, {},
        list(FACTORS.values()), constant=constant, second="lora_grouped_mlp",
    )  # fmt: skip


def lora_transposed_case() -> OpCase:
    return replace(
        lora_experts_case(), inputs=transposed_low_rank, definition=with_factors(merged_transposed),
        operator=with_factors(partial(unchecked_grouped_mlp, transposed=True)),
    )  # fmt: skip
