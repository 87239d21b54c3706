"""Products with several weights in one tensor: values, gradients, and what backward keeps."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.recompute import recompute_above
from tigon.kernels import rms_norm
from tigon.kernels.linear.packed import packed_linear, packed_linear_ref
from tigon.kernels.runtime import runs_triton

SIZES = 12, 5, 7


def make(bias: bool, frozen: int | None = None) -> tuple[list[nn.Parameter], list[Tensor | None]]:
    """Weights [K_i, 9] and biases; one of the weights may be frozen."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(n, 9), i != frozen) for i, n in enumerate(SIZES)]
    biases = [nn.Parameter(torch.randn(n)) if bias else None for n in SIZES]
    return weights, biases


def run(product: object, x: Tensor, frozen: int | None, bias: bool) -> list[Tensor | None]:
    """The product, and the gradients of input, weights and biases."""
    weights, biases = make(bias, frozen)
    x = x.detach().requires_grad_()
    y = product(x, weights, biases)  # type: ignore[operator]
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in (*weights, *biases) if p is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [None, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_values_and_gradients(bias: bool, frozen: int | None, strided: bool) -> None:
    x = torch.randn(2, 9, 6).transpose(1, 2) if strided else torch.randn(2, 6, 9)
    actual = run(packed_linear, x, frozen, bias)
    for ours, theirs in zip(actual, run(packed_linear_ref, x, frozen, bias), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_normed_input_is_computed_again() -> None:
    """Backward keeps the norm's input in place of its output, also in a recomputed block."""
    weights, biases = make(True)
    scale = nn.Parameter(torch.randn(9))
    x = torch.randn(4, 6, 9, requires_grad=True)
    kept: list[tuple[int, ...]] = []

    def block(x: Tensor) -> Tensor:
        return packed_linear(rms_norm(x, scale, 1e-6), weights, biases)

    def keep(t: Tensor) -> Tensor:
        kept.append((t.data_ptr(), *t.shape))
        return t

    results = []
    for above, recomputed in ((float("inf"), False), (0, False), (0, True)):
        kept.clear()
        with recompute_above(above), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
            inputs = {at for at, *shape in kept if shape == [4, 6, 9]}
            leaves = [x, scale, *weights, *(b for b in biases if b is not None)]
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        if not recomputed and runs_triton(x):
            assert len(inputs) == (1 if above == 0 else 2)
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_and_one_row_use_linear() -> None:
    weights, biases = make(False)
    x = torch.randn(3, 9)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert packed_linear(x, weights, biases).dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(
            packed_linear(x[:1], weights, biases), packed_linear_ref(x[:1], weights, biases)
        )
