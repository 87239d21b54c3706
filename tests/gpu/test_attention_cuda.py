"""Attention backends on a GPU: each against the definition in fp32, and all in one model.

A backend that compiles its kernels takes a few of the combinations here and all of them with
`-m exhaustive`, which needs minutes, or `-n 12`.
"""

import itertools
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tigon
from tests.gpu.support import captured, no_waiting
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.api import VARLEN_BACKENDS
from tigon.kernels.attention.backends import (
    OBSTACLES,
    AttentionRequest,
    capability,
    choose_backend,
    missing,
)

pytestmark = pytest.mark.gpu

B, T, K = 2, 261, 2
COMPILED = ("fa4", "triton", "flex")


def segments(*lengths: int) -> dict[str, Tensor]:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {"segment_ids": ids.view(B, T)}


PADDING = torch.stack([torch.arange(T) >= 60, torch.arange(T) < 201])
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": segments(100, 1, 160, 7, 254),
    "even": segments(*[87] * 6),
    "many": segments(*([100] + [1] * 137 + [2] * 12) * B),  # 300: above 256 flash-attn-4 searches
    "padded": {"key_mask": PADDING},
    "prefixes": segments(100, 60, 101, 200, 61)
    | {"cu_seq_lens": torch.tensor([0, 100, 160, 261, 461, 522], dtype=torch.int32)}
    | {"prefixes": torch.tensor([[0, 0], [0, 80], [0, 80], [0, 0], [261, 400]]), "longest": 200},
}


def on_gpu(layout: str) -> dict[str, Any]:
    """But for what the host has to know."""
    host = ("prefixes", "longest")
    return {name: x if name in host else x.cuda() for name, x in LAYOUTS[layout].items()}


