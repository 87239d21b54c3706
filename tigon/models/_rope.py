"""RoPE in config.json, in both generations of its keys, and back."""

from collections.abc import Mapping
from typing import Any

from tigon.layers.rope import ROPE_TYPES
from tigon.models._ranges import ROPE_RANGES, check_values
from tigon.utils.config import ConfigError, check_type
from tigon.utils.json import quote

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
