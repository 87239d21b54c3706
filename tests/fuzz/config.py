"""config.json beside the weights of a tiny model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import tigon
from tests.fuzz.harness import Case, Files, Link, Target
from tests.fuzz.junk import altered, damaged, dump
from tigon.models.config import NEUTRAL
from tigon.models.rope_config import RANGES, ROPE_RANGES
from tigon.utils.config import field_types

CONFIG = "config.json"
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "pad_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
LONGROPE |= {"original_max_position_embeddings": 32, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2}
INPUTS = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 11}
LISTS: dict[str, dict[str, Any]] = {  # given for each layer
    kind: {"num_hidden_layers": 2, "layer_types": [kind, "full_attention"]}
    for kind in ("sliding_attention", "linear_attention", "chunked_attention", "conv")
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": YARN},
    "gemma3_text": WINDOW,
    "qwen3_moe": EXPERTS,
    "phi3": {"rope_parameters": LONGROPE},
    "smollm3": {},
    "granite": {},
    "gemma4_text": {
        **WINDOW,
        **INPUTS,
        **EXPERTS,
        "enable_moe_block": True,
        "top_k_experts": 1,
        "global_head_dim": 8,
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "gemma3n_text": {
        **LISTS["sliding_attention"],
        **INPUTS,
        "sliding_window": 4,
        "num_kv_shared_layers": 0,
        "laurel_rank": 2,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 3,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 0,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "granite_swa": {**WINDOW, "layer_rope_theta": [0.0, 50.0]},
    "qwen3_5_text": {
        **LISTS["linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {**WINDOW, **LOCAL, "rope_parameters": YARN | {"truncate": False}},
    "lfm2": {**LISTS["conv"], "block_multiple_of": 1, "pad_token_id": 0},
    "lfm2_moe": {**LISTS["conv"], **EXPERTS, "num_dense_layers": 1, "pad_token_id": 0},
    "llama4_text": {
        **LISTS["chunked_attention"],
        **LOCAL,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "intermediate_size_mlp": 6,
        "attention_chunk_size": 4,
        "floor_scale": 3,
    },
}
ROPES = ["rope_parameters", "rope_scaling", "rope_parameters.full_attention"]
OTHERS = ["model_type", "dtype", "torch_dtype", "quantization_config", "architectures"]
OTHERS += ["rope_theta", "rope_local_base_freq", "text_config", "attention_dropout", "auto_map"]
OTHERS += ["hidden_act"]


def write(model_type: str, folder: Path) -> None:
    values = {"model_type": model_type} | SIZES | FAMILIES[model_type]
    tigon.models.MODELS[model_type].from_config(values).save_pretrained(folder)


def keys_of(config: dict[str, Any], model_type: str) -> list[str]:
    own = field_types(tigon.models.MODELS[model_type].config_class).keys() - {"source"}
    inside = [*ROPE_RANGES, "rope_type", "type", "truncate", "partial_rotary_factor"]
    ropes = [f"{rope}.{key}" for rope in ROPES for key in inside]
    layers = [f"{key}.{i}" for key in config if isinstance(config[key], list) for i in range(3)]
    layers += [f"per_layer_config.{layer}.{size}" for layer in range(2) for size in SIZES]
    # What a family reads comes as often as all that others do
    every = sorted({*config, *RANGES, *NEUTRAL}) + OTHERS + ROPES + ropes
    return sorted(own) * 4 + layers * 2 + every


def load(folder: Path) -> None:
    """Loads the model and runs it over more tokens than a window or a chunk has."""
    model = tigon.from_pretrained(folder)
    ids = torch.arange(1, 8)[None] % model.config.vocab_size
    with torch.no_grad():
        model(ids)


def cases(model_type: str, files: Files) -> st.SearchStrategy[Case]:
    valid = json.loads(files[CONFIG])
    valid.pop("rope_scaling", None)  # in place of which rope_parameters would not be read
    changed = altered(valid, keys_of(valid, model_type))
    wrapped = st.builds(
        lambda kind, inner: {"model_type": kind, "text_config": inner},
        st.sampled_from(["gemma3", "mistral3"]),
        changed,
    )
    contents = st.one_of(
        changed.map(dump),
        changed.map(dump),
        wrapped.map(dump),
        damaged(files[CONFIG]),
        st.sampled_from([None, Link("../secret.json"), Link("/etc/hostname"), Link(CONFIG)]),
    )
    return contents.map(lambda content: {CONFIG: content})


TARGETS = [
    Target(f"config of {name}", 1, partial(write, name), partial(cases, name), load)
    for name in FAMILIES
]
