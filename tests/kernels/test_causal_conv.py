"""Convolutions that go on from a state, and packed sequences beside sequences apart.

# B batch, T tokens, C channels, W taps, K key heads, D dim of a key
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import CUDA
from tigon.kernels import causal_conv, causal_conv_qkv

B, T, C, W, K, D = 3, 23, 34, 4, 2, 6
Call = Callable[..., tuple[Tensor, ...]]


def plain(x: Tensor, weight: Tensor, **rows: Any) -> tuple[Tensor]:
    return (causal_conv(x, weight, **rows),)


CALLS: dict[str, Call] = {
    "plain": plain,
    "silu": partial(plain, activation="silu"),
    "qkv": partial(causal_conv_qkv, key_heads=K, key_dim=D),
}
calls = pytest.mark.parametrize("call", [pytest.param(c, id=name) for name, c in CALLS.items()])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are several chunks for the kernels."""
    if not CUDA:
        module = importlib.import_module("tigon.kernels.delta.causal_conv")
        monkeypatch.setattr(module, "CHUNKS", (4,))


def rows(taps: int = W, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, state = torch.randn(B, T, C), torch.randn(C, taps), torch.randn(B, taps - 1, C)
    return x.to(dtype), weight.to(dtype), state.to(dtype)


@calls
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("sizes", [(1,) * T, (17, 1, 0, 2, 3), (5, 18), (T,)], ids=str)
def test_pieces_are_the_whole(call: Call, taps: int, sizes: tuple[int, ...]) -> None:
    """Also those of fewer tokens than a state has, and of more than one program takes."""
    x, weight, state = rows(taps)
    whole = call(x, weight, state=state)
    pieces = [call(p, weight, state=state, update_state=True) for p in x.split(sizes, 1)]
    for y, expected in zip(zip(*pieces, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(y, 1), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, x[:, T - taps + 1 :])


@calls
def test_state_is_read_alone_unless_it_is_updated(call: Call) -> None:
    x, weight, state = rows()
    before = state.clone()
    call(x, weight, state=state)
    assert torch.equal(state, before) and state._version == 0


@calls
@pytest.mark.parametrize("change", [torch.Tensor.double, lambda x: x.mT.contiguous().mT])
def test_states_of_another_layout_or_dtype(call: Call, change: Callable[[Tensor], Tensor]) -> None:
    x, weight, state = rows()
    other = change(state)
    expected = call(x[:, :5], weight, state=state, update_state=True)
    found = call(x[:, :5], weight, state=other, update_state=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(other.float(), state)


@calls
def test_gradients_through_an_updated_state(call: Call) -> None:
    """They are those of the state as it was."""
    x, weight, state = rows()
    results = []
    for update in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = call(*leaves, state=state, update_state=update)
        results.append(torch.autograd.grad([t.square().sum() for t in y], leaves))
    assert all(map(torch.equal, *results))
    assert torch.equal(state, x[:, 1 - W :]) and not state.requires_grad


@calls
def test_packed_sequences_are_sequences_apart(call: Call) -> None:
    """Values and gradients; the state is that of the first sequence only if it goes on."""
    x, weight, state = (t[:1] if t.dim() == 3 else t for t in rows())
    sizes = (2, 1, 9, 1, 1, 9)
    first = torch.tensor(sizes).cumsum(0)[:-1]
    for goes_on in (True, False):
        starts = torch.zeros(1, T, dtype=torch.bool)
        starts[0, first] = True
        starts[0, 0] = not goes_on
        packed, apart = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
        found = call(*packed, starts=starts, state=state)
        states = [state if goes_on else None] + 5 * [None]
        pieces = [
            call(p, apart[1], state=s)
            for p, s in zip(apart[0].split(sizes, 1), states, strict=True)
        ]
        expected = [torch.cat(y, 1) for y in zip(*pieces, strict=True)]
        torch.testing.assert_close(found, tuple(expected), rtol=1e-6, atol=1e-6)
        ups = [torch.randn(y.shape) for y in found]
        ours, theirs = (
            torch.autograd.grad(y, leaves, ups)
            for y, leaves in ((found, packed), (expected, apart))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@calls
def test_the_gradient_of_the_weight_has_the_same_bits(call: Call) -> None:
    """Its sums are in a fixed order."""
    x, weight, _ = rows()
    weight.requires_grad_()
    grads = [torch.autograd.grad(call(x, weight)[-1].sum(), weight)[0] for _ in range(3)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.gpu
@calls
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_captured_step_goes_on(call: Call, tokens: int, kernels_only: None) -> None:
    x, weight, state = rows(dtype=torch.bfloat16)
    step, kept = x[:, :tokens].clone(), state.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        call(step, weight, state=state.clone(), update_state=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(step, weight, state=state, update_state=True)
    state.copy_(kept)
    for piece in x[:, : 4 * tokens].split(tokens, 1):
        step.copy_(piece)
        graph.replay()
        expected = call(piece, weight, state=kept, update_state=True)
        assert all(map(torch.equal, captured, expected)) and torch.equal(state, kept)
