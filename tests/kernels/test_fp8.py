"""Products in 8-bit floats: casts bit for bit, and products and gradients of these."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kernels.fp8 import SMALL, assert_same, operands
from tests.support.numbers import relative_error
from tigon.kernels import fp8_linear, fp8_linear_ref
from tigon.kernels.linear import fp8, fp8_casts
from tigon.kernels.linear.fp8_casts import (
    ScaledMatrix,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
)
from tigon.kernels.linear.maxima import Maxima

SHAPES = [(1, 16), (5, 80), (20, 144)]  # columns that end inside a tile


def exactly(x: Tensor) -> ScaledMatrix:
    """What a row cast is, in Python's own numbers."""
    scales = []
    for row in x.abs().float().tolist():
        top = max(row)
        scale = 2.0**-126
        while top > 448 * scale:
            scale *= 2
        scales.append(scale)
    scale = torch.tensor(scales)
    return ScaledMatrix(
        (x.double() / scale.double()[:, None]).float().to(torch.float8_e4m3fn), scale
    )


def turned(x: Tensor) -> Tensor:
    return F.pad(x.t(), (0, -x.shape[0] % 16)).contiguous()


def spread(rows: int, columns: int) -> Tensor:
    """Rows and columns of very different sizes, zeros, ties, and the edges of the format."""
    x = torch.randn(rows, columns) * torch.logspace(-20, 10, rows)[:, None]
    x *= torch.logspace(-3, 2, columns)
    x[0, :7] = torch.tensor([448, -448, 1.0625, 1.1875, 126.24, 2.0**-10, 3 * 2.0**-10])
    if rows > 4:
        x[1], x[2, 1:], x[2, 0] = 0, 0, 450.0  # the next power of two
        x[3] = 2.0**-126
    return x.bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts_have_the_bits_of_torch(path: str, shape: tuple[int, int]) -> None:
    x = spread(*shape)
    rows, columns = exactly(x), exactly(turned(x))
    assert_same(cast_rows(x), rows)
    assert_same(cast_columns(x), columns)
    part = F.pad(x, (8, 24))[:, 8:-24]  # rows of a larger matrix
    assert_same(cast_rows(part), rows)
    for given in (x, part):
        for found, expected in zip(cast_both(given), (rows, columns), strict=True):
            assert_same(found, expected)


def test_every_bf16_mantissa_rounds_to_nearest_even(path: str) -> None:
    """At all exponents down to those where nothing but zero is left, with both signs."""
    mantissas = 1 + torch.arange(128) / 128
    x = (mantissas * 2.0 ** torch.arange(-12, 8)[:, None]).view(1, -1)
    x = torch.cat([x, -x, x.new_full((1, 1), 448).expand_as(x)], 1).bfloat16()
    assert_same(cast_rows(x), exactly(x))


