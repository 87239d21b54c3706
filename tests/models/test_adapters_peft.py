"""Adapters against PEFT's on every family: the same files, logits and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import get_peft_model
from safetensors.torch import load_file

from tests.models.adapters import (
    check_ours_there,
    check_reloaded,
    check_removal,
    check_same,
    check_theirs_here,
    near,
    randomise,
    theirs_of,
    trained,
)
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, FIRST, load_case, reference
from tigon import LoraConfig, from_pretrained
from tigon.models import MODELS
from tigon.models.pretrained.names import stored_tensors

# PEFT's "all-linear" has the experts and the router of mixtures, too
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = [f"shared_expert.{name}" for name in MLP]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DENSE = [f"{parent}.{name}" for parent in ("shared_experts", "0.mlp") for name in MLP]
ALL_LINEAR = {
    "mixtral": ATTENTION,
    "qwen2_moe": [*ATTENTION, *SHARED, "shared_expert_gate"],
    "olmoe": ATTENTION,
    "llama4_text": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "qwen3_moe": ATTENTION,
    "qwen3_5_moe_text": [*ATTENTION, *DELTA, *SHARED, "shared_expert_gate"],
    # PEFT takes the projections of a shared expert for those of all experts
    "qwen3_next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
    "glm4_moe": ATTENTION,
    # PEFT takes every up_proj of these types for that of experts
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), LATENT),
    "mistral4": LATENT + DENSE,
}
# Stored packed, so that PEFT sees no q_proj
TARGETS = {"phi3": ("qkv_proj", "down_proj"), "glm4": ("q_proj", "gate_up_proj")}
TARGETS |= dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "mistral4"), ("q_b_proj", "kv_b_proj"))
# Some layers have no attention
TARGETS |= dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"), ("q_proj", "in_proj_qkv", "in_proj_a")
)
TARGETS |= {"qwen3_next": ("q_proj", "in_proj_qkvz", "in_proj_ba")}
TARGETS |= dict.fromkeys(("lfm2", "lfm2_moe"), ("q_proj", "in_proj", "w1"))
OUT = dict.fromkeys(("lfm2", "lfm2_moe"), "out_proj")  # others' o_proj


def targets_of(model_type: str) -> tuple[str, ...]:
    return TARGETS.get(model_type, ("q_proj", "v_proj"))


CONFIGS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "some": {},
    "dora": {"use_dora": True, "target_modules": "all-linear", "rank_pattern": {"k_proj": 2}},
    "rslora, patterns": {
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {r"layers\.1\..*proj": 7, "o_proj": 2},
        # PEFT sorts them in its file, and the first that fits counts
        "alpha_pattern": {"model.layers.0.self_attn.o_proj": 1, "o_proj": 3.5},
    },
}


# Every family with all of its layers, and with each of the other options in turn
TURNS = [("all linear", [*CONFIGS][1 + i % 3]) for i in range(len(FIRST))]


@pytest.mark.slow(first=10)
@pytest.mark.parametrize(
    ("model_type", "case", "options"),
    [(*row, options) for row, turn in zip(FIRST, TURNS, strict=True) for options in turn],
)
def test_theirs_here(model_type: str, case: str, options: str, tmp_path: Path) -> None:
    given = {"target_modules": list(targets_of(model_type))} | CONFIGS[options]
    if given["target_modules"] == "all-linear":
        given["target_modules"] = ALL_LINEAR.get(model_type, "all-linear")
    theirs = theirs_of(tmp_path / "base", model_type, case, **given)
    ours = check_theirs_here(theirs, tmp_path)
    assert not ours.adapter_names
    assert stored_tensors(ours).keys() == ours.layout().keys()


@pytest.mark.slow(first=10)
@pytest.mark.parametrize(
    ("model_type", "case", "dora"), [(*row, i % 2 == 0) for i, row in enumerate(FIRST)]
)
def test_ours_there(model_type: str, case: str, dora: bool, tmp_path: Path) -> None:
    base = reference(model_type, CASES[model_type][case], tmp_path / "base")
    decoder, out = MODELS[model_type].checkpoint_names.decoder, OUT.get(model_type, "o_proj")
    targets = (*targets_of(model_type), f"{decoder}layers.1.*.{out}")
    config = LoraConfig(
        rank=5, alpha=7.5, targets=targets, rslora=True, dora=dora,
        rank_pattern={out: 3}, alpha_pattern={f"{decoder}layers.0.*": 2},
    )  # fmt: skip
    again = check_reloaded(check_ours_there(base, config, tmp_path)[0], tmp_path)
    assert not trained(again)
    again.save_adapter(tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        written = (tmp_path / "adapter" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == written


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save(tied: bool, tmp_path: Path) -> None:
    saved = ["embed_tokens", "lm_head"]
    case = "tied" if tied else "grouped"
    theirs = theirs_of(tmp_path / "base", "llama", case, modules_to_save=saved)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = from_pretrained(tmp_path / "base")
    plain = ours(tokens()).logits
    ours.load_adapter(tmp_path / "adapter", trainable=True)
    check_same(ours, theirs)
    ours.save_adapter(tmp_path / "again")
    check_removal(check_reloaded(ours, tmp_path, "again"), plain, tmp_path)


def test_first_values_are_distributed_as_theirs(tmp_path: Path) -> None:
    base = reference("llama", CASES["llama"]["grouped"], tmp_path / "base")
    theirs = get_peft_model(base, TheirConfig(r=32, target_modules=["q_proj", "v_proj"]))
    ours = from_pretrained(tmp_path / "base")
    ours.add_adapter(LoraConfig(rank=32, targets=("q_proj", "v_proj")))
    both = []
    for model in (ours, theirs):
        a = torch.cat([p.detach().flatten() for n, p in trained(model).items() if "lora_A" in n])
        both.append(torch.stack([a.std(), a.abs().max()]))
    torch.testing.assert_close(*both, rtol=0.02, atol=0)


def test_the_settings_that_are_written(tmp_path: Path) -> None:
    reference("qwen2_moe", CASES["qwen2_moe"]["plain"], tmp_path / "base")
    ours = from_pretrained(tmp_path / "base")
    ours.add_adapter(LoraConfig(targets=("q_proj", "shared_expert.up_proj")))
    ours.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    # Of a mixture whole names: in other versions its experts have an up_proj too
    assert "model.layers.2.mlp.shared_expert.up_proj" in written["target_modules"]


@pytest.mark.parametrize("targets", [["q_proj", "down_proj", "embed_tokens"], "all-linear"])
def test_saved_over_the_decoder_alone(targets: Any, tmp_path: Path) -> None:
    """As PEFT saves over AutoModel: names without `model.`"""
    base = reference("llama", CASES["llama"]["grouped"], tmp_path / "base")
    how = {
        "rank_pattern": {r"layers\.1\..*q_proj": 2},
        "alpha_pattern": {"layers.0.mlp.down_proj": 3},
    }
    theirs = get_peft_model(base.model, TheirConfig(r=4, target_modules=targets, **how))
    randomise(trained(theirs))
    theirs.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any(name.startswith("base_model.model.model.") for name in stored)
    ours = from_pretrained(tmp_path / "base")
    ours.load_adapter(tmp_path / "adapter")
    near(ours(tokens()).logits, base.eval()(tokens()).logits)  # whose decoder PEFT has changed
    ours.save_adapter(tmp_path / "again")
    check_reloaded(ours, tmp_path, "again")


def test_numbers_are_no_names_of_targets(tmp_path: Path) -> None:
    """PEFT would find layers 0, 1 and 2, too, where projections are numbered."""
    model = load_case("gemma3n_text", dict(FIRST)["gemma3n_text"], tmp_path)
    model.add_adapter(LoraConfig(rank=2, targets=("all-linear",)))
    model.save_adapter(tmp_path / "adapter")
    names = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert "model.altup_projections.0" in names and not any(name.isdigit() for name in names)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"])
def test_a_warning_of_what_peft_drops(model_type: str, tmp_path: Path) -> None:
    model = load_case(model_type, dict(FIRST)[model_type], tmp_path)
    model.add_adapter(LoraConfig(rank=2, targets=("all-linear",)))
    with pytest.warns(UserWarning, match="drops what MLPs and shared experts learned: merge"):
        model.save_adapter(tmp_path / "adapter")


def test_routers_of_all_linear_are_explained(tmp_path: Path) -> None:
    model = load_case("olmoe", dict(FIRST)["olmoe"], tmp_path)
    model.add_adapter(LoraConfig(rank=2, targets=("q_proj",)))
    model.save_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"target_parameters": ["gate.weight"]})
    )
    model.delete_adapter("default")
    with pytest.raises(ValueError, match="all-linear includes routers, which adapters here do not"):
        model.load_adapter(tmp_path / "adapter")
