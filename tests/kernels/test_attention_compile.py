"""flash-attn-4 inside torch.compile, played by plain torch: what is told to it, and gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.contract import assert_same_gradients, gradients, tiny_llama
from tests.support.flash import Interface, implementation, on_hopper
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention import backends, fa4
from tigon.kernels.attention.backends import AttentionRequest, select_backend

__all__ = ["on_hopper"]
pytestmark = pytest.mark.traced
B, T, H, K, D = 2, 9, 6, 2, 10
CU = torch.tensor([0, 4, 9, 18], dtype=torch.int32)
SEGMENTS = torch.arange(3).repeat_interleave(CU.diff()).view(B, T)
PACKED = {"segment_ids": SEGMENTS, "cu_seq_lens": CU, "longest": 9}
EVEN = {**PACKED, "segment_ids": torch.arange(B)[:, None].expand(B, T), "cu_seq_lens": CU[::2]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": ({}, {}),
    "a window and a scale": ({}, {"window": 4, "scale": 0.3}),
    "both sides": ({"causal": False}, {"window": 4}),
    "packed": (PACKED, {"window": 3}),
    "packed, both sides": ({**PACKED, "causal": False}, {"scale": 0.3}),
    "continuing a cache": ({"past": 3}, {"window": 5}),
}


@pytest.fixture(autouse=True)
def path() -> Iterator[None]:
    """There are no kernels of ours behind it: one path, on the CPU."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(past: int = 0) -> list[Tensor]:
    sizes = ((T, H), (past + T, K), (past + T, K))
    return [torch.randn(B, *size, D, requires_grad=True) for size in sizes]


def compiled_attention(given: dict[str, Any], options: dict[str, Any]) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = AttentionMask(T, **given, backend="fa4")
        return attention(q, k, v, mask=mask, **options)

    return torch.compile(run, backend="aot_eager", fullgraph=True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_the_definition(case: str) -> None:
    given, options = CASES[case]
    tensors = leaves(given.get("past", 0))
    out = compiled_attention(given, options)(*tensors)
    expected = attention_ref(*tensors, mask=AttentionMask(T, **given), **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(B, H, T, D).transpose(1, 2)
    found = torch.autograd.grad(out, tensors, upstream)
    for a, b in zip(found, torch.autograd.grad(expected, tensors, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(Interface.told) == 2  # in the forward and in the backward pass


@pytest.mark.usefixtures("on_hopper")
def test_softcap_and_determinism_get_through() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compiled_attention(PACKED, {"softcap": 0.5})(*leaves()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    forward, backward = Interface.told
    assert forward["softcap"] == backward["softcap"] == 0.5 and backward["deterministic"] is True
    compiled_attention(PACKED, {})(*leaves()).sum().backward()
    assert Interface.told[-1]["softcap"] == 0.0 and Interface.told[-1]["deterministic"] is False


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_model_of_packed_sequences(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(num_hidden_layers=1)
    monkeypatch.setattr(implementation, "FA4_MIN_SEQLEN", 10)
    model.attention, model.activation_checkpointing = "fa4", recompute  # type: ignore[assignment]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    # From the second on, a graph for any length
    for n in (13, 9, 7) if recompute else (13,):
        ids, cu = torch.arange(2 * n).view(2, n) * 3, torch.tensor([0, 4, n, 2 * n])
        batch = {"input_ids": ids, "labels": ids, "cu_seq_lens": cu, "max_length_q": n}
        expected = model(**batch).loss
        Interface.told.clear()
        loss = compiled(**batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        assert_same_gradients(gradients(loss, model), gradients(expected, model))
        assert {told["max_seqlen_q"] for told in Interface.told} == {max(n, 10)}
        assert len(Interface.told) == (3 if recompute else 2)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("cu", [None, CU])
def test_operators(cu: Tensor | None) -> None:
    """Schemas, shapes and autograd as torch wants them, for tensors in other orders too."""
    shape = (B, T) if cu is None else (B * T,)
    packed = torch.randn(*shape, H + 2 * K, D).transpose(-2, -3).contiguous().transpose(-2, -3)
    q, k, v = (x.requires_grad_() for x in packed.split((H, K, K), -2))
    longest = None if cu is None else 9
    options = (cu, cu, longest, longest, 0.3, True, 4, 0, 0.0, False)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(fa4._forward.op, (q, k, v, *options))
    with torch.no_grad():
        out, lse = fa4._forward(q, k, v, *options)
        given = [x.detach() for x in (q, k, v, out, torch.randn_like(out), lse)]
        torch.library.opcheck(fa4._backward.op, (*given, *options))


@pytest.mark.parametrize("lacks", [False, True])
def test_a_compiled_choice_knows_the_machine(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "flash_attn_4", lambda: "not installed" if lacks else object())
    device = 1000 + lacks  # that nobody has asked about

    def run(x: Tensor) -> tuple[Tensor, str]:
        request = AttentionRequest(sm=backends.capability(device), grad=True, compiling=True)
        return x + 1, select_backend(request, "auto", device, False).name

    out, name = torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(1))
    assert out == 1 and name == ("flash" if lacks else "fa4")
