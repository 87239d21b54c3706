"""config.json beside the weights of a tiny model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

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
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "gemma3_text": {"sliding_window": 4, "num_hidden_layers": 2},
    "qwen3_moe": EXPERTS,
    "phi3": {"rope_parameters": LONGROPE},
    "smollm3": {},
    "granite": {},
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
    # What a family reads comes as often as all that others do
    return sorted(own) * 4 + sorted({*config, *RANGES, *NEUTRAL}) + OTHERS + ROPES + ropes


def cases(model_type: str, files: Files) -> st.SearchStrategy[Case]:
    valid = json.loads(files[CONFIG])
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
    Target(
        f"config of {name}", 1, partial(write, name), partial(cases, name), tigon.from_pretrained
    )
    for name in FAMILIES
]
