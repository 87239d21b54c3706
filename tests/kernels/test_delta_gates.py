"""The gates of the delta rule: dtypes, accuracy far from 0, and what is kept for backward."""

import pytest
import torch

from tests.kernels import definitions
from tests.support.saved import saved_storages
from tigon.kernels import delta_gates


def test_small_and_large_decays_have_all_digits() -> None:
    x = torch.tensor([-80.0, -30.0, -17.0, -5.0, -1e-3, 0.0, 0.7, 3.0, 19.9, 20.1, 80.0])
    zero = torch.zeros(1)
    a = x[:, None].requires_grad_()
    g, _ = delta_gates(a, zero.expand(11, 1), zero, zero)
    exact = torch.logaddexp(x.double(), zero.double())
    torch.testing.assert_close(-g[:, 0].double(), exact, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(g.sum(), a)
    torch.testing.assert_close(-grad[:, 0].double(), x.double().sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decays_are_in_fp32(dtype: torch.dtype, kernels_only: None) -> None:
    """Beta and the gradients of a and b are rounded once."""
    a, b = (torch.randn(70, 5).to(dtype).requires_grad_() for _ in "ab")
    A_log, dt_bias = (torch.randn(5, requires_grad=True) for _ in "Ad")
    inputs = a, b, A_log, dt_bias
    found, expected = delta_gates(*inputs), definitions.delta_gates(*inputs)
    assert [y.dtype for y in found] == [torch.float32, dtype]
    ups = torch.randn(70, 5), torch.randn(70, 5).to(dtype)
    ours = [*found, *torch.autograd.grad(found, inputs, ups)]
    theirs = [*expected, *torch.autograd.grad(expected, inputs, [up.double() for up in ups])]
    for y, wanted in zip(ours, theirs, strict=True):
        rounding = torch.finfo(dtype).eps if y.dtype == dtype else 1e-5
        torch.testing.assert_close(y.double(), wanted.double(), rtol=rounding, atol=1e-5)


def test_nothing_is_kept_but_the_projection(kernels_only: None) -> None:
    projection = torch.randn(2, 7, 12, requires_grad=True) * 1.0
    A_log, dt_bias = (torch.randn(4, requires_grad=True) for _ in "Ad")
    with saved_storages(projection, A_log, dt_bias) as kept:
        g, _ = delta_gates(projection[..., 4:8], projection[..., 8:], A_log, dt_bias)
    assert g.requires_grad and not kept
