"""Config keys of single families: as checkpoints have them, against transformers' own reading."""

import json
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)

from tests.models.dense_cases import FULL, LLAMA3, LONG, SLIDING
from tests.models.tiny import on_meta, windows
from tigon.layers import RotaryEmbedding
from tigon.models import MODELS
from tigon.models.config import ConfigError, ModelConfig

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
HUNYUAN = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
HUNYUAN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
SCALING = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 300.0}

DEEPSEEK_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# What published configs say beside the keys that transformers writes, or in place of them
LFM2_FULL = (2, 6, 10, 14, 18, 21)
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
GPT_OSS_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "rope_scaling": DEEPSEEK_YARN,
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
    "exaone4": {
        "rope_scaling": SCALING,
        "rope_theta": 1000000,
        "sliding_window_pattern": "LLLG",
        "torch_dtype": "bfloat16",
    },
    "gemma3_text": {
        "_sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": True,  # EmbeddingGemma
    },
    "glm4": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "glm4_moe": {
        "head_dim": 128,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "use_qk_norm": True,
    },
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "topk_method": "noaux_tc",
    },
    "gpt_oss": {
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "rope_scaling": GPT_OSS_YARN,
        "rope_theta": 150000,
        "torch_dtype": "bfloat16",
    },
    "granite": {"rope_theta": 1e7, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "lfm2": {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_mlp_init_scale": 1.0,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_dim": 2048,
        "conv_dim_out": 2048,
        "conv_use_xavier_init": True,
        "num_heads": 32,
        "rope_theta": 1000000.0,
        "theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "use_pos_enc": True,
    },
    "lfm2_moe": {
        "eos_token_id": 7,
        "layer_types": ["full_attention" if i in LFM2_FULL else "conv" for i in range(24)],
        "num_hidden_layers": 24,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "torch_dtype": "bfloat16",
    },
    "hunyuan_v1_dense": {
        "attention_head_dim": 128,
        "eod_token_id": 127967,
        "rope_scaling": HUNYUAN | {"rope_type": "dynamic"},
        "rope_theta": 10000.0,
        "use_qk_norm": True,
    },
    "ministral3": {"rope_parameters": MINISTRAL_YARN},
    "olmo3": {"rope_theta": 500000, "rope_scaling": YARN, "torch_dtype": "bfloat16"},
    "qwen3_moe": {
        "max_window_layers": 28,
        "qkv_bias": False,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},  # others warn
}


def copy(raw: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(raw))


def ours(raw: dict[str, Any]) -> ModelConfig:
    return MODELS[raw["model_type"]].config_class.from_dict(copy(raw))


def theirs(raw: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**copy(raw))


def published(model_type: str) -> dict[str, Any]:
    """A config.json with every key of the family."""
    raw, more = AutoConfig.for_model(model_type).to_dict(), PUBLISHED.get(model_type, {})
    if "rope_theta" in more:
        del raw["rope_parameters"]
    return copy(raw | more)


