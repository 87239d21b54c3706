"""One pass for the gated activation or the norm beside products in 8-bit floats."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.kernels.fp8 import SMALL, assert_same, operands, same
from tests.support.recompute import recompute_above
from tigon.kernels import fp8_linear, gated_act, rms_norm
from tigon.kernels.linear import fp8_casts, fp8_mlp
from tigon.kernels.linear.fp8_casts import cast_columns_ref, cast_rows_ref
from tigon.kernels.linear.fp8_mlp import cast_gated_gradients, cast_gated_rows
from tigon.kernels.mlp.gated_act import ACTIVATIONS, Activation, gradient_and_product
from tigon.kernels.norm import rms_norm as rms_norm_module
from tigon.kernels.norm.rms_norm import CASTS, Cast
from tigon.layers import GatedMLP

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
            expected = cast_rows_ref(gated_act(x, act))
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
        assert_same(found.rows, cast_rows_ref(gradient))
        assert_same(found.columns, cast_columns_ref(gradient))
        assert_same(found.product, cast_columns_ref(product))
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
