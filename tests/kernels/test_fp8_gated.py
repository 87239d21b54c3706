"""The gated activation between two fp8 products: the bits of its steps one by one."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tigon.kernels import fp8_linear, gated_act
from tigon.kernels.linear import fp8 as casts
from tigon.kernels.linear import fp8 as gated
from tigon.kernels.linear.fp8 import (
    NO_MAXIMA,
    cast_gated_rows,
    cast_rows,
    find_maxima,
    fp8_gated_linear,
    gradients_and_maxima,
    note_maxima,
)
from tigon.kernels.mlp.gated_act import ACTIVATIONS, Activation, gradient_and_product
from tigon.layers import GatedMLP

SHAPES = [(1, 16), (9, 80)]
K, N = 48, 32


def numbers(*shape: int, bad: float | None = None) -> Tensor:
    x = torch.randn(*shape) * torch.logspace(-4, 2, shape[-2])[:, None]
    if bad is not None:
        x[-1, 3] = bad
    return x.bfloat16()


def bits(x: Tensor, dim: int) -> Tensor:
    return x.float().abs().view(torch.int32).amax(dim)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for the columns and for the rows, and rows that end within one."""
    monkeypatch.setattr(gated, "ROWS", 4)
    monkeypatch.setattr(gated, "BACKWARD", (64, 1))
    monkeypatch.setattr(gated, "GATED_COLUMNS_PER_SM", 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bad", [None, math.nan])
def test_gradients_and_their_maxima(
    kernels_only: None,
    shape: tuple[int, int],
    act: Activation,
    bad: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (R, size), x = shape, numbers(shape[0], 2 * shape[1])
    dy = numbers(R, size, bad=bad)
    expected = gradient_and_product(dy.clone(), x.clone(), act, overwrite=False)
    strided = torch.cat((x, x), 1)[:, : 2 * size] if R > 1 else x.clone()
    monkeypatch.setattr(
        importlib.import_module("tigon.kernels.mlp.gated_act"), "retains_graph", bool
    )
    for gate_up, overwrite in ((x.clone(), False), (x.clone(), True), (strided, True)):
        d = dy.clone()
        found = gradients_and_maxima(d, gate_up, act, overwrite)
        assert torch.allclose(found.gate_up, expected[0], 0, 0, equal_nan=True)
        assert torch.equal(found.product, expected[1]) and found.product is d
        over = found.gate_up.data_ptr() == gate_up.data_ptr()
        assert over == (overwrite and gate_up.is_contiguous())
        for ours, theirs in (
            (found.maxima.rows, bits(expected[0], 1)),
            (found.maxima.columns, bits(expected[0], 0)),
            (found.product_maxima, bits(expected[1], 0)),
        ):
            assert ours is not None and torch.equal(ours, theirs)


def operands(*lead: int, bad: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, and the weights of a gated MLP, and a gradient."""
    x, up = torch.randn(*lead, N).bfloat16(), torch.randn(2 * K, N) / math.sqrt(N)
    if bad is not None:
        x.view(-1, N)[-1, 3] = bad
    up, down = nn.Parameter(up.bfloat16()), nn.Parameter(torch.randn(N, K).bfloat16())
    return x.requires_grad_(), up, down, torch.randn(*lead, N).bfloat16()


def in_steps(x: Tensor, up: Tensor, down: Tensor, act: Activation, bias: Any = None) -> Tensor:
    return fp8_linear(gated_act(fp8_linear(x, up), act), down, bias)


def together(x: Tensor, up: Tensor, down: Tensor, act: Activation, bias: Any = None) -> Tensor:
    return fp8_gated_linear(fp8_linear(x, up), act, down, bias)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize(
    ("lead", "act"), [((1,), "silu"), ((3, 3), "gelu"), ((2, 8), "gelu_tanh")], ids=str
)
def test_the_bits_of_the_steps(lead: tuple[int, ...], act: Activation, again: bool) -> None:
    x, up, down, dy = operands(*lead)
    bias = torch.randn(N).bfloat16().requires_grad_()
    wanted = x, up, down, bias
    results = []
    for run in (together, in_steps):
        y = (
            checkpoint(run, x, up, down, act, bias, use_reentrant=False)
            if again and run is together
            else run(x, up, down, act, bias)
        )
        results.append((y, *torch.autograd.grad(y, wanted, dy)))
    assert same(*results)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_goes_through(bad: float) -> None:
    x, up, down, dy = operands(3, 7, bad=bad)
    results = []
    for run in (together, in_steps):
        y = run(x, up, down, "silu")
        results.append((y, *torch.autograd.grad(y, (x, up, down), dy)))
    assert same(*results)
    y, dx, _, _ = (t.flatten(0, -2) for t in results[0])
    assert y[-1].isnan().all() and y[:-1].isfinite().all()
    assert dx[-1].isnan().all()


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_maxima_are_computed_of_the_last_gradient_alone(
    path: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, maxima = [], casts._maxima
    monkeypatch.setattr(casts, "_maxima", lambda x, *how: made.append(x.shape) or maxima(x, *how))
    x, *_, dy = operands(2, 5)
    mlp = GatedMLP(N, K, "silu").bfloat16()
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    y = checkpoint(mlp, x, use_reentrant=False) if again else mlp(x)
    torch.autograd.grad(y, (x, *mlp.parameters()), dy)
    assert made == ([(10, N)] if path == "triton" else [])


def hooked(x: Tensor, up: Tensor, down: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    gate_up = fp8_linear(x, up)
    gate_up.register_hook(hook)
    return fp8_gated_linear(gate_up, "silu", down)


def test_a_gradient_that_is_changed_has_other_maxima() -> None:
    """By a hook, in place or by another tensor."""
    x, up, down, dy = operands(2, 5)
    y = hooked(x, up, down, lambda g: g * 8)
    expected = torch.autograd.grad(y, (x, up), dy)

    def in_place(g: Tensor) -> None:
        g.mul_(8)

    def other_memory(g: Tensor) -> None:
        g.data = g * 8

    for change in (in_place, other_memory):
        y = hooked(x, up, down, change)
        assert same(torch.autograd.grad(y, (x, up), dy), expected)
    plain = torch.autograd.grad(together(x, up, down, "silu"), (x, up), dy)
    assert not same(plain, expected)


def test_notes_are_of_the_tensor_and_its_shape() -> None:
    x = numbers(4, 32)
    maxima = casts.Maxima(bits(x, 1), bits(x, 0))
    note_maxima(x, maxima)
    assert find_maxima(x) is maxima and find_maxima(x.view(1, 4, 32).view(4, 32)) is maxima
    for other in (x.view(8, 16), x[:2], x[:, :16], x.clone(), x.t()):
        assert find_maxima(other) is NO_MAXIMA
    x.add_(1)
    assert find_maxima(x) is NO_MAXIMA


def test_a_graph_that_is_used_again(path: str) -> None:
    x, up, down, dy = operands(2, 5)
    y, wanted = together(x, up, down, "silu"), (x, up, down)
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    assert same(torch.autograd.grad(y, wanted, dy), first)
    if path == "triton":  # gate_up is overwritten now
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y, wanted, dy)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(together(x, up, down, "silu").sum(), x, create_graph=True)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["mode", "frozen up", "frozen down", "wide", "no tokens"])
def test_where_passes_are_apart(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, up, down, dy = operands(0 if case == "no tokens" else 3)
    if case == "wide":
        monkeypatch.setattr(gated, "MAX_COLUMNS", 32)
    if case == "frozen up":
        x, up = x.detach(), up.detach()
    wanted = [t for t in (x, up, down) if t.requires_grad]
    if case == "frozen down":
        wanted.pop().requires_grad_(False)
    results = []
    for run in (together, in_steps):
        if case == "mode" and run is together:
            with Seen():
                y = run(x, up, down, "silu")
                results.append((y, *torch.autograd.grad(y, wanted, dy)))
        else:
            y = run(x, up, down, "silu")
            results.append((y, *torch.autograd.grad(y, wanted, dy)))
    assert same(*results)


def test_refusals() -> None:
    gate_up, down = torch.randn(3, 2 * K).bfloat16() * 1, operands(3)[2]
    with pytest.raises(ValueError, match=r"has 192 columns, the weight \(32, 48\)|has 96 columns"):
        fp8_gated_linear((torch.cat((gate_up, gate_up), 1)).requires_grad_(), "silu", down)
    with pytest.raises(ValueError, match="act='relu' is not one of"):
        fp8_gated_linear(gate_up.requires_grad_(), "relu", down)  # type: ignore[arg-type]


def test_the_op_is_registered_rightly(path: str) -> None:
    if path == "triton":
        given = numbers(3, 32), "silu"
        checks = "test_schema", "test_faketensor"
        torch.library.opcheck(gated._cast_gated_rows.op, given, test_utils=checks)


@pytest.mark.parametrize("hook", [False, True])
def test_an_mlp_whose_activation_nobody_sees(
    path: str, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bf16 product is never there; one that a hook looks at is, and is the same."""
    mlp = GatedMLP(N, K, "gelu_tanh", bias=True).bfloat16()
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    x, _, _, dy = operands(2, 5)
    seen: list[Tensor] = []
    if hook:
        mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    module = importlib.import_module("tigon.kernels.mlp.gated_act")
    made, forward = [], module._forward
    monkeypatch.setattr(module, "_forward", lambda *given: made.append(1) or forward(*given))
    wanted = x, *mlp.parameters()
    y = mlp(x)
    found = (y, *torch.autograd.grad(y, wanted, dy))
    assert bool(seen) == hook
    assert bool(made) == (hook and path == "triton")
    up, down = mlp.gate_up_proj, mlp.down_proj
    y = fp8_linear(gated_act(up.product(x), "gelu_tanh"), down.weight, down.bias)
    assert same(found, (y, *torch.autograd.grad(y, wanted, dy)))
    with torch.no_grad():
        assert torch.equal(mlp(x), y)