@pytest.mark.parametrize("model_type", MODELS)
def test_round_trip_of_published_configs(model_type: str) -> None:
    raw = published(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ours(raw)
    written = copy(config.to_dict())
    assert ours(written) == config
    before, after = theirs(raw).to_dict(), theirs(written).to_dict()
    aside = {"architectures", "_sliding_window_pattern", "torch_dtype"}
    different = {key for key in before if before[key] not in (None, after.get(key))} - aside
    assert not different, {key: (before[key], after.get(key)) for key in different}
    # and under the names of transformers 4
    for key, value in PUBLISHED.get(model_type, {}).items():
        if key[0] != "_" and key != "rope_scaling":
            assert written[key] == value, key
    for key, value in (raw.get("rope_scaling") or {}).items():
        assert written["rope_scaling"][key] == value


SPELLINGS: dict[str, dict[str, Any]] = {
    "llama: nothing": {},
    "llama: theta": {"rope_theta": 300.0},
    "llama: parameters": {"rope_parameters": DEFAULT},
    "llama: parameters without theta": {
        "rope_parameters": {"rope_type": "default"},
        "rope_theta": 300.0,
    },
    "llama: parameters before theta": {"rope_parameters": DEFAULT, "rope_theta": 5.0},
    "llama: null scaling": {"rope_parameters": DEFAULT, "rope_theta": 300.0, "rope_scaling": None},
    "llama: scaling": {"rope_scaling": SCALING, "rope_theta": 300.0},
    "llama: scaling without theta": {"rope_scaling": SCALING},
    "llama: scaling of the old kind": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama: two names of the type": {
        "rope_scaling": {"type": "x", "rope_type": "linear", "factor": 2.0}
    },
    "llama: scaling replaces parameters": {"rope_scaling": SCALING, "rope_parameters": DEFAULT},
    "llama: all three": {
        "rope_scaling": SCALING | {"rope_theta": 70.0},
        "rope_parameters": DEFAULT,
        "rope_theta": 40.0,
    },
    "llama: no original length": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **BANDS},
        "max_position_embeddings": 128,
    },
    "llama: no length at all": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "llama: original length outside": {
        "rope_scaling": LONG | {"original_max_position_embeddings": 99},
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "head_dim": 20,
    },
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
    "ernie4_5: nothing": {},
    "exaone4: scaling": {"rope_scaling": SCALING, "rope_theta": 1e6},
    "hunyuan_v1_dense: alpha": {"rope_scaling": HUNYUAN, "rope_theta": 300.0},
    "muse_glimmer_text: theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "olmoe: scaling": {"rope_scaling": YARN, "rope_theta": 300.0},
    "mistral4: nothing": {},
    "mistral4: scaling": {"rope_scaling": {**MINISTRAL_YARN, "llama_4_scaling_beta": 0.3}},
    "deepseek_v3: scaling": {"rope_scaling": DEEPSEEK_YARN, "rope_theta": 300.0},
    "glm4_moe: half by default": {},
    "glm4_moe: factor outside": {"partial_rotary_factor": 0.25},
    "glm4_moe: null outside": {"partial_rotary_factor": None},
    "qwen3_5_text: a quarter by default": {},
    "qwen3_5_text: factor outside": {"partial_rotary_factor": 0.5, "rope_theta": 300.0},
    "qwen3_5_text: null outside": {"partial_rotary_factor": None},
    "qwen3_next: null beside a RoPE": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "partial_rotary_factor": None,
    },
    "gemma3_text: old keys": {
        "rope_theta": 9e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "granite: scaling": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300.0},
    "gpt_oss: nothing": {},
    "gpt_oss: theta": {"rope_theta": 300.0},
    "olmo2: scaling": {"rope_scaling": YARN, "rope_theta": 300.0},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_as_transformers_reads_it(spelling: str) -> None:
    raw = {"model_type": spelling.split(":")[0], **SPELLINGS[spelling]}
    config = ours(raw)
    # Outside it counts when transformers computes the frequencies
    outside = {k: v for k, v in raw.items() if k == "original_max_position_embeddings"}
    expected = theirs(raw).rope_parameters | outside
    for source in (config, ours(copy(config.to_dict()))):
        found, wanted = source.rope_parameters, expected
        for name in (FULL, SLIDING) if FULL in wanted else (None,):
            a, b = (found, wanted) if name is None else (found[name], wanted[name])
            b = {k: v for k, v in b.items() if k not in ("type", "max_position_embeddings")}
            whole = {"partial_rotary_factor": 1.0}  # the head, where it is not given
            b |= whole if raw.get(*whole, 1.0) is None else {}
            assert {k: (whole | a).get(k) for k in b} == b
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
    "exaone4: pattern": {"sliding_window_pattern": 3},
    "gemma3_text: pattern": {"sliding_window_pattern": 4},
    "smollm3: where nothing rotates": {
        "sliding_window": 7,
        "use_sliding_window": True,
        "no_rope_layer_interval": 3,
    },
    "smollm3: nowhere": {"sliding_window": 7},
    "olmo3": {},
    "mixtral: everywhere": {"sliding_window": 7},
    "muse_glimmer_text": {},
    "gpt_oss": {},
    "granite_swa": {},
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


def test_layers_of_muse_rotate_where_those_of_transformers_do() -> None:
    for thetas in (None, [0, 1.0, 5e5, 0, 0.0, 2, 1, 0, 1, 1, 0, 1, 1]):
        raw = {"model_type": "muse_glimmer_text", "num_hidden_layers": 13}
        raw |= {} if thetas is None else {"layer_rope_theta": thetas}
        assert rotates(ours(raw)) == [theta != 0 for theta in theirs(raw).layer_rope_theta]
    with pytest.raises(ConfigError, match=r"layer_rope_theta=\[0\] is not a number from 0 on for"):
        ours(raw | {"layer_rope_theta": [0]})
    with pytest.raises(ConfigError, match="is not a number from 0 on for each of 13"):
        ours(raw | {"layer_rope_theta": [-1.0] * 13})


def rotates(config: ModelConfig) -> list[bool]:
    """Of each layer."""
    decoder = on_meta(config).model
    return [isinstance(decoder.rotary_embs[b.rope_index], RotaryEmbedding) for b in decoder.layers]


