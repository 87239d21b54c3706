"""Config keys of single families: as checkpoints have them, against transformers' own reading."""

import json
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP

from tests.models.tiny import FULL, SLIDING, on_meta, windows
from tigon.models import MODELS
from tigon.models.config import ModelConfig

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
MINISTRAL_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
COMMON |= {"use_cache": True, "transformers_version": "4.51.3"}
COMMON_OF_4: dict[str, Any] = COMMON | {  # where no key is added by transformers 5
    "attention_bias": False,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# Whole models, with the keys and the generation of keys that they are published with
REAL: dict[str, dict[str, Any]] = {
    "olmo2 7B": COMMON_OF_4
    | {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "eos_token_id": 100257,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "pad_token_id": 100277,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "vocab_size": 100352,
    },
    "olmo3 7B": COMMON_OF_4
    | {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "eos_token_id": 100257,
        "intermediate_size": 11008,
        "layer_types": [FULL if i % 4 == 3 else SLIDING for i in range(32)],
        "max_position_embeddings": 65536,
        "pad_token_id": 100277,
        "rope_scaling": YARN,
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
    "granite 8B": COMMON_OF_4
    | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.0078125,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    "qwen3_moe Coder 30B": COMMON_OF_4
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "max_position_embeddings": 262144,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "qkv_bias": False,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "glm4 9B": COMMON_OF_4
    | {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "vocab_size": 151552,
    },
    "ministral3 8B": COMMON
    | {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": MINISTRAL_YARN,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "embeddinggemma 300M": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "_sliding_window_pattern": 6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "dtype": "float32",
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 1152,
        "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(24)],
        "max_position_embeddings": 2048,
        "num_attention_heads": 3,
        "num_hidden_layers": 24,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "transformers_version": "4.57.0.dev0",
        "use_bidirectional_attention": True,
        "use_cache": True,
        "vocab_size": 262144,
    },
}


def copy(raw: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(raw))


def ours(raw: dict[str, Any]) -> ModelConfig:
    return MODELS[raw["model_type"]].config_class.from_dict(copy(raw))


def theirs(raw: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**copy(raw))


@pytest.mark.parametrize("name", REAL)
def test_round_trip_of_a_real_model(name: str) -> None:
    raw = REAL[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ours(raw)
    written = copy(config.to_dict())
    assert ours(written) == config
    before, after = theirs(raw).to_dict(), theirs(written).to_dict()
    aside = {"architectures", "_sliding_window_pattern"}
    different = {key for key in before if before[key] != after.get(key)} - aside
    assert not different, {key: (before[key], after.get(key)) for key in different}
    # and under the names of transformers 4
    for key, value in raw.items():
        if key in ("rope_scaling", "architectures", "transformers_version") or key[0] == "_":
            continue
        assert written[key] == value, key
    for key, value in (raw.get("rope_scaling") or {}).items():
        assert written["rope_scaling"][key] == value


SPELLINGS: dict[str, dict[str, Any]] = {
    "phi3: longrope by its first name": {
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.5] * 48,
            "long_factor": [3.0] * 48,
            "original_max_position_embeddings": 4096,  # transformers raises where it is outside
        },
        "max_position_embeddings": 131072,
    },
    "glm4: half by default": {},
    "glm4: theta": {"rope_theta": 300.0},
    "glm4: factor outside": {"partial_rotary_factor": 0.25},
    "glm4: factor inside": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}
    },
    "glm4: the whole head": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}
    },
    "glm4: inside before outside": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
        "partial_rotary_factor": 0.25,
    },
    "olmo3: nothing": {},
    "olmo3: theta of the full layers alone": {"rope_theta": 300.0, "rope_scaling": YARN},
    "olmo3: both": {
        "rope_parameters": {
            FULL: YARN | {"rope_theta": 300.0},
            SLIDING: {"rope_type": "default", "rope_theta": 40.0},
        }
    },
    "olmo3: one of both": {"rope_parameters": {FULL: YARN}, "rope_theta": 300.0},
    "ministral3: nothing": {},
    "ministral3: theta without scaling": {"rope_theta": 300.0},
    "ministral3: scaling": {"rope_scaling": {**MINISTRAL_YARN, "llama_4_scaling_beta": 0.3}},
    "granite: scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0},
    "olmo2: scaling": {"rope_scaling": YARN, "rope_theta": 300.0},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_as_transformers_reads_it(spelling: str) -> None:
    raw = {"model_type": spelling.split(":")[0], **SPELLINGS[spelling]}
    config = ours(raw)
    expected = theirs(raw).rope_parameters
    for source in (config, ours(copy(config.to_dict()))):
        found, wanted = source.rope_parameters, expected
        for name in (FULL, SLIDING) if FULL in wanted else (None,):
            a, b = (found, wanted) if name is None else (found[name], wanted[name])
            b = {k: v for k, v in b.items() if k not in ("type", "max_position_embeddings")}
            assert {k: a.get(k, 1.0 if k == "partial_rotary_factor" else None) for k in b} == b
    again = theirs(config.to_dict()).rope_parameters
    for key, value in expected.items():
        assert key in ("type", "max_position_embeddings") or again.get(key) == value
    direct = type(config)()  # without a config.json
    assert direct.rope_parameters == ours({"model_type": raw["model_type"]}).rope_parameters


