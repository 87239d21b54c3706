"""The smallest and the largest value of every number in config.json, whatever the family."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tigon.utils.config import ConfigError, check_range

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
