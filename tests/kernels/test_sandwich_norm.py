import sys

import pytest
import torch
from torch import Tensor

from tests.kernels.definitions import EPS
from tests.kernels.definitions import sandwich_norm as exact
from tigon.kernels.norm.sandwich_norm import sandwich_norm

OWN = sys.modules["tigon.kernels.norm.sandwich_norm"]
ORDERS = pytest.mark.parametrize(
    ("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")]
)


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The branch, the stream and both weights."""
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [(0.3 * torch.randn(s)).to(dtype).requires_grad_() for s in shapes]


def assert_results(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], leaves: list[Tensor]
) -> None:
    ups = [torch.randn(t.shape) for t in found]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found, leaves, ups)
    for a, b in zip(
        grads, torch.autograd.grad(expected, leaves, [u.double() for u in ups]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def kernels_only(path: str) -> None:
    if path != "triton":
        pytest.skip("about the kernels")


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_where_it_is_rounded(dtype: torch.dtype, offset: float, cast: str) -> None:
    leaves = [t.detach() for t in inputs((64, 256), dtype)]
    x, residual, post_weight, weight = leaves

    def norm(t: Tensor, w: Tensor) -> Tensor:
        h = t.float() / (t.float().square().mean(-1, keepdim=True) + EPS).sqrt()
        if cast == "before_weight":
            return ((offset + w).float() * h.to(dtype).float()).to(dtype)
        return (h * (offset + w.float())).to(dtype)

    normed, total = sandwich_norm(*leaves, EPS, offset=offset, cast=cast)
    # rsqrt and 1 / sqrt differ by an ulp of fp32, which now and then moves a rounding
    expected = (residual.float() + norm(x, post_weight).float()).to(dtype)
    assert total.dtype == normed.dtype == dtype
    assert (total != expected).float().mean() < 2e-3
    assert (normed != norm(total, weight)).float().mean() < 2e-3


def test_dtypes_that_are_left_to_torch() -> None:
    x, residual, *weights = (t.detach() for t in inputs((6, 40)))
    for dtype in (torch.float16, torch.float64):
        normed, total = sandwich_norm(x.to(dtype), residual.to(dtype), *weights, EPS)
        assert normed.dtype == total.dtype == dtype
        expected = exact(x, residual, *weights)
        torch.testing.assert_close(normed.double(), expected[0], rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(total.double(), expected[1], rtol=1e-2, atol=5e-3)
    assert sandwich_norm(x.half(), residual, *weights, EPS)[1].dtype == torch.float32
    wide = inputs((2, OWN.MAX_COLUMNS + 1))
    assert_results(sandwich_norm(*wide, EPS), exact(*wide), wide)


def test_only_what_is_needed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_only(path)
    leaves, up = inputs((7, 33)), torch.randn(7, 33)
    saved: list[bool] = []
    forward, sums = OWN._forward, OWN.sum_partials
    monkeypatch.setattr(OWN, "_forward", lambda *a: saved.append(a[1]) or forward(*a))
    summed: list[Tensor] = []
    monkeypatch.setattr(OWN, "sum_partials", lambda *a: summed.append(a[3]) or sums(*a))
    with torch.no_grad():
        sandwich_norm(*leaves, EPS)
    sandwich_norm(*(t.detach() for t in leaves), EPS)
    assert saved == [False, False]
    expected = torch.autograd.grad(exact(*leaves)[0], leaves, up.double())
    for wanted in ([0, 1], [0], [1], [2, 3], [2], [3]):
        given = [t if i in wanted else t.detach() for i, t in enumerate(leaves)]
        normed, _ = sandwich_norm(*given, EPS)
        found = torch.autograd.grad(normed, [leaves[i] for i in wanted], up)
        for i, a in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, expected[i], rtol=1e-4, atol=1e-5)
    assert len(summed) == 3  # none for frozen weights


def test_bad_inputs() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"residual \(8,\) does not fit x \(2, 8\)"):
        sandwich_norm(x, weight, weight, weight, EPS)
    with pytest.raises(ValueError, match=r"post_weight \(7,\) does not fit x \(2, 8\)"):
        sandwich_norm(x, x, torch.ones(7), weight, EPS)
    with pytest.raises(ValueError, match=r"weight \(7,\) does not fit x \(2, 8\)"):
        sandwich_norm(x, x, weight, torch.ones(7), EPS)
    with pytest.raises(ValueError, match=r"cast='never' is not one of \('before_weight'"):
        sandwich_norm(x, x, weight, weight, EPS, cast="never")
    with pytest.raises(ValueError, match="must not be negative"):
        sandwich_norm(x, x, weight, weight, -1.0)
    with pytest.raises(ValueError, match=f"x is on {x.device}; .*; weight is on meta"):
        sandwich_norm(x, x, weight, weight.to("meta"), EPS)