def test_exaone_rotates_where_it_slides() -> None:
    """Its patterns of letters and its models without windows make transformers raise."""
    raw = {"model_type": "exaone4", "num_hidden_layers": 9}
    for pattern, period in ((4, [1, 1, 1, 0]), ("LLLG", [1, 1, 1, 0]), ("LG", [1, 0]), ("G", [0])):
        config = ours(raw | {"sliding_window_pattern": pattern})
        expected = (period * 9)[:9]
        assert windows(config) == [4096 if slides else None for slides in expected]
        assert rotates(config) == [bool(slides) for slides in expected]
    for pattern in (0, 4, None, "LLLG"):
        config = ours(raw | {"sliding_window": None, "sliding_window_pattern": pattern})
        assert windows(config) == [None] * 9
        assert rotates(config) == [True] * 9
    with pytest.raises(ConfigError, match="sliding_window_pattern='LX' is not a number or letters"):
        ours(raw | {"sliding_window_pattern": "LX"})


def test_layers_of_llama4_are_those_of_transformers() -> None:
    for changes in (
        {},
        {"interleave_moe_layer_step": 3, "no_rope_layer_interval": 3},
        {"moe_layers": [1, 5], "no_rope_layers": []},
        {"attention_chunk_size": None, "no_rope_layers": ([0, 1, 1] * 5)[:13]},
        {"layer_types": ["chunked_attention", *["full_attention"] * 12]},
    ):
        raw = {"model_type": "llama4_text", "num_hidden_layers": 13, **changes}
        config, expected = ours(raw), theirs(raw)
        layers = on_meta(config).model.layers
        assert [i for i in range(13) if config.sparse(i)] == expected.moe_layers
        assert [i for i, x in enumerate(layers) if hasattr(x.mlp, "gate")] == expected.moe_layers
        flags = expected.no_rope_layers[:13]
        assert [config.rotates(i) for i in range(13)] == [bool(flag) for flag in flags]
        assert [x.self_attn.q_norm is not None for x in layers] == [bool(flag) for flag in flags]
        chunked = [kind == "chunked_attention" for kind in expected.layer_types]
        size = expected.attention_chunk_size
        assert [x.self_attn.window for x in layers] == [size if x else None for x in chunked]
    with pytest.raises(ConfigError, match=r"layer_types=\['sliding_attention'"):
        ours(raw | {"layer_types": ["sliding_attention"] * 13})
    with pytest.raises(ConfigError, match=r"no_rope_layers=\[1\] is not 0 or 1 for 13 layers"):
        ours({"model_type": "llama4_text", "num_hidden_layers": 13, "no_rope_layers": [1]})


def test_hunyuan_stretches_theta_once() -> None:
    raw = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_scaling": HUNYUAN}
    model = on_meta(ours(raw))
    assert model.dynamic_rope is None  # no table changes with the length
    peer = HunYuanDenseV1RotaryEmbedding(theirs(raw))
    assert torch.equal(model.model.rotary_embs[0].to("cpu").inv_freq, peer.inv_freq)


def test_gemma_says_gelu_and_means_its_approximation() -> None:
    raw = {"model_type": "gemma", "hidden_act": "gelu"}
    assert GemmaMLP(theirs(raw)).act_fn(torch.ones(1)) == ACT2FN["gelu_pytorch_tanh"](torch.ones(1))
    assert on_meta(ours(raw)).model.layers[0].mlp.gate_up_proj.act == "gelu_tanh"


def test_a_window_to_both_sides() -> None:
    for width in (512, 7, 1):
        raw = published("gemma3_text") | {"sliding_window": width}
        config = ours(raw)
        assert not on_meta(config).causal
        assert windows(config)[:6:5] == [theirs(raw).sliding_window, None]
        assert config.to_dict()["sliding_window"] == width
    assert windows(ours(raw | {"use_bidirectional_attention": None}))[0] == width


def test_glm4_ends_where_transformers_does() -> None:
    for eos in (None, 7, [1, 2]):
        raw = {"model_type": "glm4", "eos_token_id": eos}
        assert ours(raw).eos_token_id == theirs(raw).eos_token_id


@pytest.mark.parametrize("same", [False, True])
def test_sizes_of_gemma4s_layers(same: bool) -> None:
    """From keys that transformers reads and does not write."""
    raw = {"model_type": "gemma4_unified_text", "num_hidden_layers": 4, "attention_k_eq_v": same}
    raw |= {"global_head_dim": 96, "num_global_key_value_heads": 2}
    raw |= {"layer_types": [FULL, SLIDING, FULL, SLIDING]}  # the last one is full in any case
    config, expected = ours(raw), theirs(raw).per_layer_config
    assert windows(config) == [None, 1024, None, None]
    for layer in range(4):
        sizes = expected[layer].head_dim, expected[layer].num_key_value_heads
        assert config.attention_sizes(layer) == sizes  # type: ignore[attr-defined]
        assert sizes == ((256, 4) if layer == 1 else (96, 2 if same else 4))
    wrong = raw | {"per_layer_config": {"0": {"head_dim": 31}}}
    with pytest.raises(ConfigError, match="layer 0 has head_dim=31, which must be even"):
        ours(wrong)