def test_rows_too_wide_to_be_held(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no maxima of columns."""
    monkeypatch.setattr(fp8_casts, "MAX_COLUMNS", 64)
    monkeypatch.setattr(fp8_casts, "STEP", 32)
    x = spread(5, 80)
    rows, bits = cast_rows_and_maxima(x)
    assert_same(rows, exactly(x))
    assert_same(cast_rows(x), exactly(x))
    assert bits is None


def test_a_matrix_of_several_tiles(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_casts, "TILE", SMALL)
    monkeypatch.setattr(fp8_casts, "STRIP", 32)
    x = spread(37, 40)
    rows, columns = cast_both(x)
    assert_same(rows, exactly(x))
    assert_same(columns, exactly(turned(x)))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_number_not_finite_makes_its_row_nan(path: str, bad: float) -> None:
    x = spread(20, 48)
    x[4, 5] = bad
    rows, columns = cast_both(x)
    for found, at, alone in ((rows, 4, x), (columns, 5, turned(x))):
        clean = alone.clone()
        clean[at] = 0
        expected = exactly(clean)
        expected.data[at], expected.scale[at] = math.nan, math.nan
        assert_same(found, expected)
    y = fp8_linear(x, torch.ones(16, 48).bfloat16())
    assert y[4].isnan().all() and y.isfinite().all(1).sum() == 19


def bits(x: Tensor, dim: int) -> Tensor:
    return x.float().abs().view(torch.int32).amax(dim)


def maxima(x: Tensor) -> Maxima:
    return Maxima(bits(x, 1), bits(x, 0))


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("shape", [*SHAPES, (37, 48)], ids=str)
def test_casts_with_maxima_that_are_known(
    kernels_only: None, shape: tuple[int, int], bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the row cast, of programs with several rows each, or by another operator."""
    monkeypatch.setattr(fp8_casts, "COLUMNS_PER_SM", 16)
    x = spread(*shape)
    if bad is not None:
        x[-1, 5] = bad
    expected = cast_both(x)
    known = maxima(x)
    rows, bits = cast_rows_and_maxima(F.pad(x, (8, 24))[:, 8:-24])
    assert_same(rows, expected[0])
    assert bits is not None
    found, wanted = (x.view(torch.float32) for x in (bits, known.columns))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)  # whichever NaN

    def again(*_: object) -> None:
        raise AssertionError("the maxima are known")

    monkeypatch.setattr(fp8_casts, "_maxima", again)
    assert_same(cast_columns(x, bits), expected[1])
    for found, wanted in zip(cast_both(x, known), expected, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("lead", [(1,), (3, 7)], ids=str)
def test_products_and_gradients_are_those_of_the_casts(lead: tuple[int, ...]) -> None:
    x, weight, dy = operands(*lead, K=48, N=16)
    y = fp8_linear(x, weight)
    results = y.detach(), *torch.autograd.grad(y, (x, weight), dy)
    rows, by_token, w = x.detach().flatten(0, -2), dy.flatten(0, -2), weight.detach()
    factors = (rows, w), (by_token, w.t()), (turned(by_token), turned(rows))
    for result, pair in zip(results, factors, strict=True):
        a, b = (exactly(factor).dequantize().double() for factor in pair)
        exact, scale = (x.view(result.shape) for x in (a @ b.t(), a.abs() @ b.abs().t()))
        # One rounding to bf16; a tensor core may lose 2^-13 of the sum of magnitudes besides
        assert ((result.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-12 * scale).all()


def test_autocast_is_refused() -> None:
    x, weight, _ = operands(4, K=32, N=16)
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        fp8_linear(x, weight)


def test_the_path_is_the_definition(path: str) -> None:
    """Bit for bit on a CPU, where both have one product."""
    x, weight, dy = operands(5, K=32, N=16)
    bias = torch.randn(16).bfloat16().requires_grad_()
    found, expected = (
        [y := run(x, weight, bias), *torch.autograd.grad(y, (x, weight, bias), dy)]
        for run in (fp8_linear, fp8_linear_ref)
    )
    for ours, theirs in zip(found, expected, strict=True):
        if x.is_cuda:
            assert relative_error(ours, theirs) < 2**-8
        else:
            assert torch.equal(ours, theirs)
    assert torch.equal(found[0], fp8_linear(x, weight) + bias)


def test_error_is_that_of_three_mantissa_bits(path: str) -> None:
    """An element is off by at most 2^-4 of itself, and by 2^-4 / sqrt(3) / E[m] at random in the
    mean, m in [1, 2): about 2.6%. A product has that of two factors, sqrt(2) times as much, since
    the errors of its terms are independent."""
    if path == "triton" and not torch.cuda.is_available():
        pytest.skip("the casts have the same bits, and take long in the interpreter")
    x, weight, dy = operands(256, K=512, N=256)
    y = fp8_linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    a, b, d = (t.detach().double() for t in (x, weight, dy))
    for found, exact in ((y, a @ b.t()), (dx, d @ b), (dw, d.t() @ a)):
        assert 0.02 < relative_error(found, exact) < 0.045
    for t in (x, weight, dy):
        rows = cast_rows(t.detach())
        off = (rows.dequantize() - t.detach().float()).abs()
        assert (
            off <= (2**-4 * t.detach().float().abs()).maximum(rows.scale[:, None] * 2**-10)
        ).all()


@pytest.mark.parametrize("again", [False, True])
def test_maxima_of_the_forward_product_serve_backward(
    path: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone those of the gradient are computed then, in a recomputed layer, too."""
    x, weight, dy = operands(3, K=32, N=16)
    first = nn.Parameter(torch.randn(32, 32).bfloat16())
    made, maxima_of = [], fp8_casts._maxima
    monkeypatch.setattr(fp8_casts, "_maxima", lambda x, *how: made.append(x) or maxima_of(x, *how))

    def layers(x: Tensor) -> Tensor:
        return fp8_linear(fp8_linear(x, first), weight)

    wanted = x, first, weight
    y = checkpoint(layers, x, use_reentrant=False) if again else layers(x)
    found = torch.autograd.grad(y, wanted, dy)
    assert len(made) == (2 if path == "triton" else 0)
    monkeypatch.setattr(fp8, "cast_rows_and_maxima", without_maxima)
    for ours, theirs in zip(found, torch.autograd.grad(layers(x), wanted, dy), strict=True):
        assert torch.equal(ours, theirs)
    assert len(made) == (8 if path == "triton" else 0)


def without_maxima(x: Tensor) -> tuple[ScaledMatrix, None]:
    return cast_rows(x), None


@pytest.mark.parametrize("what", ["input", "weight"])
def test_factor_changed_before_backward_is_refused(what: str) -> None:
    x, weight, dy = operands(3, K=32, N=16)
    y = fp8_linear(x * 1, weight) if what == "weight" else fp8_linear(h := x * 1, weight)
    with torch.no_grad():
        (weight if what == "weight" else h).mul_(8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, (x, weight), dy)
