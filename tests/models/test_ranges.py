"""Numbers of config.json beyond what a model can have, and sizes that its checkpoint does not."""

import json
import time
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.models.tiny import FULL, LLAMA3, LONG, SLIDING, YARN
from tigon.models import MODELS, build
from tigon.models.pretrained import match
from tigon.models.rope_config import RANGES, ROPE_HINTS, ROPE_RANGES
from tigon.utils.config import ConfigError, field_types
from tigon.weights import Repository

NAN, INF = float("nan"), float("inf")


def has_numbers(kind: Any) -> bool:
    if typing.get_origin(kind) in (types.UnionType, typing.Union, list):
        return any(map(has_numbers, typing.get_args(kind)))
    return kind in (int, float)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_number_has_a_range(model_type: str) -> None:
    cls = MODELS[model_type].config_class
    numbers = {name for name, kind in field_types(cls).items() if has_numbers(kind)}
    assert len(numbers) > 10 and numbers <= RANGES.keys()
    rope = ROPE_HINTS | dict(cls.rope_extras)
    assert {name for name, kind in rope.items() if has_numbers(kind)} <= ROPE_RANGES.keys()


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "eps below 0": ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be at least 0"),
    "eps infinite": ("llama", {"rms_norm_eps": INF}, "rms_norm_eps=inf must be at most"),
    "odd heads": ("llama", {"head_dim": 3}, "head_dim=3 is odd"),
    "odd heads of a quotient": (
        "llama",
        {"num_attention_heads": 32, "hidden_size": 96},
        "=3 is odd",
    ),
    "padding": ("llama", {"pad_token_id": 32000}, "pad_token_id=32000 is outside the vocabulary"),
    "padding below": ("llama", {"pad_token_id": -2}, "pad_token_id=-2 must be at least -1"),
    "token": ("llama", {"eos_token_id": [2, 2**40]}, "eos_token_id=1099511627776 must be at most"),
    "no end of tokens": ("llama", {"eos_token_id": [2] * 40_000}, "eos_token_id has 40000 items"),
    "heads below 0": ("llama", {"num_key_value_heads": -4}, "num_key_value_heads=-4 must be at"),
    "experts": (
        "qwen3_moe",
        {"num_experts": 10**9},
        "num_experts=1000000000 must be at most 16384",
    ),
    "experts of mixtral": (
        "mixtral",
        {"num_local_experts": 20_000},
        "num_local_experts=20000 must",
    ),
    "init": ("llama", {"initializer_range": NAN}, "initializer_range=nan must be at least 0"),
    "theta 0": ("llama", {"rope_theta": 0}, "rope_theta=0 must be at least"),
    "theta NaN": ("llama", {"rope_parameters": {"rope_theta": NAN}}, "rope_theta=nan must be at"),
    "factor 0": ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 must be at"),
    "original length": (
        "llama",
        {"rope_scaling": YARN | {"original_max_position_embeddings": -1}},
        "original_max_position_embeddings=-1 must be at least 1",
    ),
    "bands": ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "is not less than"),
    "yarn theta": ("llama", {"rope_scaling": YARN | {"rope_theta": 1.0}}, "is not more than 1"),
    "a factor": (
        "llama",
        {"rope_scaling": LONG | {"long_factor": [1.0, INF]}},
        "long_factor=inf must be at most",
    ),
    "longrope of one": (
        "llama",
        {"rope_scaling": LONG, "original_max_position_embeddings": 1},
        "original_max_position_embeddings=1 is too short",
    ),
    "type of rope": ("llama", {"rope_scaling": {"type": ["linear"]}}, r"rope_type \['linear'\]"),
    "a type of phi3": ("phi3", {"rope_scaling": {"type": ["su"]}}, r"rope_type \['su'\]"),
    "two ropes as a list": ("gemma3_text", {"rope_scaling": [1]}, r"rope_scaling=\[1\] is not a d"),
    "two ropes as a text": ("olmo3", {"rope_parameters": "x"}, "rope_parameters='x' is not a dic"),
    "one of two ropes": (
        "olmo3",
        {"rope_parameters": {FULL: [1], SLIDING: {}}},
        r"rope_parameters.full_attention=\[1\] is not a dictionary",
    ),
    "local theta": (
        "gemma3_text",
        {"rope_local_base_freq": "1"},
        "rope_local_base_freq='1' is not",
    ),
    "pattern 0": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be"),
    "scale 0": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be at least"),
    "interval 0": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be"),
    "logits 0": ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be at least"),
    "experts below 0": ("qwen3_moe", {"num_experts": -1}, "num_experts=-1 must be at least 0"),
    "window 0": ("mistral", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    "an unknown value": (
        "llama",
        {"clip_qkv": "\x1b[2J" + "x" * 500},
        r"clip_qkv='\\x1b\[2Jx.*\.\.\. ch",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_values_beyond_their_range(case: str) -> None:
    model_type, changes, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        MODELS[model_type].from_config({"model_type": model_type, **changes}, device="meta")


def test_unknown_keys_are_shown_within_bounds() -> None:
    raw = {f"\x1bkey {i}": "y" * 1000 for i in range(20_000)}
    begin = time.process_time()
    with pytest.warns(UserWarning, match=r"ignored: {'\\x1bkey 0': 'yyyy") as caught:
        MODELS["llama"].config_class.from_dict(raw)
    assert time.process_time() - begin < 5
    assert len(str(caught[0].message)) < 5000


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
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    MODELS["qwen3_moe"].from_config({"model_type": "qwen3_moe", **TINY, **EXPERTS}).save_pretrained(
        folder / "model"
    )
    return folder / "model"


@pytest.mark.parametrize("case", UNFIT)
def test_sizes_are_compared_before_anything_is_allocated(
    case: str, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = UNFIT[case]
    for path in experts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    monkeypatch.setattr(torch, "empty_like", None)  # what allocates parameters
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        tigon.from_pretrained(tmp_path)


def test_each_shape_is_compared_before_anything_is_allocated(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in experts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": 2}))
    monkeypatch.setattr(torch, "empty_like", None)
    for mmap in (False, True):
        with pytest.raises(ValueError, match=r"k_proj.weight is \[4, 8\], not \[8, 8\]"):
            tigon.from_pretrained(tmp_path, mmap=mmap)
    with pytest.raises(ValueError, match="does not fit Qwen3Moe"):
        build(Repository(tmp_path), MODELS)


def test_experts_are_counted_before_they_are_named(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in experts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {"other": torch.zeros(10**6, dtype=torch.uint8)}, tmp_path / "model.safetensors"
    )
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            json.loads(config.read_text())
            | dict.fromkeys(("num_experts", "num_local_experts"), 5000)
        )
    )
    monkeypatch.setattr(match, "layout", None)
    with pytest.raises(ConfigError, match="a model of 10000 matrices of experts does not fit"):
        tigon.from_pretrained(tmp_path)


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
    content: str, message: str, experts: Path, tmp_path: Path
) -> None:
    for path in experts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        tigon.from_pretrained(tmp_path)
