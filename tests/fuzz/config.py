"""config.json and generation_config.json, each beside the weights of a tiny model."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import tigon
from tests.fuzz.harness import Case, Files, Link, Target
from tests.fuzz.junk import altered, damaged, dump
from tigon.generation.settings import CALL_ONLY, DEFAULTS, UNSUPPORTED
from tigon.models.config import NEUTRAL
from tigon.models.rope_config import RANGES, ROPE_RANGES
from tigon.utils.config import field_types

CONFIG, GENERATION = "config.json", "generation_config.json"
NUMBERS = sorted(DEFAULTS.keys() - {*CALL_ONLY, "do_sample", "stop_strings"})
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
    model = tigon.models.MODELS[model_type].from_config(values)
    model.generation_config = {"eos_token_id": [1, 2], "temperature": 0.7, "do_sample": True}
    model.save_pretrained(folder)


def keys_of(config: dict[str, Any], model_type: str) -> list[str]:
    own = field_types(tigon.models.MODELS[model_type].config_class).keys() - {"source"}
    inside = [*ROPE_RANGES, "rope_type", "type", "truncate", "partial_rotary_factor"]
    ropes = [f"{rope}.{key}" for rope in ROPES for key in inside]
    # What a family reads comes as often as all that others do
    return sorted(own) * 4 + sorted({*config, *RANGES, *NEUTRAL}) + OTHERS + ROPES + ropes


def config_cases(model_type: str) -> Callable[[Files], st.SearchStrategy[Case]]:
    def cases(files: Files) -> st.SearchStrategy[Case]:
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

    return cases


# Numbers that are each in their range, or just outside of it
numbers = st.dictionaries(
    st.sampled_from([*NUMBERS, "do_sample"]),
    st.sampled_from([-1, 0, 1, 2, 7, True, 2**16, 2**31 - 1, 10**30, 0.5, 1e-320, 1e308, [2, -5]]),
    min_size=1,
)


def generation_cases(files: Files) -> st.SearchStrategy[Case]:
    valid = json.loads(files[GENERATION])
    contents = st.one_of(
        altered(valid, [*DEFAULTS, *DEFAULTS, *UNSUPPORTED]).map(dump),
        numbers.map(lambda some: dump(valid | some)),
        damaged(files[GENERATION]),
        st.sampled_from([None, Link("../secret.json"), Link("/etc/hostname")]),
    )
    return contents.map(lambda content: {GENERATION: content})


class Enough(Exception):
    """Raised by a streamer, as a file may ask for a text without an end."""


def generate(folder: Path) -> None:
    """Generate three tokens with the settings of the file."""
    model, columns = tigon.from_pretrained(folder), []

    def stop_at_three(column: torch.Tensor) -> None:
        columns.append(column)
        if len(columns) == 3:
            raise Enough

    with suppress(Enough):
        model.generate(torch.tensor([[3, 4]]), streamer=stop_at_three)


load = tigon.from_pretrained
TARGETS = [
    Target(f"config of {name}", 1 / 4, partial(write, name), config_cases(name), load)
    for name in FAMILIES
]
TARGETS += [Target("generation_config", 1 / 2, partial(write, "llama"), generation_cases, generate)]
