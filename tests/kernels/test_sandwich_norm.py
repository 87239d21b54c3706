import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels.norm.sandwich_norm import sandwich_norm, sandwich_norm_ref

OWN = sys.modules["tigon.kernels.norm.sandwich_norm"]
CUDA = torch.cuda.is_available()
# 41 and 101 rows make a program take several steps, of which the last is not full
SHAPES = [(1, 1), (2, 5, 123), (41, 1000), (101, 300), (3, 1152)]
if CUDA:
    SHAPES += [(63, 96), (1000, 2880), (2047, 2304), (100, 5376)]
EPS = 1e-2
ORDERS = pytest.mark.parametrize(
    ("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")]
)


def exact_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    x = x.double()
    rms = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5
    return x / rms * (weight.double() + offset)


def exact(
    x: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = residual.double() + exact_norm(x, post_weight, offset)
    return exact_norm(total, weight, offset), total


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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(shape: tuple[int, ...], offset: float, cast: str) -> None:
    leaves = inputs(shape)
    before = [t.detach().clone() for t in leaves]
    found = sandwich_norm(*leaves, EPS, offset=offset, cast=cast)
    assert_results(found, exact(*leaves, offset), leaves)
    assert all(torch.equal(t, b) and t._version == 0 for t, b in zip(leaves, before, strict=True))


def test_one_of_two_outputs_is_used() -> None:
    leaves, up = inputs((5, 33)), torch.randn(5, 33)
    for i, wanted in ((0, leaves), (1, leaves[:3])):
        found = torch.autograd.grad(sandwich_norm(*leaves, EPS)[i], wanted, up)
        expected = torch.autograd.grad(exact(*leaves)[i], wanted, up.double())
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_strided_inputs() -> None:
    wide, weights = torch.randn(4, 6, 40), torch.randn(2, 20)[:, ::2]
    for x in (wide[..., 5:15], wide[..., ::4], wide[:, ::2, :10], wide[..., :10].transpose(0, 1)):
        leaves = [x, wide.new_ones(10).expand(x.shape), *weights]
        leaves = [t.detach().requires_grad_() for t in leaves]
        assert_results(sandwich_norm(*leaves, EPS), exact(*leaves), leaves)
        found = torch.autograd.grad(sandwich_norm(*leaves, EPS)[0].sum(), leaves)
        expected = torch.autograd.grad(exact(*leaves)[0].sum(), leaves)  # expanded gradients
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100, 96), *([(2047, 2304), (63, 5376)] if CUDA else [])])
def test_half_precision_is_as_good_as_eager(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    leaves, ups = inputs(shape, dtype), torch.randn(2, *shape).to(dtype).unbind()

    def results(seam: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
        found = seam(*leaves)
        upstream = [u.to(found[0].dtype) for u in ups]
        return [*found, *torch.autograd.grad(found, leaves, upstream)]

    best = results(exact, [t.detach().double().requires_grad_() for t in leaves])

    def errors(seam: Callable[..., Any]) -> list[float]:
        return [
            ((a.double() - b).norm() / b.norm()).item()
            for a, b in zip(results(seam, leaves), best, strict=True)
        ]

    ours = errors(lambda *t: sandwich_norm(*t, EPS))
    for error, eager in zip(ours, errors(lambda *t: sandwich_norm_ref(*t, EPS)), strict=True):
        assert error <= 2 * eager


def test_fp32_weights_and_dtypes_that_the_kernels_leave_to_torch() -> None:
    x, residual, *weights = (t.detach() for t in inputs((6, 40)))
    for dtype in (torch.float16, torch.float64):
        normed, total = sandwich_norm(x.to(dtype), residual.to(dtype), *weights, EPS)
        assert normed.dtype == total.dtype == dtype
        expected = exact(x, residual, *weights)
        torch.testing.assert_close(normed.double(), expected[0], rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(total.double(), expected[1], rtol=1e-2, atol=5e-3)
    assert sandwich_norm(x.half(), residual, *weights, EPS)[1].dtype == torch.float32
    wide = inputs((2, OWN.WIDEST + 1))
    assert_results(sandwich_norm(*wide, EPS), exact(*wide), wide)


def test_no_rows() -> None:
    for shape in ((0, 8), (3, 0)):
        leaves = inputs(shape)
        normed, total = sandwich_norm(*leaves, EPS)
        assert normed.shape == total.shape == shape
        (normed.sum() + total.sum()).backward()
        assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves)


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


def test_gradients_are_the_same_each_time(path: str) -> None:
    leaves = inputs((70, 96))
    normed, total = sandwich_norm(*leaves, EPS)
    loss = (normed * total).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if path == "triton":
        with pytest.raises(RuntimeError, match=r"sandwich_norm .*second derivative"):
            torch.autograd.grad(loss, leaves, create_graph=True)


def test_operators_keep_torchs_rules(path: str) -> None:
    kernels_only(path)
    x, total, dy, dtotal = torch.randn(4, 6, 40)
    weights, rstd = torch.randn(2, 40).unbind(), torch.rand(12)
    torch.library.opcheck(OWN._forward.op, (x, True, total, *weights, EPS, 1.0, False))
    for rest in ((True, True, total, rstd, dy, dtotal), (True, False, total, rstd, dy, None)):
        torch.library.opcheck(OWN._backward.op, (x, *weights, *rest, 1.0, False))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_eager(dynamic: bool, path: str) -> None:
    kernels_only(path)

    def step(x: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return sandwich_norm(*sandwich_norm(x, residual, *weights, EPS), *weights, EPS)

    torch._dynamo.reset()
    compiled = torch.compile(
        step, backend="inductor" if CUDA else "aot_eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (6, 9) if dynamic else (6,):
        leaves, up = inputs((rows, 24)), torch.randn(rows, 24)
        found, expected = compiled(*leaves), step(*leaves)
        grads = [torch.autograd.grad(t, leaves, [up, up]) for t in (found, expected)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_graph_replay_is_eager() -> None:
    leaves, up = inputs((100, 1152), torch.bfloat16), torch.randn(100, 1152).bfloat16()

    def step() -> list[Tensor]:
        found = sandwich_norm(*leaves, EPS)
        return [*found, *torch.autograd.grad(found, leaves, [up, up])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (*leaves, up):
            t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


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
