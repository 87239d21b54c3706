"""Attention backends on a GPU: each against the definition in fp32.

A backend that compiles its kernels takes a few of the combinations here and all of them with
`-m exhaustive`, which needs minutes, or `-n 12`.
"""

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.attention import (
    PADDING,
    Combination,
    T,
    eager,
    forward,
    fresh,
    need,
    on_gpu,
    run,
    tensors,
)
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.backends import (
    OBSTACLES,
    AttentionRequest,
    capability,
    choose_backend,
    missing,
)

__all__ = ["fresh"]
pytestmark = pytest.mark.gpu
COMPILED = ("fa4", "triton", "flex")
ALL = list(
    itertools.starmap(
        Combination,
        itertools.product(
            (64, 80, 96, 128, 256),
            (None, 40),
            (None, 30.0),
            ("rows", "packed", "even", "padded"),
            (1, 4),
            (True, False),
        ),
    )
)
SOME = [
    Combination(64, 40, None, "packed"),
    Combination(96, None, None, "padded", 1),
    Combination(128, None, 30.0, "packed"),
    Combination(256, 40, None, "rows"),
    Combination(128, 40, None, "rows", 1, False),
    Combination(64, 40, None, "prefixes"),
    Combination(128, None, None, "prefixes"),
    Combination(512, None, None, "packed"),
    Combination(512, None, None, "rows", 1, False),
    Combination(320, 40, None, "padded"),
]
FA4 = [  # it loads groups that do not divide its tile in another way
    Combination(128, None, None, "even", 7),
    Combination(128, None, None, "packed", 3),
    Combination(64, None, None, "many"),
]


def cases() -> list[Any]:
    found = []
    for name in OBSTACLES:
        for c in dict.fromkeys(ALL + SOME + FA4):
            if c.softcap and name in ("cudnn", "flash", "triton", "sdpa"):
                continue
            if name == "cudnn" and (c.window or c.layout not in ("rows", "even")):
                continue
            some = SOME + FA4 if name == "fa4" else SOME
            rare = name in COMPILED and c not in some
            marks = [pytest.mark.exhaustive] if rare else []
            found.append(pytest.param(name, c, id=f"{name} {c}", marks=marks))
    return found


def assert_near(function: Any, name: str, c: Combination) -> None:
    """Against fp32, at most twice as wrong as the formula spelled out in bf16."""
    need(name, c.head_dim, softcap=c.softcap is not None)
    leaves = tensors(c)
    upstream = torch.randn_like(leaves[0])
    if c.layout == "padded":
        upstream = upstream * PADDING.cuda()[:, :, None, None]
    found = run(function, c, leaves, upstream, backend=name)
    exact_leaves = [x.detach().float().requires_grad_() for x in leaves]
    exact = run(attention_ref, c, exact_leaves, upstream)
    spelled = run(eager, c, leaves, upstream)
    for what, a, b, e in zip(("out", "dq", "dk", "dv"), found, spelled, exact, strict=True):
        assert a.shape == e.shape and a.isfinite().all(), what
        wrong, bound = (a - e).norm(), (b - e).norm()
        assert wrong <= 2 * bound, f"{what}: {wrong / e.norm():.1e}, eager {bound / e.norm():.1e}"


@pytest.mark.parametrize(("name", "c"), cases())
def test_forward_and_gradients(name: str, c: Combination) -> None:
    assert_near(attention, name, c)


