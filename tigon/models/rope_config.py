"""The range of every number in config.json, and RoPE parameters in both generations of keys."""

from collections.abc import Mapping
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
ANY: Range = (-LARGEST, LARGEST)  # of a number without a row below


def _range_of_names(*groups: tuple[Range, str]) -> dict[str, Range]:
    """Maps each name to its range; a group's names are separated by spaces."""
    return {name: limits for limits, names in groups for name in names.split()}


RANGES = _range_of_names(
    (FACTOR, "embedding_multiplier residual_multiplier swiglu_alpha"),
    # Of scores: times a negative one, torch's masked scores become nan
    (POSITIVE, "attention_multiplier qk_scale_factor"),
    (POSITIVE, "attn_logit_softcapping final_logit_softcapping logits_scaling"),
    (POSITIVE, "query_pre_attn_scalar swiglu_limit"),
    (
        WEIGHT,
        "initializer_range post_norm_eps rms_norm_eps routed_scaling_factor router_aux_loss_coef",
    ),
    (TOKEN, "bos_token_id eos_token_id pad_token_id"),
    (SIZE, "hidden_size intermediate_size moe_intermediate_size vocab_size num_attention_heads"),
    (SIZE, "max_position_embeddings original_max_position_embeddings"),
    (SIZE, "attention_chunk_size floor_scale interleave_moe_layer_step intermediate_size_mlp"),
    (COUNT, "moe_layers"),
    (FACTOR, "attn_scale"),
    (SIZE, "decoder_sparse_step no_rope_layer_interval sliding_window_pattern"),
    (SIZE, "full_attention_interval linear_num_key_heads linear_num_value_heads"),
    ((1, 2**16), "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim"),
    (COUNT, "altup_active_idx hidden_size_per_layer_input num_kv_shared_layers"),
    (SIZE, "laurel_rank"),
    ((1, 64), "altup_num_inputs"),
    ((0, 0.999999), "activation_sparsity_pattern"),
    (SIZE, "global_head_dim num_global_key_value_heads vocab_size_per_layer_input"),
    (SIZE, "kv_lora_rank n_group n_shared_experts q_lora_rank topk_group v_head_dim"),
    (SIZE, "qk_nope_head_dim qk_rope_head_dim"),
    (SIZE, "block_multiple_of"),
    ((1, 2**16), "conv_L_cache"),
    ((1e-3, 1e3), "block_ffn_dim_multiplier"),
    (COUNT, "full_attn_idxs"),
    (COUNT, "max_window_layers mlp_only_layers no_rope_layers num_experts_per_tok"),
    (COUNT, "first_k_dense_replace num_dense_layers num_key_value_heads"),
    (COUNT, "shared_expert_intermediate_size"),
    (COUNT, "sliding_window"),  # 0 where no layer slides
    ((0, 2**16), "head_dim"),
    ((0, MOST_ITEMS), "labels"),  # num_labels
    ((0, MOST_EXPERTS), "num_experts num_local_experts"),
    ((1, MOST_EXPERTS), "n_routed_experts"),
    ((1, MOST_LAYERS), "num_hidden_layers"),
)
ROPE_RANGES = _range_of_names(  # of rope_parameters
    (POSITIVE, "alpha attention_factor factor high_freq_factor low_freq_factor"),
    (POSITIVE, "long_factor short_factor"),
    (WEIGHT, "beta_fast beta_slow mscale mscale_all_dim"),  # a beta of 0 means the default
    (FACTOR, "llama_4_scaling_beta"),
    (SIZE, "max_position_embeddings original_max_position_embeddings"),
    ((1e-6, 1e18), "rope_theta"),
)


def check_values(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Raises ConfigError for a value out of its name's range, or a list that is too long."""
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if len(items) > MOST_ITEMS:
            raise ConfigError(f"{name} has {len(items)} items: it can have {MOST_ITEMS} at most")
        for item in items:
            check_range(name, item, *ranges.get(name, ANY))


# RoPE

FULL, SLIDING = "full_attention", "sliding_attention"
Rope = dict[str, Any]  # rope_parameters, complete for its type

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "factor"),
    "proportional": (),
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
    """The `rope_parameters` of config.json's content, complete for the RoPE type.

    transformers 4 has rope_theta and rope_scaling in its place, and both are read. `longest` is
    max_position_embeddings. `partial`: the family supports partial_rotary_factor. `extras`: types
    of the family's additional keys.
    """
    # transformers lets a non-null rope_scaling replace rope_parameters
    key = "rope_scaling" if source.get("rope_scaling") else "rope_parameters"
    parameters = check_type(key, source.get(key) or {}, dict)
    rope = {"rope_theta": source.get("rope_theta", default_theta), **parameters}
    rope_type = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"unknown rope_type {quote(rope_type)}; there are {', '.join(ROPE_TYPES)}"
        )
    if rope_type in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        rope[key] = source.get(key) or rope.get(key) or longest
    partial = partial or rope_type == "proportional"
    hints = ROPE_HINTS | dict(extras or {})
    known = {name: value for name, value in rope.items() if name in hints}
    for name, value in known.items():
        check_type(name, value, hints[name])
    check_values(known, ROPE_RANGES)
    if rope.get("factor", 1.0) is None:
        del rope["factor"]
    if rope_type in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    if missing := [k for k in ROPE_KEYS[rope_type] if rope.get(k) is None]:
        raise ConfigError(
            f"rope_type {rope_type!r} needs {', '.join(missing)}; the config has {quote(rope, 500)}"
        )
    _check_combination(rope)
    factor = rope.pop("partial_rotary_factor", None)
    if unknown := {k: v for k, v in rope.items() if k not in hints}:
        raise ConfigError(f"rope_type {rope_type!r} does not know {quote(unknown)}")
    if factor is None and partial:
        factor = source.get("partial_rotary_factor")
    if factor is None or (factor == 1 and not partial):
        return rope
    if not partial:
        raise ConfigError(f"partial_rotary_factor={quote(factor)} is not known to this model type")
    if not 0 < check_type("partial_rotary_factor", factor, float) <= 1:
        raise ConfigError(f"partial_rotary_factor={quote(factor)} is not in (0, 1]")
    return rope | {"partial_rotary_factor": factor}


def _check_combination(rope: Rope) -> None:
    """Raises ConfigError for values, each in its range, that together define no frequencies."""
    rope_type = rope["rope_type"]
    if rope_type == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ConfigError(
            f"low_freq_factor={rope['low_freq_factor']} is not less than "
            f"high_freq_factor={rope['high_freq_factor']}"
        )
    if rope_type == "yarn" and rope["rope_theta"] <= 1:
        raise ConfigError(f"rope_theta={rope['rope_theta']} is not more than 1, as yarn needs it")
    if rope_type == "longrope" and rope["original_max_position_embeddings"] == 1:
        raise ConfigError("original_max_position_embeddings=1 is too short for longrope")


def write_rope(rope: Rope) -> dict[str, Any]:
    """config.json's keys for one RoPE, under the names of transformers 4 and 5."""
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
