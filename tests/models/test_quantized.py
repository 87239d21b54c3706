"""Models from block-scaled fp8 checkpoints, as transformers reads them; other formats by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.utils.quantization_config import QuantizationMethod

import tigon
from tests.models.fp8_checkpoints import DYNAMIC, STATIC, Block, to_fp8
from tests.models.mxfp4_checkpoints import SETTINGS, to_mxfp4
from tests.models.test_adapters import gradients
from tests.models.test_io import same, tensors
from tests.models.test_parity import tokens
from tests.models.tiny import edit_config, reference
from tigon import LoraConfig
from tigon.layers import Linear
from tigon.models.config import ConfigError
from tigon.models.quantization_config import READ, read_quantization
from tigon.weights import BlockScales

# Sizes that blocks of 32 x 16 divide, as transformers asks for
EVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
EXPERTS = {**EVEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    **EXPERTS,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LATENTS = {**EVEN, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 48}
LATENTS |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 2}
LATENTS |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS |= {"topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any], bool, Block, dict[str, Any]]] = {
    "blocks": ("qwen3", EVEN, True, (32, 16), DYNAMIC),
    "blocks that divide nothing": ("qwen2", EVEN, True, (40, 56), DYNAMIC),
    "biases, packed": ("qwen2", EVEN, True, (32, 16), DYNAMIC),
    "tied": ("llama", EVEN | {"tie_word_embeddings": True}, True, (32, 16), DYNAMIC),
    "one scale a matrix": ("ministral3", EVEN, True, None, STATIC),
    "experts apart": ("qwen3_moe", EXPERTS, True, (32, 16), DYNAMIC),
    "experts stacked": ("qwen3_moe", EXPERTS, False, (32, 16), DYNAMIC),
    "rows in another order": ("qwen3_next", DELTA, True, (32, 16), DYNAMIC),
    "latents": ("deepseek_v3", LATENTS, True, (32, 16), DYNAMIC),
    "stored packed": ("phi3", EVEN | {"pad_token_id": None}, True, (32, 16), DYNAMIC),
}


@pytest.mark.parametrize("case", MODELS)
def test_as_transformers_dequantises_and_as_they_are_kept(case: str, tmp_path: Path) -> None:
    model_type, sizes, apart, block, settings = MODELS[case]
    source, target = tmp_path / "source", tmp_path / "target"
    reference(model_type, sizes, source, dtype=torch.bfloat16, save_original_format=apart)
    meant = to_fp8(source, block, settings)
    ours = tigon.from_pretrained(source)
    assert ours.dtype == torch.bfloat16
    ours.save_pretrained(target)
    assert same(tensors(target), meant)
    written = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in written

    kept = tigon.from_pretrained(source, quantize="keep")
    few = [m.quantized for m in kept.modules() if isinstance(m, Linear) and m.quantized is not None]
    stored = [t for name, t in tensors(source).items() if ".experts." not in name]
    own = sum(t.nbytes for t in stored if t.dtype == torch.float8_e4m3fn)
    kept_bytes = sum(weight.memory.nbytes for weight in few)  # type: ignore
    assert 0 < kept_bytes < own if case == "rows in another order" else kept_bytes == own
    assert torch.equal(kept(tokens()).logits, ours(tokens()).logits)
    kept.save_pretrained(tmp_path / "kept")
    assert same(tensors(tmp_path / "kept"), meant)
    kept.add_adapter(LoraConfig(rank=2))
    assert gradients(kept)

    # Which transformers cannot
    if case in ("experts stacked", "blocks that divide nothing", "rows in another order"):
        return
    theirs = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    again = AutoModelForCausalLM.from_pretrained(target)
    assert same(again.state_dict(), theirs.state_dict())


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = EVEN | {"num_local_experts": 4, "num_experts_per_tok": 2}
    reference("gpt_oss", sizes, source, dtype=torch.bfloat16)
    expected = to_mxfp4(source)
    ours = tigon.from_pretrained(source)
    assert ours.dtype == torch.bfloat16
    ours.save_pretrained(target)
    assert same(tensors(target), expected)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    again = AutoModelForCausalLM.from_pretrained(target)
    assert same(again.state_dict(), theirs.state_dict())
    ours.add_adapter(LoraConfig(rank=2, targets=("q_proj", "experts.down_proj")))
    assert gradients(ours)
    with pytest.raises(ValueError, match="has no projections in fp8"):
        tigon.from_pretrained(source, quantize="keep")
    edit_config(source, quantization_config=None)  # the names of the tensors say it, too
    tigon.from_pretrained(source).save_pretrained(tmp_path / "again")
    assert same(tensors(tmp_path / "again"), expected)


def test_rounded_once_to_another_dtype(tmp_path: Path) -> None:
    reference("llama", EVEN, tmp_path, dtype=torch.float32)
    meant = to_fp8(tmp_path, (32, 16), DYNAMIC)
    name = "model.layers.1.mlp.down_proj.weight"
    exact = tigon.from_pretrained(tmp_path, dtype=torch.float32).state_dict()[name]
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(exact.bfloat16(), meant[name])
    edit_config(tmp_path, dtype=None)
    assert tigon.from_pretrained(tmp_path).dtype == torch.float32  # its plain tensors are


def test_a_multimodal_config_has_it_at_its_top(tmp_path: Path) -> None:
    reference("ministral3", EVEN, tmp_path, dtype=torch.bfloat16)
    to_fp8(tmp_path, None, STATIC)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    settings = text.pop("quantization_config")
    whole = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": False}
    path.write_text(json.dumps(whole | {"quantization_config": settings}))
    assert isinstance(tigon.from_pretrained(tmp_path), tigon.Ministral3)
    path.write_text(json.dumps(whole | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigError, match="quant_method 'awq'"):
        tigon.from_pretrained(tmp_path)


@pytest.mark.parametrize("method", sorted({m.value for m in QuantizationMethod} - {*READ}))
def test_other_formats_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_quantization({"quantization_config": {"quant_method": method, "bits": 4}})
    assert f"quantized with quant_method {method!r}" in str(error.value)
    assert "use the model's unquantized repository" in str(error.value)


FP8 = {"quant_method": "fp8"}
BAD: dict[str, tuple[Any, str]] = {
    "unknown": ({"quant_method": "zip"}, "quantized with quant_method 'zip'"),
    "no method": ({}, "quantized with quant_method None"),
    "no object": (True, "quantization_config=True is not an object with a quant_method"),
    "4 bits": ({"load_in_4bit": True}, "quant_method 'bitsandbytes'.* model.dequantize"),
    "packed experts": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4' is not one of fp8"),
    "one size": (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\] is not two sizes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": given})


def test_published_settings_are_read_and_unknown_ones_said() -> None:
    qwen3 = DYNAMIC | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    assert read_quantization({"quantization_config": qwen3}) == BlockScales((128, 128))
    assert read_quantization({"quantization_config": STATIC}) == BlockScales(None)
    assert read_quantization({"quantization_config": FP8}) == BlockScales((128, 128))
    assert read_quantization({"text_config": {"quantization_config": FP8}}) == BlockScales()
    assert read_quantization({"quantization_config": SETTINGS}) is None
    assert read_quantization({"quantization_config": None, "text_config": 3}) is None
    with pytest.warns(UserWarning, match=r"keys not understood and ignored: \['color'\]"):
        read_quantization({"quantization_config": FP8 | {"color": 3}})
