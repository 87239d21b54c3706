"""Values of config.json that no model can have, and sizes that do not fit the checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.models.dense_cases import FULL, LLAMA3, LONG, SLIDING, YARN
from tests.models.test_config_families import DEFAULT, MINISTRAL_YARN
from tests.models.tiny import edit_config
from tigon.models import MODELS, build
from tigon.models.pretrained import match
from tigon.utils.config import ConfigError
from tigon.weights import Repository

NAN, INF = float("nan"), float("inf")


# Model type -> values, and what the error says of them
MISTRAL4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "llama_4_scaling_beta": 0.1,
}

BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gemma": [({"use_bidirectional_attention": True}, "use_bidirectional_attention=True")],
    "gemma2": [
        ({"layer_types": ["full_attention"]}, "layer_types=.* is not .* each of 26"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
    "gemma3_text": [
        ({"rope_local_base_freq": "1"}, "rope_local_base_freq='1' is not"),
        ({"rope_parameters": {"rope_type": "linear"}}, "is not given per"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be"),
    ],
    "glm4": [
        ({"num_experts": 8}, "num_experts=8 changes"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1.5 is not in \(0, 1\]"),
    ],
    "granite": [
        ({"attention_multiplier": "1"}, "attention_multiplier='1' is not a number"),
        ({"attention_multiplier": -1.0}, "attention_multiplier=-1.0 must be at least"),
        ({"num_local_experts": 8}, "num_local_experts=8 changes"),
    ],
    "llama": [
        ({"clip_qkv": "\x1b[2J" + "x" * 500}, r"clip_qkv='\\x1b\[2Jx.*\.\.\. ch"),
        ({"eos_token_id": ["a"]}, r"eos_token_id=\['a'\] is not a whole number"),
        ({"eos_token_id": [2] * 40_000}, "eos_token_id has 40000 items"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"hidden_act": "relu2"}, "hidden_act='relu2' is not one of silu, swish, gelu"),
        ({"hidden_size": "64"}, "hidden_size='64' is not a whole number"),
        (
            {"hidden_size": 100, "num_attention_heads": 3},
            "hidden_size=100 is not a multiple of num_attention_heads=3, and head_dim is not given",
        ),
        (
            {
                "hidden_size": 2**30,
                "intermediate_size": 2**30 + 2**10,
                "vocab_size": 2**31 - 1,
                "head_dim": 128,
            },
            "no model can have these sizes",
        ),
        ({"initializer_range": NAN}, "initializer_range=nan must be at least 0"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not 'llama'"),
        ({"num_attention_heads": 32, "hidden_size": 96}, "=3 is odd"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads=6 is not a multiple of num_key_value_heads=4",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=10+ must be at most 2000"),
        ({"pad_token_id": 32000}, "pad_token_id=32000 is outside the vocabulary"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 changes"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized with quant_method 'gptq', which Tigon does not read, .* use the model's",
        ),
        ({"rms_norm_eps": INF}, "rms_norm_eps=inf must be at most"),
        ({"rope_parameters": []}, r"rope_parameters=\[\] is not a dictionary"),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "does not know {'full_attention'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not known",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is not a dictionary"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "is not less than"),
        ({"rope_scaling": LONG | {"long_factor": [1.0, INF]}}, "long_factor=inf must be at most"),
        (
            {"rope_scaling": LONG, "original_max_position_embeddings": 1},
            "original_max_position_embeddings=1 is too short",
        ),
        ({"rope_scaling": YARN | {"foo": 1}}, "rope_type 'yarn' does not know {'foo': 1}"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": -1}},
            "original_max_position_embeddings=-1 must be at least 1",
        ),
        ({"rope_scaling": YARN | {"rope_theta": 1.0}}, "is not more than 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "rope_type 'llama3' needs high_freq_factor; the config has {.*'factor': 8.0",
        ),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            "unknown rope_type 'mrope'; there are default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor, long_factor"),
        (
            {"sliding_window": 4096},
            r"sliding_window=4096 changes what the model computes, and LlamaConfig \(model_type",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not true or false"),
        ({"vocab_size": 10**30}, "vocab_size=1000.* must be below"),
    ],
    "deepseek_v3": [({"n_group": 7}, "n_group=7 does not divide 256 experts")],
    "gemma3n_text": [
        ({"altup_num_inputs": 10**6}, "altup_num_inputs=1000000 must be at most 64"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input=0: Gemma 3n needs"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers=35: no layer before has"),
    ],
    "gemma4_text": [
        ({"per_layer_config": {"0": {"head_dim": None}}}, "head_dim=None is not a whole number"),
        ({"per_layer_config": {"0": {"head_dim": 2**70}}}, "head_dim=[0-9]+ must be at most"),
        ({"per_layer_config": {"0": {"num_key_value_heads": "2"}}}, "heads='2' is not a whole"),
        ({"per_layer_config": {"\u00b2": {}}}, "are not numbers of layers"),
        ({"vocab_size_per_layer_input": 1, "pad_token_id": 1}, "pad_token_id=1 is not below"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta": "1"}}}, "rope_the"),
    ],
    "granite_swa": [({"layer_rope_theta": [1e-320] * 24}, "rope_theta=1e-320 must be at least")],
    "mistral4": [
        ({"rope_parameters": MISTRAL4_YARN | {"partial_rotary_factor": 0.25}}, "is not qk_rope")
    ],
    "muse_glimmer_text": [
        ({"post_norm_eps": -1.0}, "post_norm_eps=-1.0 must be at least 0"),
        ({"qk_scale_factor": -3.9}, "qk_scale_factor=-3.9 must be at least"),
    ],
    "ministral3": [
        ({"layer_types": [FULL] * 34}, "layer_types=.* changes"),
        (
            {"rope_parameters": MINISTRAL_YARN | {"llama_4_scaling_beta": "big"}},
            "llama_4_scaling_beta='big' is not a number",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "needs original_max_position_embeddings in rope_parameters={",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "ministral3 needs llama_4_scaling_beta in rope_parameters={",
        ),
    ],
    "mistral": [({"rope_parameters": MINISTRAL_YARN}, "does not know {.*llama_4_scaling_beta")],
    "mixtral": [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is not in \[1, 8\]"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 changes"),
    ],
    "olmoe": [({"num_experts": 0}, "num_experts=0, but OlmoeForCausalLM has layers of experts")],
    "olmo3": [
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types="),
        ({"rope_parameters": {"rope_type": "linear"}}, "is not given per"),
        (
            {"rope_parameters": {FULL: [1], SLIDING: {}}},
            r"rope_parameters.full_attention=\[1\] is not a dictionary",
        ),
    ],
    "phi3": [({"rope_scaling": {"type": ["su"]}}, r"rope_type \['su'\]")],
    "qwen2_moe": [
        ({"num_experts_per_tok": 0}, r"num_experts_per_tok=0 is not in \[1, 60\]"),
        ({"num_local_experts": 8}, "num_local_experts=8 changes"),
        (
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size=0 is not positive",
        ),
    ],
    "qwen3_moe": [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be at least 1"),
        ({"mlp_only_layers": ["1"]}, r"mlp_only_layers=\['1'\] is not a list of whole numbers"),
        ({"qkv_bias": True}, "qkv_bias=True changes"),
    ],
    "smollm3": [({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be")],
}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [(model_type, *row) for model_type, rows in BAD.items() for row in rows],
)
def test_bad_values_are_named(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS[model_type].from_config({"model_type": model_type, **changes}, device="meta")


TINY = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 1999}, "num_hidden_layers=1999 does not fit the checkpoint"),
    "experts": (
        {"num_local_experts": 2**14, "num_experts": 2**14},
        "num_experts=16384 does not fit the checkpoint",
    ),
    "vocabulary": ({"vocab_size": 10**9}, "vocab_size=1000000000 and hidden_size=8 do not"),
    "width": ({"hidden_size": 2**30}, "vocab_size=11 and hidden_size=1073741824 do not fit"),
    "an expert": ({"moe_intermediate_size": 10**9}, r"a model of \d{11} values does not fit"),
    "heads": ({"num_attention_heads": 2**30}, r"a model of \d{11} values does not fit"),
    "both": (
        {"moe_intermediate_size": 2**31 - 1, "num_attention_heads": 2**31 - 1},
        r"a model of \d{12} values does not fit",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    model = MODELS["qwen3_moe"].from_config({"model_type": "qwen3_moe", **TINY, **EXPERTS})
    model.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint with experts."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.mark.parametrize("case", UNFIT)
def test_sizes_are_compared_before_anything_is_allocated(
    case: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = UNFIT[case]
    edit_config(checkpoint, **changes)
    monkeypatch.setattr(torch, "empty_like", None)  # what allocates parameters
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        tigon.from_pretrained(checkpoint)


def test_each_shape_is_compared_before_anything_is_allocated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(checkpoint, num_key_value_heads=2)
    monkeypatch.setattr(torch, "empty_like", None)
    for mmap in (False, True):
        with pytest.raises(ValueError, match=r"k_proj.weight is \[4, 8\], not \[8, 8\]"):
            tigon.from_pretrained(checkpoint, mmap=mmap)
    with pytest.raises(ValueError, match="does not fit Qwen3Moe"):
        build(Repository(checkpoint), MODELS)


def test_experts_are_counted_before_they_are_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["other"] = torch.zeros(10**6, dtype=torch.uint8)
    save_file(weights, checkpoint / "model.safetensors")
    edit_config(checkpoint, num_experts=5000, num_local_experts=5000)
    monkeypatch.setattr(match, "layout", None)
    with pytest.raises(ConfigError, match="a model of 10000 matrices of experts does not fit"):
        tigon.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"top_k": "5"}', "generation_config.json: top_k='5' is not a whole number"),
        ('{"temperature": NaN}', "generation_config.json is not valid JSON: NaN is"),
        ('{"max_new_tokens": -1}', "generation_config.json: max_new_tokens=-1 must be at least 0"),
        ('{"eos_token_id": {"a": 1}}', "generation_config.json: eos_token_id={'a': 1} is not a"),
        ('{"top_k": 1, "top_k": 2}', "generation_config.json: it names 'top_k' twice"),
    ],
)
def test_generation_config_is_checked_when_it_is_read(
    content: str, message: str, checkpoint: Path
) -> None:
    (checkpoint / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        tigon.from_pretrained(checkpoint)
