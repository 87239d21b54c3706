"""Attention with sinks on a GPU: every backend that has them, in kernels and in gpt-oss."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.gpu.attention import (
    CU,
    LENGTHS,
    PADDING,
    Combination,
    forward,
    fresh,
    losses,
    need,
    run,
    shaken,
    tensors,
    wrong,
)
from tests.kernels.test_append_attention import Rows
from tigon.kernels import AttentionMask, attention, attention_ref, use
from tigon.kernels.attention.backends import AttentionRequest as Request
from tigon.kernels.attention.backends import capability, choose_backend, missing

__all__ = ["fresh"]
pytestmark = pytest.mark.gpu
BACKENDS = ("fa4", "flash", "flex", "reference")
COMBINATIONS = [
    Combination(64, None, None, "rows", 8),
    Combination(64, 40, None, "rows", 8),
    Combination(64, 40, None, "packed"),
    Combination(64, None, None, "packed"),
    Combination(128, 40, None, "even", 1),
    Combination(128, None, None, "padded"),
    Combination(64, 40, None, "prefixes"),
]


def with_sinks(function: Any) -> Any:
    return lambda q, k, v, sinks, **how: function(q, k, v, sinks=sinks, **how)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    mask: AttentionMask,
    window: Any,
    softcap: Any,
) -> Tensor:
    """What transformers spells out, but for the softmax in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask.bias(window, q.dtype, q.device)
    column = sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
    both = torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (both[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize("c", COMBINATIONS, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_forward_and_gradients(name: str, c: Combination) -> None:
    """Against fp32, at most twice as wrong as the formula spelled out in bf16."""
    need(name, c.head_dim, sinks=True)
    q, k, v = tensors(c)
    sinks = (torch.randn(q.shape[2], device="cuda") * 2 + 3).bfloat16().requires_grad_()
    leaves = [q, k, v, sinks]
    exact_leaves = [x.detach().float().requires_grad_() for x in leaves]
    # With a part along the output: else a sink's gradient is a sum whose terms cancel, as far from
    # fp32 as chance has it
    out = forward(with_sinks(attention_ref), c, exact_leaves).detach()
    upstream = torch.randn_like(q) + 2 * out.to(q.dtype)
    if c.layout == "padded":
        upstream = upstream * PADDING.cuda()[:, :, None, None]
    exact = run(with_sinks(attention_ref), c, exact_leaves, upstream)
    found = run(with_sinks(attention), c, leaves, upstream, backend=name)
    spelled = run(eager, c, leaves, upstream)
    names = ("out", "dq", "dk", "dv", "dsinks")
    for what, a, b, e in zip(names, found, spelled, exact, strict=True):
        assert a.shape == e.shape and a.isfinite().all(), what
        assert wrong(a, e) <= 2 * wrong(b, e) + 2**-9, (what, wrong(a, e), wrong(b, e))


def test_what_auto_takes() -> None:
    """A fused kernel, where there is one; cuDNN and SDPA would ignore the sinks."""
    q, k, v = (torch.randn(1, 1024, n, 64, device="cuda").bfloat16() for n in (8, 2, 2))
    mask = AttentionMask(1024)
    attention(q, k, v, mask=mask, sinks=torch.zeros(8, device="cuda"))
    (plan,) = mask.plans.values()
    request = Request(sm=capability(0), head_dim=64, longest=1024, sinks=True)
    assert plan.choice == choose_backend(request, missing=missing(0))
    assert plan.choice.name not in ("cudnn", "sdpa")


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "slots"), [(None, 2000), (128, 143)])
def test_decoding(window: int | None, slots: int, dtype: torch.dtype, int8: bool) -> None:
    torch.set_default_device("cuda")
    try:
        with use("triton"):
            sizes: dict[str, Any] = {"heads": 64, "kv_heads": 8, "dim": 64}
            sinks = torch.linspace(-4, 8, 64).to(dtype)
            for t in (1, 4, 16):
                rows = Rows([0, 1, 127, 1800], slots, int8=int8, dtype=dtype, **sizes)
                rows.check(t, window=window, sinks=sinks)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("past", [1, 127, 3000])
def test_single_tokens_of_a_growing_cache(past: int, window: int | None) -> None:
    q = torch.randn(3, 1, 64, 64, device="cuda").bfloat16()
    k, v = (torch.randn(3, past + 1, 8, 64, device="cuda").bfloat16() for _ in "kv")
    sinks, mask = torch.linspace(-4, 8, 64, device="cuda").bfloat16(), AttentionMask(1, past=past)
    found = attention(q, k, v, mask=mask, window=window, sinks=sinks)
    (plan,) = mask.plans.values()
    assert plan.choice.name == "flash"
    given: dict[str, Any] = {"mask": mask, "window": window}
    exact = attention_ref(q.float(), k.float(), v.float(), sinks=sinks.float(), **given)
    spelled = eager(q, k, v, sinks, softcap=None, **given)
    assert wrong(found, exact) <= 2 * wrong(spelled, exact) + 2**-9


CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "num_local_experts": 3,  # all are chosen: a choice by a hair's breadth would be another in bf16
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.0,
}


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_packed_equals_unpacked(name: str) -> None:
    """Loss of every token and every gradient; twice what bf16 costs the definition."""
    if name != "auto":
        need(name, sinks=True)
    model = shaken(tigon.GptOss.from_config(CONFIG, dtype=torch.bfloat16, device="cuda"))
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    model.use_attention("reference")
    plain, plain_grads = losses(model, ids, cu_seq_lens=CU.cuda())
    model.use_attention(name)
    exact = tigon.GptOss.from_config(model.config, dtype=torch.float32, device="cuda")
    exact.load_state_dict(model.state_dict())
    parts = ids.split(LENGTHS, 1)
    alone = torch.cat([exact(p, labels=p, loss_reduction="none").loss for p in parts], 1)
    alone.sum().backward()
    loss, grads = losses(model, ids, cu_seq_lens=CU.cuda(), max_length_q=300)
    assert wrong(loss, alone) <= 2 * wrong(plain, alone)
    for n, p in exact.named_parameters():
        # The terms of a sink's gradient cancel: it is as far from fp32 as chance has it
        more = 2**-3 if n.endswith("sinks") else 2**-8
        assert wrong(grads[n], p.grad) <= 2 * wrong(plain_grads[n], p.grad) + more, n


def test_compiled() -> None:
    model = shaken(tigon.GptOss.from_config(CONFIG, dtype=torch.bfloat16, device="cuda"))
    ids = torch.randint(0, 1000, (1, 600), device="cuda")
    expected = model(ids, labels=ids).loss
    found = torch.compile(model, fullgraph=True)(ids, labels=ids).loss
    assert wrong(found, expected) < 1e-2


@torch.no_grad()
def test_static_cache_is_as_one_pass() -> None:
    model = shaken(tigon.GptOss.from_config(CONFIG, dtype=torch.bfloat16, device="cuda")).eval()
    ids = torch.randint(0, 1000, (2, 280), device="cuda")
    whole, cache = model(ids).logits, model.static_cache(2, 300)
    steps = [model(ids[:, :270], past_key_values=cache).logits]
    steps += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(270, 280)]
    assert wrong(torch.cat(steps, 1), whole) < 4e-2
