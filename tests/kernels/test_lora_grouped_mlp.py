"""Experts with low-rank additions against sums of matrices in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.test_grouped_mlp import C, E, I, N, exact, inputs
from tigon.kernels.mlp.lora_grouped_mlp import (
    Low,
    _backward,
    _forward,
    aligned,
    lora_grouped_mlp,
    lora_grouped_mlp_ref,
)

RANKS = {"both": (5, 8), "gate_up": (3, 0), "down": (0, 4)}


def factors(ranks: tuple[int, int]) -> Low:
    r, q = ranks
    shapes = (E, r, C), (E, 2 * I, r), (E, q, I), (E, C, q)
    return Low(*((0.3 * torch.randn(s)).requires_grad_() for s in shapes))


def merged(gate_up: Tensor, down: Tensor, low: Low) -> tuple[Tensor, Tensor]:
    low = Low(*(t.double() for t in low))
    return gate_up.double() + low.b_up @ low.a_up, down.double() + low.b_down @ low.a_down


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("frozen", [True, False])
def test_forward_and_gradients(ranks: tuple[int, int], frozen: bool) -> None:
    x, gate_up, down, experts, weights = inputs()
    low = factors(ranks)
    learned = [x.requires_grad_(), weights.requires_grad_(), *(t for t in low if t.numel())]
    if not frozen:
        learned += [gate_up.requires_grad_(), down.requires_grad_()]
    for again in (False, True):
        given = (x, gate_up, down, low, experts, weights, "silu")
        if again:
            y = checkpoint(lora_grouped_mlp, *given, use_reentrant=False)
        else:
            y = lora_grouped_mlp(*given)  # type: ignore[arg-type]
        expected = exact(x, *merged(gate_up, down, low), experts, weights, "silu")
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
        up = torch.randn_like(y)
        found = torch.autograd.grad(y, learned, up)
        for a, b in zip(found, torch.autograd.grad(expected, learned, up.double()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


def test_what_is_frozen_has_no_gradient() -> None:
    x, gate_up, down, experts, weights = inputs()
    x, low = x.requires_grad_(), factors((4, 4))
    for t in low:
        t.requires_grad_(False)
    y = lora_grouped_mlp(x, gate_up, down, low, experts, weights, "silu")
    expected = exact(x, *merged(gate_up, down, low), experts, weights, "silu")
    found, exactly = (torch.autograd.grad(t.sum(), x)[0] for t in (y, expected))
    torch.testing.assert_close(found, exactly, rtol=1e-4, atol=1e-4)


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
    a, b = aligned(low[:2])
    assert a.shape == (E, 8, C) and b.shape == (E, 2 * I, 8)
    torch.testing.assert_close(b @ a, low.b_up @ low.a_up)
    assert all(t is own for t, own in zip(aligned(low[2:]), low[2:], strict=True))


@pytest.mark.traced
def test_the_operators_are_what_they_say(path: str) -> None:
    if path == "reference":
        pytest.skip("there is no operator")
    x, gate_up, down, experts, weights = (t.detach() for t in inputs())
    low = [t.detach() for t in factors((4, 4))]
    tests = ("test_schema", "test_faketensor")
    given = (x, gate_up, down, low, experts, weights, "silu", None)
    torch.library.opcheck(_forward.op, given, test_utils=tests)
    _, *saved = _forward(*given)
    for wanted in ([True] * 8, [True, False, False, True] + [True] * 4):
        arguments = (x, gate_up, down, low, weights, wanted, *saved, torch.randn(N, C), "silu")
        torch.library.opcheck(_backward.op, arguments, test_utils=tests)
