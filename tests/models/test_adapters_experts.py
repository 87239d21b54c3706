"""Adapters of experts against PEFT's of stacked parameters: files both ways, logits, gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import get_peft_model
from safetensors.torch import save_file

from tests.models.adapters import (
    adapted,
    check_generation,
    check_ours_there,
    check_reloaded,
    check_theirs_here,
    randomise,
    trained,
)
from tests.models.tiny import CASES, reference
from tigon import LoraConfig, from_pretrained

KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "lfm2_moe")
PARENTS = {"lfm2_moe": "feed_forward."}
BOTH = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
PATTERNS: dict[str, Any] = {
    "target_parameters": BOTH,
    "target_modules": ["q_proj"],
    "use_rslora": True,
    "rank_pattern": {r"layers\.1\..*down_proj": 3, "experts.gate_up_proj": 2},
    "alpha_pattern": {"model.layers.0.mlp.experts.down_proj": 5},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": BOTH, "target_modules": []},
    "gate_up": {"target_parameters": BOTH[1:], "target_modules": ["o_proj"]},
    "down": {"target_parameters": BOTH[:1], "target_modules": ["o_proj"]},
    "patterns": PATTERNS,
}
SOME = [("mixtral", name) for name in CONFIGS] + [(kind, "patterns") for kind in KINDS[1:]]


def named(model_type: str, value: Any) -> Any:
    """With the family's name of what holds experts."""
    return json.loads(json.dumps(value).replace("mlp.", PARENTS.get(model_type, "mlp.")))


@pytest.mark.parametrize(("model_type", "options"), SOME)
def test_theirs_here(model_type: str, options: str, tmp_path: Path) -> None:
    base = reference(model_type, CASES[model_type]["plain"], tmp_path / "base")
    how = {"r": 4, "lora_alpha": 10, "task_type": "CAUSAL_LM"}
    how |= named(model_type, CONFIGS[options])
    theirs = get_peft_model(base, TheirConfig(**how)).eval()
    randomise(trained(theirs))
    check_theirs_here(theirs, tmp_path)


@pytest.mark.parametrize("model_type", KINDS)
def test_ours_there(model_type: str, tmp_path: Path) -> None:
    base = reference(model_type, CASES[model_type]["plain"], tmp_path / "base")
    targets = ("v_proj", "experts.gate_up_proj", "experts.down_proj")
    config = LoraConfig(rank=5, alpha=7, targets=targets, rank_pattern={"experts.down_proj": 3})
    ours, _ = check_ours_there(base, config, tmp_path)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["target_parameters"] == named(model_type, BOTH)
    check_reloaded(ours, tmp_path)


@pytest.fixture
def mixture(tmp_path: Path) -> Any:
    reference("mixtral", CASES["mixtral"]["plain"], tmp_path / "base")
    return from_pretrained(tmp_path / "base")


def test_generation_is_that_of_the_merged_model(mixture: Any, tmp_path: Path) -> None:
    model, merged = (
        adapted(each, targets=("q_proj", *BOTH))
        for each in (mixture, from_pretrained(tmp_path / "base"))
    )
    merged.merge_adapter()
    check_generation(model, merged)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"targets": BOTH, "dora": True}, "dora with targets='gate_up_proj'"),
    "apart": ({"targets": "up_proj"}, "gate and up of experts are one, gate_up_proj"),
    "router": ({"targets": "mlp.gate"}, "is a router"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals(case: str, mixture: Any) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        mixture.add_adapter(LoraConfig(**options))
    assert not mixture.adapter_names


def test_experts_that_peft_takes_for_their_transposes(tmp_path: Path) -> None:
    """It makes A of Llama 4's outputs and B of its inputs."""
    reference("llama4_text", CASES["llama4_text"]["plain"], tmp_path / "base")
    model = from_pretrained(tmp_path / "base")
    for target in ("gate_up_proj", "experts.down_proj"):
        with pytest.raises(ValueError, match="matches no projection of Llama4"):
            model.add_adapter(LoraConfig(targets=target))
    model.add_adapter()
    assert any("shared_experts" in name for name in trained(model))


def test_all_linear_has_no_experts(mixture: Any) -> None:
    mixture.add_adapter()
    assert not [name for name in trained(mixture) if "experts" in name]


def test_files_that_do_not_fit(mixture: Any, tmp_path: Path) -> None:
    adapted(from_pretrained(tmp_path / "base"), targets=("q_proj", *BOTH)).save_adapter(
        tmp_path / "it"
    )
    path = tmp_path / "it" / "adapter_config.json"
    values = json.loads(path.read_text())
    for changes, message in (
        ({"target_parameters": ["mlp.gate.weight"]}, "'mlp.gate.weight' matches no experts"),
        ({"target_parameters": "experts"}, "is not a list of names"),
        ({"r": 3}, r"lora_A.weight is \[\d+, 96\], not \[\d+, 96\]"),
        ({"target_parameters": BOTH[:1]}, "is for 'model.layers.0.mlp.experts.base_layer'"),
    ):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(ValueError, match=message):
            mixture.load_adapter(tmp_path / "it")
        assert not mixture.adapter_names
    single = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_A.weight"
    save_file({single: torch.zeros(4, 96)}, tmp_path / "it" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.1\.w1\.lora_A.* adapts a single expert"):
        mixture.load_adapter(tmp_path / "it")
