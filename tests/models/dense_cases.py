"""Tiny configs of dense families, and what those of others share: sizes, windows and RoPE."""

from typing import Any

Overrides = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"

# Sizes that hide nothing: no product of two is a third, head_dim is not hidden / heads
SIZES: Overrides = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 24,
    "rms_norm_eps": 1e-3,
}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
LONG: Overrides = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 40 for i in range(10)],
    "long_factor": [1.5 + i for i in range(10)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, Overrides] = {
    "default": DEFAULT,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn factor from lengths": YARN | {"factor": None},
    "yarn betas": YARN | {"beta_fast": 1.0, "beta_slow": 0.05},
    "yarn not truncated": YARN | {"truncate": False, "beta_fast": 1.0, "beta_slow": 0.05},
    "yarn mscale": YARN | {"mscale": 2.0, "mscale_all_dim": 0.4},
    "yarn attention_factor": YARN | {"attention_factor": 1.7},
    "longrope short": LONG | {"original_max_position_embeddings": 64, "factor": 3.0},
    "longrope long": LONG | {"original_max_position_embeddings": 16},
    "longrope attention_factor": LONG
    | {"original_max_position_embeddings": 16, "attention_factor": 1.3},
}

DENSE: dict[str, dict[str, Overrides]] = {
    "llama": {
        "plain": {"num_key_value_heads": 6, "head_dim": 16},
        "grouped": {},
        "one kv head": {"num_key_value_heads": 1},
        "attention_bias": {"attention_bias": True},
        "mlp_bias": {"mlp_bias": True, "attention_bias": True},
        "tied": {"tie_word_embeddings": True},
        "gelu": {"hidden_act": "gelu"},
        "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "pad row": {"pad_token_id": 3},
        "pad row, tied": {"pad_token_id": 3, "tie_word_embeddings": True},
        **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
    }
}
WINDOW = {"sliding_window": 7}  # shorter than every text here
DENSE |= {
    "mistral": {
        "window": WINDOW,
        "no window": {"sliding_window": None},
        "tied": {"tie_word_embeddings": True, **WINDOW},
    },
    "ministral": {
        "some slide": {**WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
        "all slide": WINDOW,
    },
    "qwen2": {
        "plain": {},
        "window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "window unused": {**WINDOW, "max_window_layers": 1},
        "yarn, tied": {"rope_parameters": YARN, "tie_word_embeddings": True},
    },
    "qwen3": {
        "plain": {},
        "attention_bias": {"attention_bias": True},
        "window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "tied": {"tie_word_embeddings": True},
    },
    "gemma": {
        "tied": {},
        "untied": {"tie_word_embeddings": False},
        "gelu": {"hidden_act": "gelu", "hidden_activation": None},
        "attention_bias": {"attention_bias": True},
    },
    "gemma2": {
        name: {
            **WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": attention,
            "final_logit_softcapping": final,
        }
        for name, attention, final in (("small caps", 1.0, 3.0), ("no caps", None, None))
    }
    | {"other layers slide": {**WINDOW, "layer_types": [FULL, SLIDING, FULL]}},
    "smollm3": {
        "every other": {"no_rope_layer_interval": 2, "pad_token_id": 3},
        "listed, sliding": {
            **WINDOW,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "pad_token_id": None,
        },
        "biases": {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    },
    "phi3": {
        "plain": {"pad_token_id": None},
        "partial, window": {
            **WINDOW,
            "pad_token_id": 3,
            "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
        },
        "longrope": {
            "pad_token_id": None,
            "head_dim": 16,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONG
            | {name: LONG[name][:8] for name in ("short_factor", "long_factor")},
        },
    },
    "seed_oss": {
        "plain": {},
        "all biases": {"attention_out_bias": True, "mlp_bias": True},
        "no bias": {"attention_bias": False},
    },
    "gemma3_text": {
        "two ropes": {
            **WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
            },
        },
        "softcap": {**WINDOW, "final_logit_softcapping": 3.0},
        "both sides": {
            **WINDOW,
            "use_bidirectional_attention": True,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        "untied": {**WINDOW, "tie_word_embeddings": False},
    },
}
DENSE |= {
    "olmo2": {
        "plain": {},
        "one kv head, yarn": {"num_key_value_heads": 1, "rope_parameters": YARN},
        "attention_bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
    },
    "olmo3": {
        "scaled where full": {
            **WINDOW,
            "num_hidden_layers": 4,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                FULL: YARN | {"rope_theta": 900.0},
            },
        },
        "listed": {**WINDOW, "layer_types": [FULL, SLIDING, FULL], "attention_bias": True},
    },
    "granite": {
        "multipliers": {
            "embedding_multiplier": 5.3,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.7,
        },
        "none given": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True, "logits_scaling": 0.6, "rope_parameters": YARN},
    },
    "glm4": {
        "plain": {"pad_token_id": 3},
        "a quarter, no bias": {
            "pad_token_id": None,
            "attention_bias": False,
            "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25},
        },
        "whole, yarn": {
            "pad_token_id": None,
            "rope_parameters": YARN | {"partial_rotary_factor": 1.0},
        },
    },
    "ministral3": {
        "queries grow": {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
        },
        "window": {
            **WINDOW,
            "rope_parameters": DEFAULT
            | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.9},
        },
        "default rope, tied": {"tie_word_embeddings": True},
    },
}
# Three kinds of layer: keys and values of layers 1 and 2 are read by 4 and 3, and by 5
GEMMA4: Overrides = {
    **WINDOW,
    "num_hidden_layers": 6,
    "head_dim": 20,
    "global_head_dim": 32,
    "layer_types": [FULL, SLIDING, FULL, FULL, SLIDING, FULL],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        FULL: {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
    },
}
GEMMA3N: Overrides = {
    **WINDOW,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
    "num_kv_shared_layers": 2,
    "intermediate_size": [136, 120, 136, 152, 136],
    "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.8],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 150,
    "laurel_rank": 10,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
    },
}
PER_LAYER: Overrides = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 211}
DENSE |= {
    "gemma3n_text": {
        "shared": {**GEMMA3N, "pad_token_id": 3, "final_logit_softcapping": 3.0},
        "three streams, dense": {
            **GEMMA3N,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": None,
            "intermediate_size": 136,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
        },
    },
    "gemma4_text": {
        "shared": {**GEMMA4, **PER_LAYER, "num_kv_shared_layers": 3, "pad_token_id": 3},
        "double wide, softcap": {
            **GEMMA4,
            **PER_LAYER,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
        "keys are values": {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
        },
        "experts": {
            **GEMMA4,
            **PER_LAYER,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    },
    "gemma4_unified_text": {
        "keys are values": {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "final_logit_softcapping": 3.0,
        },
        "listed": {**GEMMA4, "layer_types": [FULL, *5 * [SLIDING]], "num_kv_shared_layers": 2},
        "both sides": {**GEMMA4, "use_bidirectional_attention": "all", "num_kv_shared_layers": 2},
    },
}
# A softcap that logits reach, and an eps behind branches that counts
MUSE: Overrides = {**WINDOW, "output_multiplier": 1.7, "qk_scale_factor": 2.3}
CAPPED: Overrides = {**MUSE, "post_norm_eps": 0.05, "final_logit_softcapping": 3.0}
DENSE |= {
    "muse_glimmer_text": {
        "plain": {**MUSE, "pad_token_id": 3},
        "small cap": {**CAPPED, "num_hidden_layers": 5},
        "listed": {
            **CAPPED,
            "layer_types": [FULL, SLIDING, FULL],
            "layer_rope_theta": [0, 700.0, 0.5],
            "rope_parameters": YARN,
            "attention_bias": True,
        },
        "tied": {**WINDOW, "output_multiplier": 2.0, "tie_word_embeddings": True},
    }
}
DENSE |= {
    "ernie4_5": {
        "grouped": {"pad_token_id": 3},
        "biases": {"use_bias": True, "tie_word_embeddings": False, "pad_token_id": None},
        "yarn": {"rope_parameters": YARN},
    },
    "exaone4": {
        "three slide": {**WINDOW, "num_hidden_layers": 5},
        "no window": {"sliding_window": None, "layer_types": [FULL] * 3, "pad_token_id": 3},
        "listed": {
            **WINDOW,
            "layer_types": [FULL, SLIDING, SLIDING],
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
        },
    },
    "hunyuan_v1_dense": {
        "plain": {"pad_token_id": 3},
        "rope alpha": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 1.0}
            | {"alpha": 9.0}
        },
        "rope dynamic": {"rope_parameters": ROPES["dynamic"]},
        "attention_bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
    },
}
