"""A family with a mixer of its own is one file, which this might be, and one line to register it.

# B batch, T tokens, C model dim, R rows of the cache
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.generation.common import padded
from tests.support.contract import assert_same_gradients, gradients, tiny, tiny_llama
from tigon.eval import log_likelihoods
from tigon.layers import BlockInputs, LayerState, Linear, StateSpec
from tigon.layers.recurrent_state import last_inputs, token_bounds
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import ModelConfig
from tigon.models.decoder import PreNormBlock
from tigon.parallel import check_context

# The family's file


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    model_type = "hybrid"
    architecture = "HybridForCausalLM"

    attention_interval: int = 2  # every so many layers, one has attention


class Hidden(LayerState):
    """h [R, C] after the last token of each row."""

    def __init__(self, h: Tensor, grows: bool):
        self.h, self.grows = h, grows

    def update(self, h: Tensor) -> None:
        if self.grows:
            self.h = h  # the old one may be needed by a backward pass
        else:
            self.h.copy_(h)


class GatedRecurrence(nn.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) u_t, of which a gate takes what it lets through."""

    def __init__(self, dim: int):
        super().__init__()
        self.in_proj = Linear(dim, 3 * dim, bias=False)
        self.out_proj = Linear(dim, dim, bias=False)
        self.decay = nn.Parameter(torch.empty(dim))

    def make_state(self, spec: StateSpec) -> Hidden:
        if spec.quantize is not None:
            raise ValueError(f"quantize={spec.quantize!r}: a recurrence keeps no keys and values")
        h = torch.zeros(spec.rows, len(self.decay), dtype=spec.dtype, device=spec.device)
        return Hidden(h, spec.capacity is None)

    def forward(self, x: Tensor, rotation: Any, state: Hidden | None, ctx: BlockInputs) -> Tensor:
        a, u, gate = self.in_proj(x).chunk(3, -1)
        a = (a + self.decay).sigmoid()
        h, hidden = torch.zeros_like(x[:, 0]), []
        if state is not None and ctx.starts is None:
            h = state.h
        for t in range(x.shape[1]):
            if ctx.starts is not None:
                h = h.masked_fill(ctx.starts[:, t, None], 0)
            new = torch.lerp(u[:, t], h, a[:, t])
            h = new if ctx.real is None else torch.where(ctx.real[:, t, None], new, h)
            hidden.append(h)
        y = torch.stack(hidden, 1)
        if state is not None:
            last = last_inputs(y.flatten(0, 1), state.h[:, None], *token_bounds(y, ctx), 1)
            state.update(last[:, 0])
        return self.out_proj(y * F.silu(gate))


class HybridBlock(PreNormBlock):
    def make_mixer(self, c: HybridConfig, layer: int) -> nn.Module:
        if (layer + 1) % c.attention_interval == 0:
            return self.make_attention(c, layer)
        self.mixer_name = "linear_attn"
        return GatedRecurrence(c.hidden_size)


class Hybrid(CausalLM):
    config_class = HybridConfig
    block_class = HybridBlock


# The tests


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "hybrid", Hybrid)


@pytest.fixture
def model() -> CausalLM:
    return tiny(Hybrid, num_hidden_layers=3)


IDS = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))


def sum_recurrence(mixer: GatedRecurrence, x: Tensor) -> Tensor:
    """The mixer's output without a loop: every h_t is a sum over the tokens before."""
    a, u, gate = mixer.in_proj(x).chunk(3, -1)
    a = (a + mixer.decay).sigmoid()
    log = a.log().cumsum(1)
    decayed = (log[:, :, None] - log[:, None]).exp() * (1 - a)[:, None]  # [B, T, T, C]
    seen = torch.ones(x.shape[1], x.shape[1]).tril()[:, :, None]
    return mixer.out_proj((decayed * seen * u[:, None]).sum(2) * F.silu(gate))


def plain(model: CausalLM, ids: Tensor) -> Tensor:
    """The model's logits, whose recurrences are `sum_recurrence`."""
    mixers = [m for m in model.modules() if isinstance(m, GatedRecurrence)]
    hooks = [m.register_forward_hook(lambda m, x, _: sum_recurrence(m, x[0])) for m in mixers]
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("recomputed", [False, True])
def test_loss_and_gradients(model: CausalLM, recomputed: bool) -> None:
    expected = plain(model, IDS)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    model.activation_checkpointing = recomputed
    out = model(IDS, labels=IDS)
    torch.testing.assert_close(out.loss, loss)
    assert_same_gradients(gradients(out.loss, model), gradients(loss, model))


