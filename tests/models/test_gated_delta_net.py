"""Gated DeltaNet in families that have it: texts beyond a chunk, padding, packing, states.

# B rows, T tokens
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.generation.common import padded
from tests.models.dense_cases import FULL
from tests.models.test_io import edit
from tests.models.test_parity import gradients
from tests.models.tiny import CASES, exact, load_case, random_ids, reference
from tests.support.contract import tiny_llama
from tests.support.numbers import assert_as_near, float64
from tigon.layers import GatedDeltaNet, KVCache
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import ConfigError
from tigon.parallel import check_context

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
LONG = 150  # more than two chunks of 64, and no multiple of them
families = pytest.mark.parametrize("model_type", FAMILIES)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@families
def test_texts_beyond_a_chunk(model_type: str, tmp_path: Path) -> None:
    theirs = reference(model_type, CASES[model_type]["plain"], tmp_path)
    ours, twin, ids = from_pretrained(tmp_path), exact(theirs), random_ids(2, LONG)
    with float64():
        truth = twin(ids, labels=ids)
        truth.loss.backward()
    peer, found = theirs(ids, labels=ids), ours(ids, labels=ids, return_logits=True)
    assert_as_near(found.logits, peer.logits, truth.logits)
    for out in (peer, found):
        out.loss.backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (theirs, twin)]
    assert_as_near(gradients(ours), *grads)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CausalLM]:
    with torch.no_grad():
        yield load_case(request.param, "plain", tmp_path)


PACKS = [70, 1, 2, 64, 13]  # sequences shorter than the convolution, and ends of chunks


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "rows"])
def test_packed_rows_are_as_if_apart(model: CausalLM, how: str) -> None:
    ids, positions = random_ids(1, LONG), torch.cat([torch.arange(n) for n in PACKS])[None]
    alone = torch.cat([model(part).logits for part in ids.split(PACKS, 1)], 1)
    if how == "rows":
        ids, positions, alone = (x.view(2, 75, *x.shape[2:]) for x in (ids, positions, alone))
        positions[1] = torch.cat([torch.arange(62), torch.arange(13)])
        alone = torch.cat([model(part).logits for part in ids[1:].split([62, 13], 1)], 1)
        assert_close(model(ids, position_ids=positions).logits[1], alone[0])
        return
    bounds = torch.tensor([0, *PACKS]).cumsum(0)
    options = {"position_ids": positions} if how == "position_ids" else {"cu_seq_lens": bounds}
    assert_close(model(ids, **options).logits, alone)


def test_gradients_of_packed_rows(tmp_path: Path) -> None:
    model, ids = load_case("qwen3_5_text", "plain", tmp_path), random_ids(1, LONG)
    positions = torch.cat([torch.arange(n) for n in PACKS])[None]
    model(ids, position_ids=positions, labels=ids, loss_reduction="sum").loss.backward()
    found = gradients(model)
    model.zero_grad()
    for part in ids.split(PACKS, 1):
        if part.shape[1] > 1:
            model(part, labels=part, loss_reduction="sum").loss.backward()
    for name, expected in gradients(model).items():
        assert_close(found[name], expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [3, 9])  # any token, whose embedding is not zero
def test_padding_is_as_if_absent(model: CausalLM, side: str, pad: int) -> None:
    ids, lengths = random_ids(3, 20), (3, 20, 11)
    mask = torch.zeros_like(ids)
    for row, n in zip(mask, lengths, strict=True):
        row[20 - n if side == "left" else 0 :][:n] = 1
    batch = ids.masked_fill(mask == 0, pad)
    assert model.model.embed_tokens.weight[pad].abs().min() > 0
    later = random_ids(3, 6, seed=2)
    whole = torch.cat((mask, torch.ones_like(later)), 1)
    for drop in (False, True):
        model.drop_padding = drop
        logits = model(batch, attention_mask=mask).logits
        cache = KVCache()
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        options: dict[str, Any] = {"position_ids": positions[:, :20], "past_key_values": cache}
        first = model(batch, attention_mask=mask, **options).logits
        parts = []
        for start, end in ((20, 21), (21, 23), (23, 26)):
            options["position_ids"] = positions[:, start:end]
            new = later[:, start - 20 : end - 20]
            parts.append(model(new, attention_mask=whole[:, :end], **options).logits)
        for row, n in enumerate(lengths):
            real = mask[row].bool()
            alone = model(torch.cat((batch[row, real], later[row]))[None]).logits[0]
            assert_close(logits[row, real], alone[:n])
            assert_close(first[row, real], alone[:n])
            assert_close(torch.cat(parts, 1)[row], alone[n:])


@pytest.mark.parametrize("proposals", [1, 3, 6])
def test_speculation(model: CausalLM, proposals: int, tmp_path: Path) -> None:
    """Proposals that are right and wrong; the draft's states go back, too."""
    ids, mask = padded((3, 11, 1, 7), 211)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 9}
    options |= {"eos_token_id": [], "cache_implementation": "static"}
    expected = model.generate(ids, **options)
    other = load_case("qwen3_5_text", "plain", tmp_path / "other")
    for p in other.parameters():  # often right, and often wrong
        p.add_(torch.randn_like(p) * 0.01 * p.std().nan_to_num(0))
    for draft in (other, tiny_llama(vocab_size=211).eval(), model):
        found = model.generate(
            ids, assistant_model=draft, num_assistant_tokens=proposals, **options
        )
        assert torch.equal(found, expected)