GATED = {"sliding_window": 7, "max_window_layers": 5}
# Configs without layer_types, which transformers writes and older ones leave out
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2: from a layer on": {**GATED, "use_sliding_window": True},
    "qwen2: nowhere": GATED,
    "qwen3: from a layer on": {**GATED, "use_sliding_window": True},
    "gemma2": {},
    "gemma3_text: pattern": {"sliding_window_pattern": 4},
    "smollm3: where nothing rotates": {
        "sliding_window": 7,
        "use_sliding_window": True,
        "no_rope_layer_interval": 3,
    },
    "smollm3: nowhere": {"sliding_window": 7},
    "ministral": {},
    "olmo3": {},
    "mixtral: everywhere": {"sliding_window": 7},
    "qwen2_moe: by rule": {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
    "qwen2_moe: nowhere": {"sliding_window": 7, "max_window_layers": 3},
    "qwen3_moe: everywhere": {"sliding_window": 7, "use_sliding_window": True},
    "qwen3_moe: nowhere": {"sliding_window": 7},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_slide_where_those_of_transformers_do(name: str) -> None:
    raw = {"model_type": name.split(":")[0], "num_hidden_layers": 13, **WINDOWS[name]}
    config, expected = ours(raw), theirs(raw)
    types = getattr(expected, "layer_types", None) or [SLIDING] * 13
    assert windows(config) == [expected.sliding_window if t == SLIDING else None for t in types]


def test_gemma_says_gelu_and_means_its_approximation() -> None:
    raw = {"model_type": "gemma", "hidden_act": "gelu"}
    assert GemmaMLP(theirs(raw)).act_fn(torch.ones(1)) == ACT2FN["gelu_pytorch_tanh"](torch.ones(1))
    assert on_meta(ours(raw)).model.layers[0].mlp.gate_up_proj.act == "gelu_tanh"


def test_a_window_to_both_sides() -> None:
    for width in (512, 7, 1):
        raw = REAL["embeddinggemma 300M"] | {"sliding_window": width}
        config = ours(raw)
        assert not on_meta(config).causal
        assert windows(config)[:6:5] == [theirs(raw).sliding_window, None]
        assert config.to_dict()["sliding_window"] == width
    assert windows(ours(raw | {"use_bidirectional_attention": None}))[0] == width


def test_glm4_ends_where_transformers_does() -> None:
    for eos in (None, 7, [1, 2]):
        raw = {"model_type": "glm4", "eos_token_id": eos}
        assert ours(raw).eos_token_id == theirs(raw).eos_token_id