def test_packed_and_padded_rows_are_as_if_alone(model: CausalLM) -> None:
    alone = [model(IDS[:1, :5]).logits[0], model(IDS[:1, 5:]).logits[0]]
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None]
    for how in ({"position_ids": positions}, {"cu_seq_lens": torch.tensor([0, 5, 13])}):
        packed = model(IDS[:1], **how).logits[0]
        torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
    for mask in (torch.arange(13) < 5, torch.arange(13) >= 8):
        row = torch.zeros(1, 13).long().masked_scatter(mask, IDS[:1, :5])
        logits = model(row, attention_mask=mask[None].long()).logits[0, mask]
        torch.testing.assert_close(logits, alone[0], rtol=1e-4, atol=1e-5)


def test_gradients_through_a_growing_cache(model: CausalLM) -> None:
    expected = gradients(model(IDS).logits.square().mean(), model)
    out = model(IDS[:, :6], use_cache=True)
    rest = model(IDS[:, 6:], past_key_values=out.past_key_values).logits
    found = gradients(torch.cat((out.logits, rest), 1).square().mean(), model)
    assert_same_gradients(found, expected)


def greedy(model: CausalLM, row: Tensor, new: int) -> list[int]:
    """Token by token, each from a pass over the whole text."""
    text = row[None]
    with torch.no_grad():
        for _ in range(new):
            text = torch.cat((text, plain(model, text)[:, -1:].argmax(-1)), 1)
    return text[0, len(row) :].tolist()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(model: CausalLM, cache: Any, device: str) -> None:
    lengths = (3, 11, 1, 7)
    ids, mask = padded(lengths, 97)
    expected = [greedy(model, row[-n:], 12) for row, n in zip(ids, lengths, strict=True)]
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
    common |= {"cache_implementation": cache}
    if cache == "static":
        common["prefill_chunk_size"] = 10  # packs of prompts, and one prompt in two parts
    model.to(device)
    tokens = model.generate(ids, eos_token_id=[], **common)[:, 11:]
    assert tokens.tolist() == expected
    # Finished rows are removed from the batch, and the states of the others stay with them
    ends = [expected[0][0], expected[1][1], expected[2][1]]
    tokens = model.generate(ids, eos_token_id=ends, **common)[:, 11:].tolist()
    for row, said in zip(tokens, expected, strict=True):
        last = next((i for i, token in enumerate(said) if token in ends), 11)
        assert row[: last + 1] == said[: last + 1]


def test_scored_continuations(model: CausalLM) -> None:
    requests = [(IDS[0, :9].tolist(), IDS[1, :n].tolist()) for n in (1, 3, 2)]
    for (context, said), found in zip(requests, log_likelihoods(model, requests), strict=True):
        text = torch.tensor([context + said])
        logp = plain(model, text)[0, 8:-1].log_softmax(-1)
        expected = logp.gather(1, text[0, 9:, None]).sum().item()
        assert found.logprob == pytest.approx(expected, rel=1e-4)


def test_export_and_reload(model: CausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert isinstance(again, Hybrid) and again.config.attention_interval == 2
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_what_a_recurrence_cannot_do(model: CausalLM) -> None:
    kept = r"layer 0 keeps one Hidden of \(56,\) for all tokens of a row, from which the last"
    llama = tiny_llama().eval()
    with pytest.raises(ValueError, match=f"the model cannot drop rejected proposals: {kept}"):
        model.generate(IDS, assistant_model=llama)
    with pytest.raises(ValueError, match=f"assistant_model cannot drop rejected proposals: {kept}"):
        llama.generate(IDS, assistant_model=model)
    cache = model.static_cache(2, 20)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=kept):
        cache.crop(torch.tensor([5, 5]))
    hidden = r"1 layers of Hidden of \(56,\)"
    with pytest.raises(
        ValueError, match=rf"has {hidden}, 1 layers of 2 kv heads .*, {hidden}, but"
    ):
        llama(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="quantize='int8': a recurrence keeps no keys and values"):
        model.generate(IDS, cache_implementation="quantized")
    check_context(model, 1)
    refused = "parallel.context=2: layer 0 of Hybrid is a GatedRecurrence, which needs the tokens"
    with pytest.raises(ValueError, match=refused):
        check_context(model, 2)