def test_what_is_taken_back_and_what_cannot_be(model: CausalLM) -> None:
    ids = random_ids(2, 30)
    cache = model.static_cache(2, 40, chunk=8, rollback=3)
    model(ids[:, :12], past_key_values=cache)
    for start, end, back in ((12, 16, 3), (13, 15, 1), (14, 22, 0), (22, 30, 0)):
        logits = model(ids[:, start:end], past_key_values=cache).logits
        assert_close(logits, model(ids[:, :end]).logits[:, start:])
        cache.crop(cache.lengths - back)
    with pytest.raises(ValueError, match=r"more than the 3 tokens back that .* \(rollback\)"):
        cache.crop(cache.lengths - 4)
    plain = model.static_cache(2, 40)
    assert cache.states[0].nbytes == 4 * plain.states[0].nbytes
    model(ids, past_key_values=plain)
    kept = r"layer 0 keeps one state of 3 x \d+ and 12 x 14 x 10 numbers for all tokens of a row"
    with pytest.raises(ValueError, match=f"{kept}, .*: give static_cache rollback="):
        plain.crop(torch.tensor([5, 5]))
    with pytest.raises(ValueError, match="rollback=-1 is not a number of tokens"):
        model.static_cache(2, 40, rollback=-1)
    emptied = model.static_cache(2, 40, rollback=3)
    model(ids[:, :8], past_key_values=emptied)
    emptied.crop(torch.tensor([0, 5]))
    logits = model(ids[:, 5:9], past_key_values=emptied).logits
    assert_close(logits[0], model(ids[:1, 5:9]).logits[0])
    assert_close(logits[1], model(ids[1:, :9]).logits[0, 5:])
    grown = cache.capacity
    cache.grow(64)
    assert grown == 40 and cache.states[0].history == 3
    assert_close(
        model(random_ids(2, 5, 3), past_key_values=cache).logits,
        model(torch.cat((ids, random_ids(2, 5, 3)), 1)).logits[:, 30:],
    )


@torch.enable_grad()
@pytest.mark.parametrize("name", ["", "conv1d.weight", "decay.A_log", "decay.dt_bias"])
def test_states_keep_no_gradients(name: str, tmp_path: Path) -> None:
    """Of any parameter that is trained, alone or with all the others."""
    model, ids = load_case("qwen3_5_text", "plain", tmp_path), random_ids(1, 9)
    out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    if name:
        mixer = next(
            m for m in model.requires_grad_(False).modules() if isinstance(m, GatedDeltaNet)
        )
        mixer.get_parameter(name).requires_grad_()
    for cache in (out.past_key_values, model.static_cache(1, 20)):
        with pytest.raises(ValueError, match="a state of Gated DeltaNet keeps no gradients: call"):
            model(ids, past_key_values=cache)