class Combination(NamedTuple):
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    layout: str = "rows"
    groups: int = 4  # query heads for each kv head
    causal: bool = True

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items())


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


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def need(name: str, head_dim: int = 64, **request: bool) -> None:
    """Skip where this machine has no such backend, or it cannot do this."""
    asked = AttentionRequest(sm=capability(0), head_dim=head_dim, **{"grad": True} | request)
    reason = missing(0).get(name) or OBSTACLES[name](asked)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def tensors(c: Combination, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    heads = (c.groups * K, K, K)
    return [
        torch.randn(B, T, n, c.head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for n in heads
    ]


def forward(function: Any, c: Combination, leaves: list[Tensor], **options: Any) -> Tensor:
    given = on_gpu(c.layout)
    mask = AttentionMask(T, causal=c.causal, **given, **options)
    out = function(*leaves, mask=mask, window=c.window, softcap=c.softcap)
    for plan in mask.plans.values():  # of the function under test
        as_rows = c.layout == "even" and plan.choice.name in VARLEN_BACKENDS
        assert (plan.even is not None) == as_rows
    return out


def run(function: Any, c: Combination, leaves: list[Tensor], upstream: Tensor, **options: Any):
    """The output and the gradients of q, k and v."""
    out = forward(function, c, leaves, **options)
    return [out * (upstream != 0), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def eager(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, window: Any, softcap: Any):
    """What transformers spells out, in the dtype of its input but for the softmax."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.bias(window, q.dtype, q.device)
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


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


CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LENGTHS = (300, 1, 215, 84)
CU = torch.tensor([0, 300, 301, 516, 600], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BACKENDS = ["auto", "fa4", "flash", "triton", "flex", "sdpa", "reference"]


@pytest.fixture
def model() -> tigon.Qwen3:
    config = CONFIG | {"use_sliding_window": True}
    return shaken(tigon.Qwen3.from_config(config, dtype=torch.bfloat16, device="cuda"))


def shaken(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.08) if p.dim() > 1 else p.uniform_(0.7, 1.3)
    return model


def losses(model: Any, ids: Tensor, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(ids, labels=ids, **batch, loss_reduction="none").loss
    loss.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def wrong(a: Any, b: Any) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("name", BACKENDS)
def test_packed_equals_unpacked(model: Any, name: str) -> None:
    """Loss of every token and every gradient; twice what bf16 costs the definition."""
    if name != "auto":
        need(name)
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    model.use_attention("reference")
    plain, plain_grads = losses(model, ids, cu_seq_lens=CU.cuda())
    model.use_attention(name)
    exact = tigon.Qwen3.from_config(model.config, dtype=torch.float32, device="cuda")
    exact.load_state_dict(model.state_dict())
    parts = ids.split(LENGTHS, 1)
    alone = torch.cat([exact(p, labels=p, loss_reduction="none").loss for p in parts], 1)
    alone.sum().backward()
    for way in (
        {"cu_seq_lens": CU.cuda(), "max_length_q": 300},
        {"position_ids": POSITIONS.cuda()},
    ):
        loss, grads = losses(model, ids, **way)
        assert wrong(loss, alone) <= 2 * wrong(plain, alone)
        for n, p in exact.named_parameters():
            assert wrong(grads[n], p.grad) <= 2 * wrong(plain_grads[n], p.grad), n


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(model: Any, name: str, side: str) -> None:
    if name != "auto":
        need(name)
    model.use_attention(name)
    mask = torch.zeros(3, 300, dtype=torch.long, device="cuda")
    for row, n in enumerate((300, 120, 213)):
        mask[row, slice(300 - n, None) if side == "left" else slice(n)] = 1
    ids = torch.randint(0, 1000, (3, 300), device="cuda")
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for row in range(3):
            real = mask[row] == 1
            alone = model(ids[row][real][None]).logits[0]
            assert wrong(padded[row][real], alone) < 4e-2  # other positions, other roundings


@pytest.mark.parametrize("name", [*BACKENDS, "cudnn"])
def test_decoding_equals_one_pass(model: Any, name: str) -> None:
    if name != "auto":
        need(name)
    if name == "cudnn":
        model = tigon.Llama.from_config(
            {k: v for k, v in CONFIG.items() if k not in ("sliding_window", "layer_types")},
            dtype=torch.bfloat16,
            device="cuda",
        )
    model.use_attention(name)
    ids = torch.randint(0, 1000, (2, 280), device="cuda")
    with torch.no_grad():
        whole = model(ids).logits
        out = model(ids[:, :270], use_cache=True)
        steps, cache = [out.logits], out.past_key_values
        for t in (*range(270, 276), slice(276, 280)):
            part = ids[:, t : t + 1] if isinstance(t, int) else ids[:, t]
            steps.append(model(part, past_key_values=cache).logits)
    assert wrong(torch.cat(steps, 1), whole) < 4e-2


@pytest.mark.parametrize("name", ["auto", "fa4", "flash", "triton"])
def test_bounds_that_are_given_save_every_wait(model: Any, name: str) -> None:
    if name != "auto":
        need(name)
    model.use_attention(name)
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    packed = {"cu_seq_lens": CU.cuda(), "max_length_q": 300, "labels": ids, "input_ids": ids}
    rows = {"labels": ids.view(2, 300), "input_ids": ids.view(2, 300)}
    for allowed in (nullcontext(), no_waiting()):  # the first time compiles
        with allowed:
            for batch in (packed, rows):
                model(**batch).loss.backward()


@pytest.mark.parametrize("name", ["fa4", "flash", "triton"])
def test_a_graph_replays_packed_batches(model: Any, name: str) -> None:
    need(name)
    model.use_attention(name)
    ids, cu = torch.randint(0, 1000, (1, 600), device="cuda"), CU.cuda()
    batch = {"cu_seq_lens": cu, "max_length_q": 400}

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids, **batch).loss
        loss.backward()
        return loss

    graph, loss = captured(step, warm_ups=2)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    ids.copy_(torch.randint(0, 1000, ids.shape, device="cuda"))
    cu.copy_(torch.tensor([0, 20, 160, 400, 600], dtype=torch.int32))
    graph.replay()
    replayed = {n: g.clone() for n, g in gradients.items()}
    model.zero_grad(set_to_none=True)
    expected = model(ids, labels=ids, **batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for n, p in model.named_parameters():
        assert wrong(replayed[n], p.grad) < 1e-2, n


def test_a_graph_without_bounds(model: Any) -> None:
    ids, cu = torch.randint(0, 1000, (1, 600), device="cuda"), CU.cuda()
    losses(model, ids, cu_seq_lens=cu)  # outside, the host looks
    torch.cuda.synchronize()
    message = "give cu_seq_lens and max_length_q"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(ids, cu_seq_lens=cu)
    losses(model, ids, cu_seq_lens=cu)


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"cu_seq_lens": CU, "max_length_q": 300},
        {"position_ids": POSITIONS},
        {"attention_mask": (torch.arange(600) < 500).long()[None]},
    ],
    ids=lambda way: " ".join(way) or "rows",
)
def test_fullgraph_compile_gives_the_same_numbers(model: Any, way: dict[str, Any]) -> None:
    way = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in way.items()}
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    labels = torch.where(torch.arange(600, device="cuda") < 500, ids, -100)
    loss = model(ids, labels=labels, **way).loss
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, fullgraph=True)(ids, labels=labels, **way).loss
    compiled.backward()
    assert compiled.item() == pytest.approx(loss.item(), rel=1e-3)
    for n, p in model.named_parameters():
        assert wrong(p.grad, expected[n]) < 3e-2, n


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 100])
def test_compiled_flash_attn_4(packed: bool, window: int | None) -> None:
    """As an opaque operator: what eager code calls, to the rounding of the rest of the model."""
    need("fa4")
    sliding = {} if window is None else {"sliding_window": window}
    kept = {k: v for k, v in CONFIG.items() if k not in ("sliding_window", "layer_types")}
    family = tigon.Llama if window is None else tigon.Mistral
    model = family.from_config(kept | sliding, dtype=torch.bfloat16, device="cuda", attention="fa4")
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    bounds = {"cu_seq_lens": CU.cuda(), "max_length_q": 300} if packed else {}
    ids = ids if packed else ids.view(2, 300)
    shaken(model)
    expected, expected_grads = losses(model, ids, **bounds)
    compiled = torch.compile(model, fullgraph=True)
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        loss, grads = losses(compiled, ids, **bounds)
        assert wrong(loss, expected) < 1e-2
        for name, grad in grads.items():
            assert wrong(grad, expected_grads[name.removeprefix("_orig_mod.")]) < 3e-2, name
    with torch.no_grad():
        assert wrong(compiled(ids, **bounds).logits, model(ids, **bounds).logits) < 2e-2


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
