"""Products in 8-bit floats: casts bit for bit, and one pass for an activation between two."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.numbers import relative_error
from tests.support.recompute import recompute_above
from tigon.kernels import fp8_linear, fp8_linear_ref, gated_act, rms_norm
from tigon.kernels.linear import fp8, fp8_casts, fp8_mlp
from tigon.kernels.linear.fp8_casts import (
    ScaledMatrix,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
)
from tigon.kernels.linear.fp8_mlp import cast_gated_gradients, cast_gated_rows
from tigon.kernels.linear.maxima import Maxima
from tigon.kernels.mlp.gated_act import ACTIVATIONS, Activation, gradient_and_product
from tigon.kernels.norm import rms_norm as rms_norm_module
from tigon.kernels.norm.rms_norm import CASTS, Cast
from tigon.layers import GatedMLP

SMALL = fp8_casts.Tile(16, 16, 1)
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
    part = F.pad(x, (8, 24))[:, 8:-24]  # rows of a larger matrix
    assert_same(cast_rows(part, fused=fused), rows)
    for given in (x, part):
        for found, expected in zip(cast_both(given, fused=fused), (rows, columns), strict=True):
            assert_same(found, expected)


def test_every_bf16_mantissa_rounds_to_nearest_even(path: str) -> None:
    """At all exponents down to those where nothing but zero is left, with both signs."""
    mantissas = 1 + torch.arange(128) / 128
    x = (mantissas * 2.0 ** torch.arange(-12, 8)[:, None]).view(1, -1)
    x = torch.cat([x, -x, x.new_full((1, 1), 448).expand_as(x)], 1).bfloat16()
    assert_same(cast_rows(x, fused=path == "triton"), exactly(x))


def test_rows_too_wide_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no maxima of columns."""
    monkeypatch.setattr(fp8_casts, "MAX_COLUMNS", 64)
    monkeypatch.setattr(fp8_casts, "STEP", 32)
    x = spread(5, 80)
    for fused in (False, True):
        rows, bits = cast_rows_and_maxima(x, fused=fused)
        assert_same(rows, exactly(x))
        assert_same(cast_rows(x, fused=fused), exactly(x))
        assert bits is None


def test_a_matrix_of_several_tiles(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_casts, "TILE", SMALL)
    monkeypatch.setattr(fp8_casts, "STRIP", 32)
    x = spread(37, 40)
    rows, columns = cast_both(x, fused=path == "triton")
    assert_same(rows, exactly(x))
    assert_same(columns, exactly(turned(x)))


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
    expected = cast_both(x, fused=True)
    known = maxima(x)
    rows, bits = cast_rows_and_maxima(F.pad(x, (8, 24))[:, 8:-24], fused=True)
    assert_same(rows, expected[0])
    assert bits is not None
    found, wanted = (x.view(torch.float32) for x in (bits, known.columns))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)  # whichever NaN

    def again(*_: object) -> None:
        raise AssertionError("the maxima are known")

    monkeypatch.setattr(fp8_casts, "_maxima", again)
    assert_same(cast_columns(x, bits, fused=True), expected[1])
    for found, wanted in zip(cast_both(x, known, fused=True), expected, strict=True):
        assert_same(found, wanted)


