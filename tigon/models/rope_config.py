"""The smallest and the largest value of every number in config.json, whatever the family."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tigon.layers.rope import ROPE_TYPES
from tigon.utils.config import ConfigError, check_range, check_type
from tigon.utils.json import quote

Range = tuple[float, float]
LARGEST = 2**31 - 1  # of any whole number
MOST_LAYERS = 2_000
MOST_EXPERTS = 2**14  # of a layer
MOST_ITEMS = 2**15  # of a list

SIZE: Range = (1, LARGEST)
COUNT: Range = (0, LARGEST)
TOKEN: Range = (-1, LARGEST)  # -1: none, in old files
POSITIVE: Range = (1e-9, 1e9)
WEIGHT: Range = (0, 1e9)
FACTOR: Range = (-1e9, 1e9)

RANGES: dict[str, Range] = {
    "attention_multiplier": FACTOR,
    "attn_logit_softcapping": POSITIVE,
    "bos_token_id": TOKEN,
    "decoder_sparse_step": SIZE,
    "embedding_multiplier": FACTOR,
    "eos_token_id": TOKEN,
    "final_logit_softcapping": POSITIVE,
    "head_dim": (0, 2**16),
    "hidden_size": SIZE,
    "initializer_range": WEIGHT,
    "intermediate_size": SIZE,
    "labels": (0, MOST_ITEMS),  # num_labels
    "logits_scaling": POSITIVE,
    "max_position_embeddings": SIZE,
    "max_window_layers": COUNT,
    "mlp_only_layers": COUNT,
    "moe_intermediate_size": SIZE,
    "no_rope_layer_interval": SIZE,
    "no_rope_layers": COUNT,
    "num_attention_heads": SIZE,
    "num_experts": (0, MOST_EXPERTS),
    "num_experts_per_tok": COUNT,
    "num_hidden_layers": (1, MOST_LAYERS),
    "num_key_value_heads": COUNT,
    "num_local_experts": (0, MOST_EXPERTS),
    "original_max_position_embeddings": SIZE,
    "pad_token_id": TOKEN,
    "query_pre_attn_scalar": POSITIVE,
    "residual_multiplier": FACTOR,
    "rms_norm_eps": WEIGHT,
    "router_aux_loss_coef": WEIGHT,
    "shared_expert_intermediate_size": COUNT,
    "sliding_window": COUNT,  # 0 where no layer slides
    "sliding_window_pattern": SIZE,
    "vocab_size": SIZE,
}
# Of rope_parameters
ROPE_RANGES: dict[str, Range] = {
    "attention_factor": POSITIVE,
    "beta_fast": WEIGHT,  # 0 means the default
    "beta_slow": WEIGHT,
    "factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "llama_4_scaling_beta": FACTOR,
    "long_factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "max_position_embeddings": SIZE,
    "mscale": WEIGHT,
    "mscale_all_dim": WEIGHT,
    "original_max_position_embeddings": SIZE,
    "rope_theta": (1e-6, 1e18),
    "short_factor": POSITIVE,
}


def check_config(config: Any) -> None:
    """Raises ConfigError for a number, or one of a list, that is out of its range."""
    check_values({f.name: getattr(config, f.name) for f in fields(config)}, RANGES)


def check_values(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > MOST_ITEMS:
            raise ConfigError(f"{name} has {len(items)} items: it can have {MOST_ITEMS} at most")
        if name in ranges:
            for item in items:
                check_range(name, item, *ranges[name])


# RoPE in config.json, in both generations of its keys, and back.

FULL, SLIDING = "full_attention", "sliding_attention"
Rope = dict[str, Any]  # rope_parameters, complete for its type

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "factor"),
}
ROPE_HINTS: dict[str, Any] = {
    "attention_factor": float | None,
    "beta_fast": float | None,
    "beta_slow": float | None,
    "factor": float | None,
    "finetuned": Any,
    "high_freq_factor": float,
    "long_factor": list[float],
    "low_freq_factor": float,
    "mscale": float | None,
    "mscale_all_dim": float | None,
    "original_max_position_embeddings": int | None,
    "rope_theta": float,
    "rope_type": str,
    "short_factor": list[float],
    "truncate": bool,
    "type": str | None,
}


def read_rope(
    source: Mapping[str, Any],
    default_theta: float,
    longest: int,
    *,
    partial: bool = False,
    extras: Mapping[str, Any] | None = None,
) -> Rope:
    """One `rope_parameters` from either generation of keys, complete for its type."""
    # transformers lets a non-null rope_scaling replace rope_parameters
    key = "rope_scaling" if source.get("rope_scaling") else "rope_parameters"
    given = source.get(key) or {}
    check_type(key, given, dict)
    rope = {"rope_theta": source.get("rope_theta", default_theta), **given}
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"unknown rope_type {quote(kind)}; there are {', '.join(ROPE_TYPES)}")
    if kind in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        rope[key] = source.get(key) or rope.get(key) or longest
    hints = ROPE_HINTS | dict(extras or {})
    for name, value in rope.items():
        if name in hints:
            check_type(name, value, hints[name])
    check_values({name: value for name, value in rope.items() if name in hints}, ROPE_RANGES)
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    missing = [k for k in ROPE_KEYS[kind] if rope.get(k) is None]
    if missing:
        raise ConfigError(
            f"rope_type {kind!r} needs {', '.join(missing)}; the config has {quote(rope, 500)}"
        )
    _check_together(kind, rope)
    factor = rope.pop("partial_rotary_factor", None)
    unknown = {k: v for k, v in rope.items() if k not in hints}
    if unknown:
        raise ConfigError(f"rope_type {kind!r} does not know {quote(unknown)}")
    if factor is None and partial:
        factor = source.get("partial_rotary_factor")
    if factor is None or (factor == 1 and not partial):
        return rope
    if not partial:
        raise ConfigError(f"partial_rotary_factor={quote(factor)} is not known to this model type")
    if not 0 < check_type("partial_rotary_factor", factor, float) <= 1:
        raise ConfigError(f"partial_rotary_factor={quote(factor)} is not in (0, 1]")
    return rope | {"partial_rotary_factor": factor}


def _check_together(kind: str, rope: Rope) -> None:
    """Values that only together have no frequencies."""
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ConfigError(
            f"low_freq_factor={rope['low_freq_factor']} is not less than "
            f"high_freq_factor={rope['high_freq_factor']}"
        )
    if kind == "yarn" and rope["rope_theta"] <= 1:
        raise ConfigError(f"rope_theta={rope['rope_theta']} is not more than 1, as yarn needs it")
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope" and original == 1:
        raise ConfigError("original_max_position_embeddings=1 is too short for longrope")


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys that transformers 4 and 5 and other readers look for."""
    out = {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        # The whole dictionary: where a reader takes rope_scaling, it takes nothing else
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
    }
    if "partial_rotary_factor" in rope:
        out["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] == "longrope":  # transformers 4 looks for it here
        out["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return out


def read_two_ropes(
    source: Mapping[str, Any], theta: float, local_theta: float, longest: int
) -> dict[str, Rope]:
    """The RoPE of full layers, which rope_theta and rope_scaling belong to, and of sliding ones.

    `theta` and `local_theta` are defaults.
    """
    given = check_type("rope_parameters", source.get("rope_parameters") or {}, dict)
    scaling = check_type("rope_scaling", source.get("rope_scaling") or {}, dict)
    if not given.keys() <= {FULL, SLIDING}:
        raise ConfigError(
            f"rope_parameters={quote(given)} is not given per {FULL!r} and {SLIDING!r}"
        )
    full, sliding = (
        check_type(f"rope_parameters.{name}", given.get(name) or {}, dict)
        for name in (FULL, SLIDING)
    )
    theta = source.get("rope_theta", theta)
    return {
        FULL: read_rope({"rope_parameters": full | scaling}, theta, longest),
        SLIDING: read_rope({"rope_parameters": sliding}, local_theta, longest),
    }


def write_two_ropes(ropes: Mapping[str, Rope]) -> dict[str, Any]:
    return write_rope(ropes[FULL]) | {"rope_parameters": dict(ropes)}
