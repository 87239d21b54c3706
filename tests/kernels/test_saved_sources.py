"""Saved tensors of other operators that are computed again from what they were made of."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.support.recompute import recompute_above
from tigon.kernels import AttentionMask, attention, gated_act, qk_norm_rope, rms_norm, rope
from tigon.kernels.linear.linear import linear
from tigon.kernels.norm.rms_norm import rms_norm_with_input
from tigon.kernels.norm.rms_norm_add import rms_norm_add
from tigon.kernels.recompute import find_recompute, forget_recompute, run_recompute
from tigon.kernels.saved_sources import Part, save_sources

B, T, H, K, D = 2, 5, 4, 2, 6


@pytest.fixture(autouse=True)
def _everything(kernels_only: None) -> Any:
    """However small it is."""
    with recompute_above(0):
        yield


def inputs() -> dict[str, Tensor]:
    theta = torch.rand(1, T, D // 2)
    made = {"qkv": torch.randn(B, T, (H + 2 * K) * D), "q_weight": torch.randn(D)}
    made |= {"k_weight": torch.randn(D)}
    return {n: x.requires_grad_() for n, x in made.items()} | {
        "cos": theta.cos(),
        "sin": theta.sin(),
    }


def heads(given: dict[str, Tensor], how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, normed and rotated by one operator or by several."""
    if how == "one":
        return qk_norm_rope(**given, heads=H, kv_heads=K)
    packed = given["qkv"].unflatten(-1, (-1, D))
    q, k, v = packed.split((H, K, K), 2)
    q, k = rms_norm(q, given["q_weight"], 1e-6), rms_norm(k, given["k_weight"], 1e-6)
    return *rope(q, k, given["cos"], given["sin"]), rms_norm(v, None, 1e-6)


@pytest.mark.parametrize("how", ["one", "several"])
def test_attention_saves_the_projection_alone(how: str) -> None:
    given = inputs()
    learned = [x for x in given.values() if x.requires_grad]
    up, found = torch.randn(B, T, H, D), []
    for kept in (False, True):
        q, k, v = heads(given, how)
        if kept:
            forget_recompute(q, k, v)
        out = attention(q, k, v, mask=AttentionMask(T))
        del q, k, v
        first = torch.autograd.grad(out, learned, up, retain_graph=True)
        found += [[out, *first], [out, *torch.autograd.grad(out, learned, up)]]
    assert all(all(map(torch.equal, x, found[0])) for x in found[1:])


def test_parts_are_recomputed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = inputs(), 0
    q, k, _ = heads(given, "one")
    note = find_recompute(k)
    assert note is not None and isinstance(note.fn.compute, Part) and note.fn.compute.number == 1
    assert torch.equal(run_recompute(note.fn, note.saved), k)
    compute = note.fn.compute.compute

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return compute(*args)

    for x, index in ((q, 0), (k, 1)):
        found: Any = find_recompute(x)
        found.fn = found.fn._replace(compute=Part(counted, index))
    with save_sources(q, k):
        y = q.square().sum() + k.square().sum()  # each of which saves its input
    saved = q.detach().clone(), k.detach().clone()
    upstream = torch.autograd.grad(y, (q, k))
    assert calls == 1
    assert all(torch.equal(2 * a, b) for a, b in zip(saved, upstream, strict=True))


def test_inside_other_hooks_tensors_are_saved() -> None:
    q, *_ = heads(inputs(), "one")
    seen: list[Tensor] = []
    with saved_tensors_hooks(lambda x: seen.append(x) or x.detach(), lambda x: x), save_sources(q):
        q.exp()
        q.square()
    assert seen[-1].data_ptr() == q.data_ptr()
    x = torch.randn(3, requires_grad=True)  # nothing is noted on it
    with save_sources(x):
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_changed_sources_raise() -> None:
    given = inputs()
    qkv = given["qkv"] * 1.0
    q, *_ = heads(given | {"qkv": qkv}, "one")
    with save_sources(q):
        y = q.square()
    qkv.detach().mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(y.sum(), q)


def branch(h: Tensor, w: Tensor, weights: list[Tensor], fused: bool) -> Tensor:
    """The stream behind two branches, of which the second is a product of few summands."""
    _, stream = rms_norm_with_input(h, w, 1e-6)
    for weight in weights:
        x = linear(h, weight)
        stream = rms_norm_add(x, stream, w, 1e-6) if fused else stream + rms_norm(x, w, 1e-6)
    return stream


def test_a_sum_of_branches_keeps_what_they_are_made_of() -> None:
    h, w = torch.randn(3, D, requires_grad=True), torch.randn(D, requires_grad=True)
    weights: list[Tensor] = [torch.nn.Parameter(torch.randn(D, D)) for _ in range(2)]
    reader, results = torch.nn.Parameter(torch.randn(2, D)), []
    for fused in (True, False):
        stream = branch(h * 1.0, w, weights, fused)
        y = linear(stream, reader)
        results.append([y, *torch.autograd.grad(y.square().sum(), [h, w, *weights, reader])])
    assert all(map(torch.equal, *results))
    note = find_recompute(branch(h * 1.0, w, weights, True))
    assert note is not None
    # Of each branch the product's input, weight and bias, 1 / rms and the norm's weights; the first
    # stream is there, the second is made of them
    shapes = [x.shape for x in note.saved if x is not None]
    assert shapes.count((3, D)) == 3 and shapes.count((D, D)) == 2


def test_what_may_be_overwritten_is_kept() -> None:
    """A gated product is not computed again from gate and up, over which a gradient is written."""
    x, w = torch.randn(3, 2 * D, requires_grad=True), torch.randn(D, requires_grad=True)
    stream, reader = torch.randn(3, D), torch.nn.Parameter(torch.randn(2, D))
    results = []
    for least in (0, math.inf):
        with recompute_above(least), saved_tensors_hooks(lambda t: t, lambda t: t):  # no versions
            y = gated_act(x * 1.0, "silu", overwrite=True)
            total = rms_norm_add(y, stream, w, 1e-6)
            product = linear(total, reader)
        first = torch.autograd.grad(total.square().sum(), [x, w])
        results.append([*first, *torch.autograd.grad(product.sum(), reader)])
    assert all(map(torch.equal, *results))


def test_what_is_saved_itself_may_not_change() -> None:
    """Behind hooks torch does not look at versions."""
    given = inputs()
    q, k, v = heads(given, "one")
    v = v.clone()  # which nothing recomputes
    out = attention(q, k, v, mask=AttentionMask(T))
    v.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
