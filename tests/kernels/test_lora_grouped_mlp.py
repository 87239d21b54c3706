"""Experts with low-rank additions against sums of matrices in float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.definitions import grouped_mlp as exact
from tests.kernels.test_grouped_mlp import C, E, I, inputs
from tigon.kernels.mlp.lora_grouped_mlp import (
    LoRAFactors,
    lora_grouped_mlp,
    lora_grouped_mlp_ref,
    pad_rank,
)


def factors(ranks: tuple[int, int]) -> LoRAFactors:
    r, q = ranks
    shapes = (E, r, C), (E, 2 * I, r), (E, q, I), (E, C, q)
    return LoRAFactors(*((0.3 * torch.randn(s)).requires_grad_() for s in shapes))


def merged(gate_up: Tensor, down: Tensor, low: LoRAFactors) -> tuple[Tensor, Tensor]:
    low = LoRAFactors(*(t.double() for t in low))
    return gate_up.double() + low.b_up @ low.a_up, down.double() + low.b_down @ low.a_down


def test_the_reference_is_the_definition() -> None:
    x, gate_up, down, experts, weights = inputs()
    low = factors((3, 2))
    found = lora_grouped_mlp_ref(x, gate_up, down, low, experts, weights, "gelu")
    expected = exact(x, *merged(gate_up, down, low), experts, weights, "gelu")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.4, 1.0], ids=["some", "all"])
def test_absent_experts(share: float) -> None:
    """As of tokens some of whose experts are on other ranks."""
    x, gate_up, down, experts, weights = inputs()
    low = factors((3, 4))
    absent = torch.rand(experts.shape) < share
    absent[0] = True
    experts[absent] = E
    slots = int((~absent).sum())
    learned = [x.requires_grad_(), weights.requires_grad_(), *low]
    y = lora_grouped_mlp(x, gate_up, down, low, experts, weights, "silu", slots)
    # A further expert of zeros gives nothing
    more = [torch.cat((t, t.new_zeros(1, *t.shape[1:]))) for t in merged(gate_up, down, low)]
    expected = exact(x, *more, experts, weights, "silu")
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    up = torch.randn_like(y)
    found = torch.autograd.grad(y, learned, up)
    for a, b in zip(found, torch.autograd.grad(expected, learned, up.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


def test_ranks_are_filled_up_with_zeros() -> None:
    low = factors((5, 8))
    a, b = pad_rank(low[:2])
    assert a.shape == (E, 8, C) and b.shape == (E, 2 * I, 8)
    torch.testing.assert_close(b @ a, low.b_up @ low.a_up)
    assert all(t is own for t, own in zip(pad_rank(low[2:]), low[2:], strict=True))
