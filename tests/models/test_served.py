"""Exports beside what vLLM's and SGLang's loaders read: classes, fields of config.json, tensors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.models.served import fields, tensors
from tests.models.tiny import CASES, edit_config, reference
from tigon import from_pretrained
from tigon.models import MODELS
from tigon.models.pretrained.gguf_export import FAMILIES

SIZES = {
    "V": "vocab_size",
    "C": "hidden_size",
    "H": "num_attention_heads",
    "K": "num_key_value_heads",
    "D": "head_dim",
    "I": "intermediate_size",
    "M": "moe_intermediate_size",
    "E": "num_experts num_local_experts n_routed_experts",
    "S": "shared_expert_intermediate_size n_shared_experts",
    "Q": "q_lora_rank",
    "L": "kv_lora_rank",
    "N": "qk_nope_head_dim",
    "R": "qk_rope_head_dim",
    "U": "v_head_dim",
    "A": "hidden_size_per_layer_input",
}
PAGE = (Path(__file__).parents[2] / "docs/serve_elsewhere.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
# model_type -> the classes of vLLM and SGLang, and llama.cpp's architecture
CLASSES = {model_type: columns for model_type, *columns in ROW.findall(PAGE)}
# transformers' model reads what transformers writes
SERVED = [name for name, columns in CLASSES.items() if set(columns[:2]) != {"transformers"}]


def exported(model_type: str, case: str, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of an export, of its text model alone, and the shapes of its tensors."""
    reference(model_type, CASES[model_type][case], root / "a")
    from_pretrained(root / "a").save_pretrained(root / "b")
    config = json.loads((root / "b" / "config.json").read_text())
    with safe_open(root / "b" / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return config, shapes


def sizes(config: dict[str, Any]) -> dict[str, int]:
    values = {letter: [config.get(key) for key in keys.split()] for letter, keys in SIZES.items()}
    return {letter: next((v for v in found if v), 0) for letter, found in values.items()}


@pytest.mark.parametrize("model_type", SERVED)
def test_exports_have_what_is_read(model_type: str, tmp_path: Path) -> None:
    for case in CASES[model_type]:
        config, shapes = exported(model_type, case, tmp_path / case)
        assert config["architectures"] == [MODELS[model_type].config_class.architecture]
        text = config.get("text_config", config)
        assert fields(model_type) - text.keys() == set(), case
        known, known_sizes, prefix = tensors(model_type), sizes(text), r"model\.(language_model\.)?"
        for name, shape in shapes.items():
            form = re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)
            form, in_layer = re.subn(rf"{prefix}layers\.{{}}\.", "", form)
            form = form if in_layer else re.sub(prefix, "model.", form)
            expected = (known.layer if in_layer else known.around).get(form)
            if expected is None and form.endswith(".bias"):
                keys = ("attention_bias", "mlp_bias", "use_bias")
                assert any(text.get(key) for key in keys), name
                continue  # no published model of the family has it, and no loader reads it
            assert expected is not None, f"{case}: {name} is not read"
            if expected != "?":
                dims = [eval(dim, {}, known_sizes) for dim in expected.split()]
                assert shape == dims, f"{case}: {name} is {shape}, read as {expected}"


def test_keys_that_choose_the_router(tmp_path: Path) -> None:
    """DeepSeek-V3's, which transformers does not write and vLLM takes for another router."""
    config, _ = exported("deepseek_v3", "plain", tmp_path)
    assert "scoring_func" not in json.loads((tmp_path / "a" / "config.json").read_text())
    keys = ("scoring_func", "topk_method", "moe_layer_freq")
    assert [config[key] for key in keys] == ["sigmoid", "noaux_tc", 1]


def test_layers_without_experts(tmp_path: Path) -> None:
    """GLM-4.7-Flash's, of which transformers has a list and the loaders a number."""
    reference("glm4_moe_lite", CASES["glm4_moe_lite"]["plain"], tmp_path / "a")
    edit_config(tmp_path / "a", first_k_dense_replace=3)
    from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["first_k_dense_replace"] == config["mlp_layer_types"].index("sparse") == 1


def test_the_page_has_every_family() -> None:
    assert CLASSES.keys() == MODELS.keys()
    for model_type, (_, _, gguf) in CLASSES.items():
        assert gguf.strip("`") == (FAMILIES[model_type][0] if model_type in FAMILIES else "no")