DECAYS = ("A_log", "dt_bias")


def test_decays_stay_in_fp32(tmp_path: Path) -> None:
    reference("qwen3_5_text", CASES["qwen3_5_text"]["plain"], tmp_path)
    first = from_pretrained(tmp_path)
    before = {n: p.clone() for n, p in first.named_parameters() if n.endswith(DECAYS)}
    half = from_pretrained(tmp_path, dtype=torch.bfloat16)
    for model in (half, first.to(torch.bfloat16), first.half(), first.to("meta")):
        dtypes = {n: p.dtype for n, p in model.named_parameters()}
        kept = {n for n, dtype in dtypes.items() if dtype == torch.float32}
        assert kept == before.keys() and len(kept) == 4
    for name, p in half.named_parameters():
        assert name not in before or torch.equal(p, before[name])


def test_padding_of_a_cache_in_bf16(tmp_path: Path) -> None:
    """The state is in fp32, the convolution's inputs in the model's dtype."""
    reference("qwen3_5_text", CASES["qwen3_5_text"]["plain"], tmp_path)
    model = from_pretrained(tmp_path, dtype=torch.bfloat16)
    state = model.static_cache(2, 20).states[0]
    assert [x.dtype for x in state.tensors] == [torch.bfloat16, torch.float32]
    with torch.no_grad():
        cache, ids = KVCache(), random_ids(2, 9)
        model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
    state = cache.states[0]
    assert [x.dtype for x in state.tensors] == [torch.bfloat16, torch.float32]


@families
def test_tensors_of_further_predictions_are_skipped(model_type: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type]["plain"], tmp_path)
    more = {"mtp.fc.weight": torch.zeros(3), "mtp.norm.weight": torch.zeros(2, 5)}
    edit(tmp_path, lambda tensors: tensors.update(more))
    with pytest.warns(
        UserWarning, match=r"2 tensors are skipped, 'mtp.fc.weight' among them; they"
    ):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("keys", [{}, {"full_attention_interval": 3}, {"num_hidden_layers": 3}])
@families
def test_what_a_config_leaves_out(model_type: str, keys: dict[str, int]) -> None:
    theirs = AutoConfig.for_model(model_type, **keys)
    ours = MODELS[model_type].config_class.from_dict({"model_type": model_type, **keys})
    layers = range(theirs.num_hidden_layers)
    assert [ours.attends(i) for i in layers] == [k == FULL for k in theirs.layer_types]
    name = "partial_rotary_factor"
    assert ours.rope_parameters[name] == theirs.rope_parameters[name] == 0.25
    given = MODELS[model_type].config_class.from_dict({"model_type": model_type, name: 0.5})
    assert given.rope_parameters[name] == 0.5


def test_refusals(model: CausalLM) -> None:
    name = type(model).__name__
    refused = f"parallel.context=2: layer 0 of {name} is a GatedDeltaNet, which needs the tokens"
    check_context(model, 1)
    with pytest.raises(ValueError, match=refused):
        check_context(model, 2)
    config = model.config.to_dict()
    wrong = {
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "linear_num_value_heads": 5,
        "hidden_act": "gelu",
        "attn_output_gate": False,
        "full_attention_interval": 0,
    }
    for key, value in wrong.items():
        with pytest.raises(ConfigError, match=key):
            MODELS[config["model_type"]].from_config(config | {key: value}, device="meta")


def test_modules(model: CausalLM) -> None:
    kinds = [type(layer.mixer) for layer in model.model.layers]
    assert [kind is GatedDeltaNet for kind in kinds] == [True, False, True]
    assert not model.model.shares_prefixes
    assert len({*model.model.state_kinds}) == 2
    for i in (0, 2):
        model.model.layers[i] = model.model.layers[1]
    assert model.model.shares_prefixes
    assert len({*model.model.state_kinds}) == 1
