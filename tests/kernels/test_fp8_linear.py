import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.numbers import relative_error
from tigon.kernels import fp8_linear, fp8_linear_ref, gated_act, rms_norm
from tigon.kernels.linear import fp8 as casts
from tigon.kernels.linear.fp8 import (
    Maxima,
    ScaledMatrix,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
)
from tigon.kernels.recompute import recompute_above

fp8_linear_module = importlib.import_module("tigon.kernels.linear.fp8")
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


def assert_same(found: ScaledMatrix, expected: ScaledMatrix) -> None:
    """Bit for bit, but for which NaN it is."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


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
    x, fused = spread(*shape), path == "triton"
    rows, columns = exactly(x), exactly(turned(x))
    assert_same(cast_rows(x, fused=fused), rows)
    assert_same(cast_columns(x, fused=fused), columns)
    for found, expected in zip(cast_both(x, fused=fused), (rows, columns), strict=True):
        assert_same(found, expected)
    part = F.pad(x, (8, 24))[:, 8:-24]  # rows of a larger matrix
    for found, expected in zip(cast_both(part, fused=fused), (rows, columns), strict=True):
        assert_same(found, expected)
    assert_same(cast_rows(part, fused=fused), rows)


def test_every_bf16_mantissa_rounds_to_nearest_even(path: str) -> None:
    """At all exponents down to those where nothing but zero is left, with both signs."""
    mantissas = 1 + torch.arange(128) / 128
    x = (mantissas * 2.0 ** torch.arange(-12, 8)[:, None]).view(1, -1)
    x = torch.cat([x, -x, x.new_full((1, 1), 448).expand_as(x)], 1).bfloat16()
    assert_same(cast_rows(x, fused=path == "triton"), exactly(x))


def test_a_matrix_of_several_tiles(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("TILE_R", 16), ("TILE_C", 16), ("STRIP", 32)):
        monkeypatch.setattr(casts, name, size)
    x = spread(37, 40)
    rows, columns = cast_both(x, fused=path == "triton")
    assert_same(rows, exactly(x))
    assert_same(columns, exactly(turned(x)))


def test_rows_too_wide_to_be_held(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "MAX_COLUMNS", 64)
    monkeypatch.setattr(casts, "STEP", 32)
    x = spread(5, 80)
    assert_same(cast_rows(x, fused=path == "triton"), exactly(x))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_number_not_finite_makes_its_row_nan(path: str, bad: float) -> None:
    x = spread(20, 48)
    x[4, 5] = bad
    rows, columns = cast_both(x, fused=path == "triton")
    for found, at, alone in ((rows, 4, x), (columns, 5, turned(x))):
        clean = alone.clone()
        clean[at] = 0
        expected = exactly(clean)
        expected.data[at], expected.scale[at] = math.nan, math.nan
        assert_same(found, expected)
    y = fp8_linear(x, torch.ones(16, 48).bfloat16())
    assert y[4].isnan().all() and y.isfinite().all(1).sum() == 19


def maxima(x: Tensor) -> Maxima:
    bits = x.float().abs().view(torch.int32)
    return Maxima(bits.amax(1), bits.amax(0))


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("shape", [*SHAPES, (37, 48)], ids=str)
def test_casts_with_maxima_that_are_known(
    kernels_only: None, shape: tuple[int, int], bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the row cast, of programs with several rows each, or by another operator."""
    monkeypatch.setattr(casts, "COLUMNS_PER_SM", 16)
    x = spread(*shape)
    if bad is not None:
        x[-1, 5] = bad
    expected = cast_both(x, fused=True)
    known = maxima(x)
    rows, bits = cast_rows_and_maxima(F.pad(x, (8, 24))[:, 8:-24], fused=True)
    assert_same(rows, expected[0])
    assert bits is not None and torch.equal(bits, known.columns)

    def again(*_: object) -> None:
        raise AssertionError("the maxima are known")

    monkeypatch.setattr(casts, "_maxima", again)
    assert_same(cast_columns(x, bits, fused=True), expected[1])
    for found, wanted in zip(cast_both(x, known, fused=True), expected, strict=True):
        assert_same(found, wanted)


