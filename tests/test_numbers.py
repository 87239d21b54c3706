"""The rule of numbers.py can fail, and its float64 is float64."""

import pytest
import torch
from torch import nn
from torch.nn.functional import softmax

from tests.support.numbers import FACTOR, FLOOR, assert_as_near, float64, relative_error

EPS = torch.finfo(torch.float32).eps


def off(truth: torch.Tensor, by: float) -> torch.Tensor:
    """fp32, and its relative error."""
    noise = torch.randn_like(truth)
    return (truth + noise * by * truth.norm() / noise.norm()).float()


def test_error_is_relative_to_the_truth() -> None:
    truth = torch.randn(50, 7, dtype=torch.float64) * 1e-9
    assert relative_error(off(truth, 3e-3), truth) == pytest.approx(3e-3, rel=1e-3)
    with pytest.raises(AssertionError):
        relative_error(truth[:, 0], truth)
    with pytest.raises(AssertionError, match="compares nothing"):
        relative_error(truth, truth * 0)


def test_twice_the_peers_error_and_a_floor() -> None:
    truth = torch.randn(50, 7, dtype=torch.float64)
    peer, allowed = off(truth, 20 * EPS), (20 * FACTOR + FLOOR) * EPS
    assert_as_near(off(truth, 0.95 * allowed), peer, truth)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_near(off(truth, 1.05 * allowed), peer, truth)
    assert_as_near(off(truth, 3.5 * EPS), truth.float(), truth)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_near(off(truth, 6 * EPS), truth.float(), truth)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_near(torch.full_like(peer, float("nan")), peer, truth)
    with pytest.raises(AssertionError, match="the same function"):
        assert_as_near(peer, off(truth, 0.01), truth)


def test_the_worst_peer_counts_for_each() -> None:
    truth = {name: torch.randn(99, dtype=torch.float64) for name in "ab"}
    peer = {"a": off(truth["a"], 20 * EPS), "b": off(truth["b"], EPS)}
    assert_as_near({name: off(t, 38 * EPS) for name, t in truth.items()}, peer, truth)
    with pytest.raises(AssertionError, match=r"^b: "):
        assert_as_near({"a": peer["a"], "b": off(truth["b"], 50 * EPS)}, peer, truth)
    with pytest.raises(AssertionError):
        assert_as_near({"a": peer["a"]}, peer, truth)


def test_inside_float64_nothing_is_rounded_to_float32() -> None:
    x = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    with float64():
        assert nn.Linear(2, 2).weight.dtype == torch.tensor(0.5).dtype == torch.float64
        assert torch.arange(3, dtype=torch.float32).dtype == torch.float64
        for y in (x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32)):
            assert torch.equal(y, x)
        y = softmax(x, dim=-1, dtype=torch.float32)
        y.square().sum().backward()
    assert torch.equal(y, x.softmax(-1)) and x.grad is not None
    assert torch.get_default_dtype() == torch.float32 == torch.ones(1).dtype


def test_inside_float64_what_cannot_be_promoted_is_refused() -> None:
    x = torch.randn(4)
    with float64(), pytest.raises(AssertionError, match=r"gives torch\.float32"):
        x + x
