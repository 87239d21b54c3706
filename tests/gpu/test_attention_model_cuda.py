"""Attention backends on a GPU in one model: packed, padded, from a cache, captured and compiled."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.gpu.attention import CONFIG, CU, LENGTHS, fresh, losses, need, shaken, wrong
from tests.gpu.support import captured, no_waiting

__all__ = ["fresh"]
pytestmark = pytest.mark.gpu
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BACKENDS = ["auto", "fa4", "flash", "triton", "flex", "sdpa", "reference"]


@pytest.fixture
def model() -> tigon.Qwen3:
    config = CONFIG | {"use_sliding_window": True}
    return shaken(tigon.Qwen3.from_config(config, dtype=torch.bfloat16, device="cuda"))


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