def test_wide_rows_have_no_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "MAX_COLUMNS", 64)
    monkeypatch.setattr(casts, "STEP", 32)
    x = spread(5, 80)
    for fused in (False, True):
        rows, bits = cast_rows_and_maxima(x, fused=fused)
        assert_same(rows, exactly(x))
        assert bits is None


def operands(*lead: int, K: int, N: int, frozen: str = "") -> tuple[Tensor, Tensor, Tensor]:
    x = (torch.randn(*lead, K) * torch.logspace(-2, 1, K)).bfloat16()
    weight = (torch.randn(N, K) / math.sqrt(K)).bfloat16()
    return (
        x.requires_grad_(frozen != "x"),
        weight.requires_grad_(frozen != "weight"),
        torch.randn(*lead, N).bfloat16(),
    )


@pytest.mark.parametrize("lead", [(1,), (3, 7)], ids=str)
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_products_and_gradients_are_those_of_the_casts(lead: tuple[int, ...], frozen: str) -> None:
    x, weight, dy = operands(*lead, K=48, N=16, frozen=frozen)
    wanted = [t for t in (x, weight) if t.requires_grad]
    y = fp8_linear(x, weight)
    found = torch.autograd.grad(y, wanted, dy)
    rows, by_token = x.detach().flatten(0, -2), dy.flatten(0, -2)
    expected = {
        "y": (rows, weight.detach()),
        "x": (by_token, weight.detach().t()),
        "weight": (turned(by_token), turned(rows)),
    }
    results = {"y": y.detach()} | dict(
        zip([n for n in ("x", "weight") if n != frozen], found, strict=True)
    )
    for name, result in results.items():
        a, b = (exactly(factor) for factor in expected[name])
        exact = (a.dequantize().double() @ b.dequantize().double().t()).view(result.shape)
        # One rounding to bf16; a tensor core may lose 2^-13 of the sum of magnitudes besides
        scale = (a.dequantize().abs().double() @ b.dequantize().abs().double().t()).view(
            result.shape
        )
        assert ((result.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-12 * scale).all(), name


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
        rows = cast_rows(t.detach(), fused=False)
        off = (rows.dequantize() - t.detach().float()).abs()
        assert (
            off <= (2**-4 * t.detach().float().abs()).maximum(rows.scale[:, None] * 2**-10)
        ).all()


def test_refusals() -> None:
    x, weight, _ = operands(4, K=32, N=16)
    with pytest.raises(TypeError, match=r"x is torch.float32, the weight torch.bfloat16"):
        fp8_linear(x.float(), weight)
    with pytest.raises(ValueError, match="16 columns"):
        fp8_linear(x[:, :16], weight)
    with pytest.raises(ValueError, match=r"\(8, 32\) are not multiples of 16"):
        fp8_linear(x, weight[:8])
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        pytest.raises(ValueError, match="under autocast: load the model in bfloat16"),
    ):
        fp8_linear(x, weight)
    y = fp8_linear(x, weight)
    with pytest.raises(RuntimeError, match="fp8_linear has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_no_tokens() -> None:
    x, weight, dy = operands(0, K=32, N=16)
    y = fp8_linear(x, weight)
    (dw,) = torch.autograd.grad(y, weight, dy)
    assert y.shape == (0, 16) and not dw.any()


def test_a_recomputed_layer_has_the_same_bits() -> None:
    x, weight, dy = operands(3, K=32, N=16)
    once = torch.autograd.grad(fp8_linear(x, weight), (x, weight), dy)
    y = checkpoint(fp8_linear, x, weight, use_reentrant=False)
    for found, expected in zip(torch.autograd.grad(y, (x, weight), dy), once, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("again", [False, True])
def test_maxima_of_the_forward_product_serve_backward(
    path: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone those of the gradient are computed then, in a recomputed layer, too."""
    x, weight, dy = operands(3, K=32, N=16)
    first = nn.Parameter(torch.randn(32, 32).bfloat16())
    made, maxima_of = [], casts._maxima
    monkeypatch.setattr(casts, "_maxima", lambda x, *how: made.append(x) or maxima_of(x, *how))

    def layers(x: Tensor) -> Tensor:
        return fp8_linear(fp8_linear(x, first), weight)

    wanted = x, first, weight
    y = checkpoint(layers, x, use_reentrant=False) if again else layers(x)
    found = torch.autograd.grad(y, wanted, dy)
    assert len(made) == (2 if path == "triton" else 0)
    monkeypatch.setattr(fp8_linear_module, "cast_rows_and_maxima", without_maxima)
    for ours, theirs in zip(found, torch.autograd.grad(layers(x), wanted, dy), strict=True):
        assert torch.equal(ours, theirs)
    assert len(made) == (8 if path == "triton" else 0)


def without_maxima(x: Tensor, *, fused: bool) -> tuple[ScaledMatrix, None]:
    return cast_rows(x, fused=fused), None


@pytest.mark.parametrize("what", ["input", "weight"])
def test_factor_changed_before_backward_is_refused(what: str) -> None:
    x, weight, dy = operands(3, K=32, N=16)
    y = fp8_linear(x * 1, weight) if what == "weight" else fp8_linear(h := x * 1, weight)
    with torch.no_grad():
        (weight if what == "weight" else h).mul_(8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, (x, weight), dy)


@pytest.mark.traced
def test_compiled_in_one_graph(kernels_only: None) -> None:
    x, weight, dy = operands(3, 5, K=32, N=16)
    compiled = torch.compile(fp8_linear, fullgraph=True, backend="aot_eager")
    found, expected = (
        [y := run(x, weight), *torch.autograd.grad(y, (x, weight), dy)]
        for run in (compiled, fp8_linear)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_ops_are_registered_rightly(kernels_only: None) -> None:
    x, rows, columns = spread(3, 16), torch.ones(3).int(), torch.ones(16).int()
    for op, *more in (
        (casts._cast_rows, False),
        (casts._cast_rows, True),
        (casts._cast_tiles, False, None, None),
        (casts._cast_tiles, False, None, columns),
        (casts._cast_tiles, True, None, None),
        (casts._cast_tiles, True, rows, columns),
    ):
        given = x, *more
        torch.library.opcheck(op.op, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 3, 2, 64)], ids=str)
def test_an_input_of_any_shape_is_computed_again(shape: tuple[int, ...]) -> None:
    columns, scale = 128 if len(shape) > 1 else 64, torch.ones(128).bfloat16()
    x = torch.randn(shape).bfloat16().view(-1 if len(shape) == 1 else (-1, columns))
    x.requires_grad_()
    weight = torch.randn(16, shape[-1]).bfloat16().requires_grad_()
    results = []
    for least in (math.inf, 0):
        with recompute_above(least):
            h = rms_norm(x.view(-1, columns) if len(shape) > 1 else x, scale[:columns], 1e-6)
            y = fp8_linear(h.view(shape), weight)
        results.append(torch.autograd.grad(y.square().sum(), (x, weight)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("what", ["normed", "gated"])
def test_recomputed_input_has_the_same_bits(kernels_only: None, what: str) -> None:
    x = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    weight, scale = torch.randn(16, 32).bfloat16().requires_grad_(), torch.ones(32).bfloat16()
    if what == "normed":
        x = x.detach()[..., :32].contiguous().requires_grad_()

    def gradients(least: float) -> tuple[list[int], list[Tensor]]:
        saved: list[int] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t.data_ptr())
            return t

        with recompute_above(least), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            h = rms_norm(x, scale, 1e-6) if what == "normed" else gated_act(x * 1, "silu")
            y = fp8_linear(h, weight)
        held = saved.count(h.data_ptr())
        return [held], list(torch.autograd.grad(y.square().sum(), (x, weight)))

    (kept, expected), (rebuilt, found) = gradients(math.inf), gradients(0)
    assert kept == [1] and rebuilt == [0]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