def operands(*lead: int, K: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    x = (torch.randn(*lead, K) * torch.logspace(-2, 1, K)).bfloat16()
    weight = (torch.randn(N, K) / math.sqrt(K)).bfloat16()
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(*lead, N).bfloat16()


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
        rows = cast_rows(t.detach(), fused=False)
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


# The gated activation


GATED_SHAPES = [(1, 16), (9, 80)]
K, N = 48, 32


def numbers(*shape: int, bad: float | None = None) -> Tensor:
    x = torch.randn(*shape) * torch.logspace(-4, 2, shape[-2])[:, None]
    if bad is not None:
        x[-1, 3] = bad
    return x.bfloat16()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for the columns and for the rows, and rows that end within one."""
    monkeypatch.setattr(fp8_mlp, "ROWS", 4)
    monkeypatch.setattr(fp8_mlp, "BACKWARD", (64, 1))
    monkeypatch.setattr(fp8_mlp, "GATED_COLUMNS_PER_SM", 16)
    monkeypatch.setattr(fp8_mlp, "BACKWARD_TILE", SMALL)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
def test_rows_are_those_of_the_product(
    kernels_only: None, shape: tuple[int, int], act: Activation
) -> None:
    for bad in (None, math.nan):
        x = numbers(shape[0], 2 * shape[1], bad=bad)
        for gate_up in (x, torch.cat((x, x), 1)[:, : x.shape[1]]):  # rows of a larger matrix, too
            found = cast_gated_rows(gate_up, act)
            expected = cast_rows(gated_act(x, act), fused=False)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours.float(), theirs.float(), 0, 0, equal_nan=True)
            assert found.scale.isnan().sum() == (bad is not None)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
@pytest.mark.parametrize("bad", [None, math.nan])
def test_casts_are_those_of_the_gradients(
    kernels_only: None, shape: tuple[int, int], act: Activation, bad: float | None
) -> None:
    (R, size), x = shape, numbers(shape[0], 2 * shape[1])
    dy = numbers(R, size, bad=bad)
    gradient, product = gradient_and_product(dy.clone(), x.clone(), act, overwrite=False)
    for gate_up in (x, torch.cat((x, x), 1)[:, : 2 * size]):  # rows of a larger matrix, too
        found = cast_gated_gradients(dy, gate_up, act)
        assert_same(found.rows, cast_rows(gradient, fused=False))
        assert_same(found.columns, cast_columns(gradient, fused=False))
        assert_same(found.product, cast_columns(product, fused=False))
        assert found.rows.scale.isnan().sum() == (bad is not None)


def gated_operands(*lead: int, bad: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, and the weights of a gated MLP, and a gradient."""
    x, up = torch.randn(*lead, N).bfloat16(), torch.randn(2 * K, N) / math.sqrt(N)
    if bad is not None:
        x.view(-1, N)[-1, 3] = bad
    up, down = nn.Parameter(up.bfloat16()), nn.Parameter(torch.randn(N, K).bfloat16())
    return x.requires_grad_(), up, down, torch.randn(*lead, N).bfloat16()


def in_steps(x: Tensor, up: Tensor, down: Tensor, act: Activation, bias: Any = None) -> Tensor:
    return fp8_linear(gated_act(fp8_linear(x, up), act), down, bias)


def together(x: Tensor, up: Tensor, down: Tensor, act: Activation, bias: Any = None) -> Tensor:
    return fp8_mlp.fp8_mlp(x, up, act, down, bias)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def recomputed(*given: Any) -> Tensor:
    return checkpoint(together, *given, use_reentrant=False)


def in_a_mode(*given: Any) -> Tensor:
    with Seen():
        return together(*given)


@pytest.mark.parametrize("run", [together, recomputed, in_a_mode])
@pytest.mark.parametrize(
    ("lead", "act", "frozen"),
    [
        ((1,), "silu", ""),
        ((3, 3), "gelu", ""),
        ((2, 8), "gelu_tanh", ""),
        ((3,), "silu", "x up"),
        ((3,), "silu", "down"),
        ((0,), "silu", ""),
    ],
    ids=str,
)
def test_bits_are_those_of_the_steps(
    run: Any, lead: tuple[int, ...], act: Activation, frozen: str
) -> None:
    x, up, down, dy = gated_operands(*lead)
    inputs = {"x": x, "up": up, "down": down, "bias": torch.randn(N).bfloat16().requires_grad_()}
    inputs |= {name: inputs[name].detach() for name in frozen.split()}
    wanted = [t for t in inputs.values() if t.requires_grad]
    given = *(inputs[name] for name in ("x", "up", "down")), act, inputs["bias"]
    results = [(y, *torch.autograd.grad(y, wanted, dy)) for y in (run(*given), in_steps(*given))]
    assert same(*results)


@pytest.mark.parametrize("case", [math.inf, math.nan, "wide"])
def test_bits_of_other_inputs(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not finite goes through; rows that are too wide are cast in steps."""
    x, up, down, dy = gated_operands(3, 7, bad=None if case == "wide" else case)
    if case == "wide":
        monkeypatch.setattr(fp8_casts, "MAX_COLUMNS", 32)
    runs = (run(x, up, down, "silu") for run in (together, in_steps))
    results = [(y, *torch.autograd.grad(y, (x, up, down), dy)) for y in runs]
    assert same(*results)
    if case != "wide":
        y, dx, _, _ = (t.flatten(0, -2) for t in results[0])
        assert y[-1].isnan().all() and y[:-1].isfinite().all()
        assert dx[-1].isnan().all()


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_maxima_are_computed_of_the_last_gradient_alone(
    path: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, maxima_of = [], fp8_casts._maxima
    monkeypatch.setattr(
        fp8_casts, "_maxima", lambda x, *how: made.append(x.shape) or maxima_of(x, *how)
    )
    x, *_, dy = gated_operands(2, 5)
    mlp = GatedMLP(N, K, "silu").bfloat16()
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    y = checkpoint(mlp, x, use_reentrant=False) if again else mlp(x)
    torch.autograd.grad(y, (x, *mlp.parameters()), dy)
    assert made == ([(10, N)] if path == "triton" else [])


def test_a_graph_that_is_used_again(path: str) -> None:
    x, up, down, dy = gated_operands(2, 5)
    y, wanted = together(x, up, down, "silu"), (x, up, down)
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    assert same(torch.autograd.grad(y, wanted, dy), first)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(together(x, up, down, "silu").sum(), x, create_graph=True)


@pytest.mark.parametrize("seen_by", ["nobody", "a hook", "its bias"])
def test_an_mlp_whose_activation_nobody_sees(
    path: str, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bf16 product is never there; one that a hook or a bias needs is, and is the same."""
    mlp = GatedMLP(N, K, "gelu_tanh").bfloat16()
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    mlp.down_proj.bias = nn.Parameter(torch.randn(N).bfloat16())
    if seen_by == "its bias":
        mlp.gate_up_proj.bias = nn.Parameter(torch.randn(2 * K).bfloat16())
    x, _, _, dy = gated_operands(2, 5)
    seen: list[Tensor] = []
    if seen_by == "a hook":
        mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    module = importlib.import_module("tigon.kernels.mlp.gated_act")
    made, forward = [], module._forward
    monkeypatch.setattr(module, "_forward", lambda *given: made.append(1) or forward(*given))
    wanted = x, *mlp.parameters()
    y = mlp(x)
    found = (y, *torch.autograd.grad(y, wanted, dy))
    assert bool(seen) == (seen_by == "a hook")
    assert bool(made) == (seen_by != "nobody" and path == "triton")
    up, down = mlp.gate_up_proj, mlp.down_proj
    y = fp8_linear(gated_act(up.product(x), "gelu_tanh"), down.weight, down.bias)
    assert same(found, (y, *torch.autograd.grad(y, wanted, dy)))
    with torch.no_grad():
        assert torch.equal(mlp(x), y)


# Maxima of gradients that a norm writes


def normed(x: Tensor, weight: Tensor, hook: Callable[[Tensor], Any] | None = None) -> Tensor:
    """A product, and the norm that adds it to a stream; the gradients of both outputs differ."""
    scale = torch.linspace(-1, 2, len(weight), dtype=x.dtype).requires_grad_()
    y = fp8_linear(x, weight)
    if hook is not None:
        y.register_hook(hook)
    stream = torch.linspace(-3, 3, y.numel()).to(y).view(y.shape)
    return torch.cat(rms_norm(y, scale, 1e-6, residual=stream), -1)


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("shape", [(2, 5, 32), (1, 1, 80), (4, 30, 208)], ids=str)
def test_norms_find_the_maxima_of_gradients(
    path: str, shape: tuple[int, ...], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    *lead, size = shape
    x, weight, _ = operands(*lead, K=48, N=size)
    dy = torch.randn(*lead, 2 * size).bfloat16() * torch.logspace(-3, 3, 2 * size).bfloat16()
    made, maxima_of = [], fp8_casts._maxima
    monkeypatch.setattr(fp8_casts, "_maxima", lambda *given: made.append(1) or maxima_of(*given))
    y = checkpoint(normed, x, weight, use_reentrant=False) if again else normed(x, weight)
    found = torch.autograd.grad(y, (x, weight), dy)
    assert not made
    monkeypatch.setattr(rms_norm_module, "are_maxima_requested", lambda _: False)
    assert same(torch.autograd.grad(normed(x, weight), (x, weight), dy), found)
    assert len(made) == (path == "triton")


def test_a_gradient_that_is_changed_has_other_maxima() -> None:
    """By a hook, in place or by another tensor."""
    x, weight, _ = operands(2, 5, K=48, N=32)
    dy = torch.randn(2, 5, 64).bfloat16()
    expected = torch.autograd.grad(normed(x, weight, lambda g: g * 8), (x, weight), dy)

    def in_place(g: Tensor) -> None:
        g.mul_(8)

    def other_memory(g: Tensor) -> None:
        g.data = g * 8

    for change in (in_place, other_memory):
        assert same(torch.autograd.grad(normed(x, weight, change), (x, weight), dy), expected)
    assert not same(torch.autograd.grad(normed(x, weight), (x, weight), dy), expected)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_is_cast_without_being_written(
    path: str, offset: float, cast: Cast, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where backward computes it again; of rows of a larger matrix, too, but not behind a gate."""
    monkeypatch.setattr(fp8_casts, "TILE", SMALL)
    made: list[Any] = []
    cast_normed = fp8_casts._cast_normed
    monkeypatch.setattr(fp8_casts, "_cast_normed", lambda *g: made.append(1) or cast_normed(*g))
    gate = torch.randn(2, 9, 80).bfloat16() if gated else None
    for strided in (False, True):
        x = torch.randn(2, 9, 80).bfloat16().requires_grad_()
        scale = nn.Parameter(torch.randn(80).bfloat16())
        weight, dy = nn.Parameter(torch.randn(16, 80).bfloat16()), torch.randn(2, 9, 16).bfloat16()
        results = []
        for least in (0, math.inf):
            rows = torch.cat((x, x), -1)[..., :80] if strided else x * 1
            with recompute_above(least):
                y = rms_norm(rows, scale, 1e-5, offset=offset, cast=cast, gate=gate)
                y = fp8_linear(y, weight)
            results.append(torch.autograd.grad(y, (x, scale, weight), dy))
        assert same(*results)
    assert len(made) == (2 if path == "triton" and not gated else 0)