@pytest.mark.parametrize("name", ["fa4", "flash", "triton"])
def test_prefixes_that_end_inside_later_tiles(name: str) -> None:
    """As of preference pairs, with head counts of Llama-3.1-8B."""
    need(name, 128)
    lengths = torch.tensor([700, 500, 900, 301])
    ids = torch.arange(4).repeat_interleave(lengths)[None].cuda()
    bounds = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().cuda()
    prefixes = torch.tensor([[0, 0], [0, 299], [1200, 1200], [1200, 1777]])
    shared = {"segment_ids": ids, "cu_seq_lens": bounds, "prefixes": prefixes, "longest": 900}
    t = ids.shape[1]
    leaves = [torch.randn(1, t, n, 128, device="cuda").bfloat16() for n in (32, 8, 8)]
    upstream = torch.randn_like(leaves[0])

    def run_with(function: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        own = [x.to(dtype).requires_grad_() for x in leaves]
        mask = AttentionMask(t, **shared, **options)
        out = function(*own, mask=mask, window=None, softcap=None)
        return [out, *torch.autograd.grad(out, own, upstream.to(dtype))]

    exact = run_with(attention_ref, torch.float32)
    found, spelled = (
        run_with(f, torch.bfloat16, **options)
        for f, options in ((attention, {"backend": name}), (eager, {}))
    )
    # Of each sequence: what is wrong with one is not lost in the others
    for what, a, b, e in zip(("out", "dq", "dk", "dv"), found, spelled, exact, strict=True):
        for x, y, z in zip(*(v[0].split(lengths.tolist()) for v in (a, b, e)), strict=True):
            assert (x - z).norm() <= 2 * (y - z).norm(), what


SPANS = (0, 57, 130, T)  # which end inside sequences; some have no query in a part, and keys


def in_parts(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, **how: Any) -> Tensor:
    """As ranks compute it that divide the queries of a head."""
    parts = []
    for first, end in itertools.pairwise(SPANS):
        part = mask.slice_queries(first, end)
        keys = (x[:, : part.keys] for x in (k, v))
        parts.append(attention(q[:, first:end], *keys, mask=part, **how))
    return torch.cat(parts, 1)


PARTS = [Combination(128, None, None), *(c for c in SOME if c.causal)]


@pytest.mark.parametrize("c", PARTS, ids=str)
@pytest.mark.parametrize("name", ["fa4", "flash", "triton", "flex", "sdpa"])
def test_queries_in_parts(name: str, c: Combination) -> None:
    assert_near(in_parts, name, c)


def test_fa4_of_head_dim_80_without_gradients() -> None:
    need("fa4", 80, grad=False)
    c = Combination(80, None, None, "packed")
    leaves = tensors(c)
    with torch.no_grad():
        found = forward(attention, c, leaves, backend="fa4")
        exact = forward(attention_ref, c, [x.float() for x in leaves])
        spelled = forward(eager, c, leaves)
    assert (found - exact).norm() <= 2 * (spelled - exact).norm()
    if capability(0) // 10 == 9:
        with pytest.raises(ValueError, match="its backward pass is wrong for head_dim 80"):
            forward(attention, c, leaves, backend="fa4")


def test_auto_takes_rows_of_one_length_for_rows() -> None:
    need("cudnn")
    q, k, v = (torch.randn(1, 1024, n, 64, device="cuda").bfloat16() for n in (4, 2, 2))
    mask = AttentionMask(1024, segment_ids=(torch.arange(1024, device="cuda") // 256)[None])
    attention(q, k, v, mask=mask)
    (plan,) = mask.plans.values()
    request = AttentionRequest(sm=capability(0), head_dim=64, longest=256)
    assert plan.choice == choose_backend(request, missing=missing(0)) and plan.even.tokens == 256


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", OBSTACLES)
def test_a_window_sees_exactly_its_tokens(name: str, causal: bool) -> None:
    if name == "cudnn":
        pytest.skip("cudnn: it has no sliding window")
    need(name)
    t = 128
    q = torch.zeros(1, t, 2, t, device="cuda", dtype=torch.bfloat16)  # all keys weigh the same
    k, v = torch.zeros_like(q), torch.eye(t, device="cuda", dtype=torch.bfloat16)
    v = v[None, :, None].expand(1, t, 2, t)  # and leave their mark
    at = torch.arange(t, device="cuda")
    for window in (1, 65) if name == "flex" else (1, 2, 63, 64, 65, 127):  # it compiles each
        mask = AttentionMask(t, causal=causal, backend=name)
        seen = attention(q, k, v, mask=mask, window=window)[0] > 0  # [query, head, key]
        ahead = at[None] - at[:, None]
        expected = (ahead.abs() < window) & ((ahead <= 0) | (not causal))
        assert torch.equal(seen, expected[:, None].expand_as(seen)), window


@pytest.mark.parametrize("name", ["fa4", "flash", "triton"])
def test_empty_sequences_at_the_end(name: str) -> None:
    """As from cu_seq_lens that are padded to a length of their own."""
    need(name)
    c = Combination(layout="packed")
    leaves = tensors(c)
    upstream = torch.randn_like(leaves[0])
    cu = torch.tensor([0, 100, 101, 261, 268, 522, 522, 522], dtype=torch.int32, device="cuda")
    found = run(attention, c, leaves, upstream, backend=name, cu_seq_lens=cu, longest=300)
    expected = run(attention, c, leaves, upstream, backend=name)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_other_lengths_compile_nothing_new() -> None:
    need("fa4")  # FlexAttention does compile, for every 256 tokens
    seconds = []
    for lengths in ([300, 212], [31, 600], [777], [500, 1, 90], [64, 64, 70], [1400, 3]):
        total = sum(lengths)
        q, k, v = (
            torch.randn(1, total, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in (4, 2, 2)
        )
        ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].cuda()
        start = time.perf_counter()
        out = attention(q, k, v, mask=AttentionMask(total, segment_ids=ids, backend="fa4"))
        out.backward(torch.randn_like(out))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    # One row of one sequence is a batch of rows, a second kind
    assert max(seconds[3:]) < 1.0, seconds


@pytest.mark.parametrize("name", ["fa4", "flash", "triton", "flex"])
def test_no_mask_of_tokens_by_tokens_exists(name: str) -> None:
    need(name)
    t = 32768
    q, k, v = (
        torch.randn(1, t, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    )
    ids = (torch.arange(t, device="cuda") // 700)[None]
    for window in (None, 512):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mask = AttentionMask(t, segment_ids=ids, backend=name)
        out = attention(q, k, v, mask=mask, window=window)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert torch.cuda.max_memory_allocated() - before < t * t / 4  # bytes


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_compiled_flash_attn_4_alone(packed: bool) -> None:
    """Window, softcap, scale, groups and determinism: bit for bit what eager code computes."""
    need("fa4", softcap=True, deterministic=True)
    c = Combination(64, 40, 30.0, "packed" if packed else "rows")
    q, k, v = leaves = tensors(c)
    upstream = torch.randn_like(q)
    given = on_gpu(c.layout)
    if packed:
        cu = torch.tensor([0, 100, 101, 261, 268, 522], dtype=torch.int32, device="cuda")
        given |= {"cu_seq_lens": cu, "longest": 254}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = AttentionMask(T, **given, backend="fa4")
        return attention(q, k, v, mask=mask, window=c.window, softcap=c.softcap, scale=0.2)

    torch.use_deterministic_algorithms(True)
    try:
        found = [
            [out, *torch.autograd.grad(out, leaves, upstream)]
            for out in (call(q, k, v), torch.compile(call, fullgraph=True)(q, k, v))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert torch.equal(a, b), name
