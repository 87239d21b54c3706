"""Latent attention and its router, beyond what every family is tested for."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.test_io import same, tensors
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, IN_BF16, load_reference, reference
from tigon import LoraConfig, from_pretrained
from tigon.layers import KVCache
from tigon.models import CausalLM
from tigon.models.adapters.adapters import adapter_parameters
from tigon.models.pretrained.match import EXTRA_LAYERS

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
IDS = tokens()[:, :14]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """DeepSeek's tiny model, all of whose experts are taken: rounding chooses no others."""
    overrides = CASES["deepseek_v3"]["plain"] | IN_BF16["deepseek_v3"]
    reference("deepseek_v3", overrides, tmp_path / "base")
    return tmp_path / "base"


def in_parts(model: CausalLM, cache: Any, ids: Tensor = IDS) -> Tensor:
    """The logits of a prompt, of three steps, of a part and of a step."""
    cuts = ids.split((5, 1, 1, 1, 5, 1), 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in cuts], 1)


def assert_near(found: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    assert (found - expected).abs().max() <= within * expected.abs().max()


def test_a_cache_holds_latents_once(base: Path) -> None:
    model = from_pretrained(base)
    per_token = 3 * (28 + 8)  # of three layers
    assert model.static_cache(2, 50).nbytes == 2 * 50 * per_token * 4
    assert model.static_cache(2, 50, quantize="int8").nbytes == 2 * 50 * (per_token + 3 * 4)
    cache = KVCache()
    with torch.no_grad():
        in_parts(model, cache)
    for state in cache.states:
        assert state.values is None and state.keys.shape[-1] == 36
    static = model.static_cache(2, 50)
    static.select(torch.tensor([1]))
    assert static.nbytes == 50 * per_token * 4


@pytest.mark.parametrize("how", ["lora", "dora", "nf4"])
def test_steps_use_what_is_added_to_or_replaces_the_weight(base: Path, how: str) -> None:
    model = from_pretrained(base, quantize="nf4" if how == "nf4" else None)
    plain = model(IDS).logits
    if how != "nf4":
        model.add_adapter(LoraConfig(rank=3, targets="all-linear", dora=how == "dora"))
        with torch.no_grad():
            for p in adapter_parameters(model, "default").values():
                p.add_(torch.randn_like(p) * 0.1)
    with torch.no_grad():
        whole = model(IDS).logits
        assert how == "nf4" or (whole - plain).abs().max() > 0.1
        assert_near(in_parts(model, KVCache()), whole)
        assert_near(in_parts(model, model.static_cache(2, 20, chunk=1)), whole)
        assert_near(in_parts(model, model.static_cache(2, 20, chunk=8)), whole)


def test_gradients_through_steps(base: Path) -> None:
    model = from_pretrained(base)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(model(IDS).logits.square().mean(), parameters)
    found = torch.autograd.grad(in_parts(model, KVCache()).square().mean(), parameters)
    for name, a, b in zip(names, found, expected, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max(), name
    with pytest.raises(ValueError, match="a StaticCache keeps no gradients"):
        model(IDS, past_key_values=model.static_cache(2, 20))


def test_autocast(base: Path) -> None:
    model = from_pretrained(base)
    with torch.no_grad():
        exact = model(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            whole = model(IDS).logits
            caches = KVCache(), model.static_cache(2, 20, chunk=1)
            parts = [in_parts(model, cache) for cache in caches]
    spread = (whole.float() - exact).norm()
    assert 1e-3 < spread / exact.norm() < 0.05
    for found in parts:
        assert (found.float() - exact).norm() <= 1.5 * spread


# The router


def test_a_correction_bias_stays_exact(base: Path, tmp_path: Path) -> None:
    model, stored = from_pretrained(base), load_file(base / "model.safetensors")[BIAS]
    rounded = from_pretrained(base, dtype=torch.bfloat16)
    assert not torch.equal(stored, stored.bfloat16().float())
    for m in (model, model.bfloat16(), model.float(), rounded, rounded.half()):
        bias = m.get_buffer(BIAS)
        assert bias.dtype == torch.float32 and torch.equal(bias, stored)
        assert BIAS not in dict(m.named_parameters())
    rounded.save_pretrained(tmp_path / "saved")
    written = tensors(tmp_path / "saved")
    assert torch.equal(written.pop(BIAS), stored)
    assert {t.dtype for n, t in written.items() if not n.endswith("bias")} == {torch.float16}
    theirs = load_reference(tmp_path / "saved")
    assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, stored)


def test_router_logits_add_nothing_to_the_loss(tmp_path: Path) -> None:
    theirs = reference("mistral4", CASES["mistral4"]["queries grow"], tmp_path)
    losses = [theirs(IDS, labels=IDS, output_router_logits=wanted).loss.item() for wanted in (0, 1)]
    assert losses[0] == losses[1]
    model = from_pretrained(tmp_path)
    config = model.config.to_dict() | {"output_router_logits": True}
    wanted = type(model).from_config(config)
    wanted.load_state_dict(model.state_dict())
    out = wanted(IDS, labels=IDS, metrics=("expert_load", "aux_loss"))
    assert out.loss.item() == pytest.approx(losses[0], rel=1e-6)
    assert out.metrics["expert_load"].shape == (2, 12)
    assert out.metrics["aux_loss"] >= 3  # k, if all experts get the same


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"n_group": 5}, "n_group=5 does not divide 12 experts into two or more"),
    "groups of one": ({"n_group": 12}, "n_group=12 does not divide 12 experts into two or more"),
    "few groups": (
        {"topk_group": 1, "num_experts_per_tok": 4},
        "topk_group=1 of 4 groups of 3 experts: no token can take 4",
    ),
    "many groups": ({"topk_group": 5}, "topk_group=5 of 4 groups"),
    "kv heads": (
        {"num_key_value_heads": 2},
        "num_key_value_heads=2 is not num_attention_heads=6: latents give every head",
    ),
    "rotated dims": ({"qk_rope_head_dim": 7}, "head_dim=7 is odd"),
    "no latent": ({"kv_lora_rank": 0}, "kv_lora_rank"),
    "scores": ({"scoring_func": "softmax"}, "scoring_func='softmax' changes what"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(base: Path, case: str) -> None:
    changes, message = WRONG[case]
    plain = CASES["deepseek_v3"]["plain"]
    cls, config = type(from_pretrained(base)), from_pretrained(base).config.to_dict()
    with pytest.raises(ValueError, match=message):
        cls.from_config(config | plain | changes, device="meta")


# Files


def test_layers_that_predict_further_tokens_are_skipped(base: Path, tmp_path: Path) -> None:
    original = tensors(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = from_pretrained(base)(IDS).logits
    more = {
        f"model.layers.3.{name}": torch.ones(3)
        for name in ("enorm.weight", "shared_head.head.weight", "mlp.gate.weight")
    }
    save_file(original | more, base / "model.safetensors")
    with pytest.warns(UserWarning, match="3 tensors are skipped, .*layers.3.* they predict"):
        model = from_pretrained(base)
    assert torch.equal(model(IDS).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    assert same(tensors(tmp_path / "saved"), original)
    save_file(original | {"model.layers.2.more": torch.ones(3)}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected: model.layers.2.more"):
        from_pretrained(base)


@pytest.mark.parametrize(
    ("key", "count", "left"),
    [
        (None, 1, ["4", "5"]),
        ("num_nextn_predict_layers", 2, ["5"]),
        ("num_mtp_layers", 0, ["3", "4", "5"]),
        ("num_nextn_predict_layers", 3, []),
    ],
)
def test_layers_beyond_those_that_predict_are_refused(base, key, count, left) -> None:
    """As of a model of six layers whose num_hidden_layers is made 3."""
    more = {f"model.layers.{i}.enorm.weight": torch.ones(3) for i in (3, 4, 5)}
    save_file(tensors(base) | more, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in EXTRA_LAYERS}
    (base / "config.json").write_text(json.dumps(config | ({key: count} if key else {})))
    if left:
        names = ", ".join(f"model.layers.{i}.enorm.weight" for i in left)
        with pytest.raises(ValueError, match=f"{len(left)} unexpected: {names}"):
            from_pretrained(base)
    else:
        with pytest.warns(UserWarning, match="3 tensors are skipped"):
            from_pretrained(base)


def test_other_families_have_no_layers_past_the_last(tmp_path: Path) -> None:
    reference("llama", {}, tmp_path)
    content = tensors(tmp_path) | {"model.layers.3.norm.weight": torch.ones(3)}
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected: model.layers.3.norm.weight"):
        from_pretrained(tmp_path)
