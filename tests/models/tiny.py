"""Tiny models of transformers that expose mistakes; a new family adds its row to CASES."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from tests.support.numbers import float64
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import ModelConfig

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

CASES: dict[str, dict[str, Overrides]] = {
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
CASES |= {
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
CASES |= {
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
CASES |= {
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
CASES |= {
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
CASES |= {
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
# No token chooses some of the experts where there are many
EXPERTS: Overrides = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MANY: Overrides = {**EXPERTS, "num_experts": 90, "num_experts_per_tok": 1}
SHARED: Overrides = {**EXPERTS, "shared_expert_intermediate_size": 56}
CASES |= {
    "mixtral": {
        "plain": {"num_local_experts": 8},
        "window": {**WINDOW, "num_local_experts": 5, "num_experts_per_tok": 3},
        "all experts, tied": {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
        "two of many": {"num_local_experts": 90, "num_experts_per_tok": 2},
    },
    "qwen2_moe": {
        "plain": SHARED,
        "normed, no bias": {**SHARED, "norm_topk_prob": True, "qkv_bias": False},
        "some dense": {**SHARED, "mlp_only_layers": [1]},
        "every other": {**SHARED, "decoder_sparse_step": 2, "tie_word_embeddings": True},
        "window": {**SHARED, **WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        "window unused": {**SHARED, **WINDOW},
    },
    "qwen3_moe": {
        "plain": EXPERTS,
        "normed, biases": {**EXPERTS, "norm_topk_prob": True, "attention_bias": True},
        "some dense": {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
        "every other": {**EXPERTS, "decoder_sparse_step": 2},
        "window": {**EXPERTS, **WINDOW, "use_sliding_window": True},
        "window unused": {**EXPERTS, **WINDOW},
        "one of many": MANY,
    },
}
# transformers has no other size of heads
OLMOE: Overrides = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3}
CASES |= {
    "olmoe": {
        "plain": OLMOE,
        "clipped, biases": {**OLMOE, "clip_qkv": 0.9, "attention_bias": True},
        "normed, tied": {**OLMOE, "norm_topk_prob": True, "tie_word_embeddings": True},
        "one of many": {**OLMOE, "num_experts": 90, "num_experts_per_tok": 1},
    }
}
LINEAR = "linear_attention"
# Three value heads to a key head; a quarter of 24 head dims is rotated
DELTA: Overrides = {
    "head_dim": 24,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 10,
}
CASES |= {
    "qwen3_5_text": {
        "plain": DELTA,
        "biases, tied": {
            **DELTA,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 12,
        },
        "half, by interval": {
            **DELTA,
            "layer_types": None,
            "full_attention_interval": 2,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
    },
    "qwen3_5_moe_text": {
        "plain": {**DELTA, **SHARED},
        "tied": {**DELTA, **SHARED, "tie_word_embeddings": True, "attention_bias": True},
    },
    "qwen3_next": {
        "plain": {**DELTA, **SHARED},
        "not normed": {**DELTA, **SHARED, "norm_topk_prob": False, "linear_num_key_heads": 12},
        "some dense": {**DELTA, **SHARED, "mlp_only_layers": [1], "attention_bias": True},
    },
}
GRANITE = {"embedding_multiplier": 5.3, "attention_multiplier": 0.3, "logits_scaling": 1.7}
CASES |= {
    "granite_swa": {
        "plain": {
            **WINDOW,
            **GRANITE,
            "residual_multiplier": 0.7,
            "rope_parameters": YARN,
            "layer_rope_theta": [500.0, 0, 9e3],
            "tie_word_embeddings": False,
        },
        "one theta, tied": {**WINDOW, "num_hidden_layers": 5, "attention_bias": True},
        "listed": {
            **WINDOW,
            **GRANITE,
            "layer_types": [FULL, SLIDING, FULL],
            "layer_rope_theta": [0.0, 70.0, 70],
            "mlp_bias": True,
            "pad_token_id": 3,
        },
    }
}
CLAMPED: Overrides = {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.5}
UNCUT = YARN | {"truncate": False, "beta_fast": 1.0, "beta_slow": 0.05}
CASES |= {
    "gpt_oss": {
        "plain": {**CLAMPED, **WINDOW, "rope_parameters": UNCUT},
        "aux loss": {**CLAMPED, **WINDOW, "output_router_logits": True, "swiglu_alpha": 1.1},
        "listed, no bias": {
            **CLAMPED,
            **WINDOW,
            "layer_types": [FULL, SLIDING, SLIDING],
            "attention_bias": False,
            "rope_parameters": DEFAULT,
        },
        "own limit, tied": {**WINDOW, "num_local_experts": 4, "tie_word_embeddings": True},
        "pad row": {**CLAMPED, **WINDOW, "pad_token_id": 3},
    }
}
# Latents: a head has 12 dims without a position, 8 that are rotated and 10 of values. Experts are
# 4 groups of 3, of which two are taken; the first layer has none
LATENTS: Overrides = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
GROUPS: Overrides = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
SCALED_YARN: Overrides = YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}
GROWING: Overrides = SCALED_YARN | {"llama_4_scaling_beta": 0.5}
CASES |= {
    "deepseek_v3": {
        "plain": {**LATENTS, **GROUPS, "rope_parameters": SCALED_YARN},
        "one group, no query latent": {
            **LATENTS,
            **GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "attention_bias": True,
            "first_k_dense_replace": 2,
        },
        "by halves, wide values": {
            **LATENTS,
            **GROUPS,
            "rope_interleave": False,
            "v_head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "n_routed_experts": 90,
            "n_group": 5,
            "first_k_dense_replace": 0,
            "rope_parameters": SCALED_YARN | {"mscale": None},
        },
    },
    "glm4_moe": {
        "plain": {**GROUPS, "use_qk_norm": True},
        "one group, biases": {
            **GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.8},
        },
    },
    "glm4_moe_lite": {
        "plain": {**LATENTS, **GROUPS, "v_head_dim": 20},
        "listed": {
            **LATENTS,
            **GROUPS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "first_k_dense_replace": 3,
            "rope_parameters": SCALED_YARN,
        },
    },
    "mistral4": {
        "queries grow": {
            **LATENTS,
            **GROUPS,
            "head_dim": 20,  # with those that are not rotated
            "pad_token_id": 3,
            "rope_parameters": GROWING | {"original_max_position_embeddings": 8},
        },
        "one group, not normed": {
            **LATENTS,
            **GROUPS,
            "head_dim": 20,  # with those that are not rotated
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "rope_parameters": GROWING | {"original_max_position_embeddings": 12},
        },
    },
}
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
# Chunks shorter than texts, queries that grow early, and a layer without experts
CHUNKS: Overrides = {"attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.4}
CHUNKS |= {"num_local_experts": 5, "intermediate_size_mlp": 72, "intermediate_size": 40}
CASES |= {
    "llama4_text": {
        "plain": {
            **CHUNKS,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "pad_token_id": 3,
        },
        "two of each": {**CHUNKS, "moe_layers": [0, 2], "num_experts_per_tok": 2},
        "biases, yarn": {
            **CHUNKS,
            "no_rope_layers": [1, 1, 1],
            "attention_bias": True,
            "rope_parameters": YARN,
        },
        "full, no norm": {
            **CHUNKS,
            "attention_chunk_size": None,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": True,
        },
        "listed": {
            **CHUNKS,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "no_rope_layer_interval": 2,
            "rope_parameters": LLAMA3,
        },
    }
}
# Two thirds of 136 and a bit are 94, up to 98 in sevens
CONV: Overrides = {
    "layer_types": ["conv", FULL, "conv"],
    "norm_eps": 1e-3,
    "block_multiple_of": 7,
    "block_ffn_dim_multiplier": 1.05,
    "pad_token_id": 3,
}
CASES |= {
    "lfm2": {
        "plain": CONV,
        "untied, four taps, size as given": {
            **CONV,
            "tie_word_embeddings": False,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "pad_token_id": None,
        },
        "by indices, yarn": {
            **CONV,
            "layer_types": None,
            "full_attn_idxs": [0, 2],
            "rope_parameters": YARN,
        },
        "biases": {**CONV, "conv_bias": True},
    }
}
# The first layer is dense
MIXED: Overrides = {
    **EXPERTS,
    "layer_types": ["conv", FULL, "conv"],
    "norm_eps": 1e-3,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
    "pad_token_id": 3,
}
CASES |= {
    "lfm2_moe": {
        "plain": MIXED,
        "no expert bias, others": {
            **MIXED,
            "use_expert_bias": False,
            "conv_bias": True,
            "num_dense_layers": 0,
            "layer_types": [FULL, "conv", FULL],
            "rope_parameters": YARN,
        },
        "one of many, untied": {  # with its weight alone to divide by, a router learns nothing
            **MIXED,
            "num_experts": 90,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    }
}
# What is chosen by a hair's breadth in fp32 is another in bf16: there all experts are taken
IN_BF16: dict[str, Overrides] = {
    **{m: {"num_local_experts": 6, "num_experts_per_tok": 6} for m in ("mixtral", "gpt_oss")},
    "gemma4_text": {"num_experts": 6, "top_k_experts": 6},
    **{
        name: {"num_experts": 6, "num_experts_per_tok": 6}
        for name in (
            *("lfm2_moe", "olmoe"),
            *("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next"),
        )
    },
    "llama4_text": {"num_local_experts": 5, "num_experts_per_tok": 5},
    **{
        name: {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
        for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4")
    },
}
# Families with scores that are not scaled: with queries of norm 1 attention would see one token
UNSCALED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
EVERY = [(model_type, case) for model_type, cases in CASES.items() for case in cases]
FIRST = [(model_type, next(iter(cases))) for model_type, cases in CASES.items()]


# Families of which transformers has no text class: the multimodal type, and a small rest of it
WRAPPED: dict[str, tuple[str, Overrides]] = {
    "muse_glimmer_text": (
        "muse_glimmer",
        {
            "projector_hidden_size": 24,
            "out_hidden_size": 64,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
        },
    )
}


class MuseGlimmerText(MuseGlimmerForConditionalGeneration):
    """transformers' class without its vision tower, which texts do not use."""

    def __init__(self, config: Any):
        super().__init__(config)
        for name in ("vision_tower", "vision_adapter", "vision_projection"):
            delattr(self.model, name)


MuseGlimmerText.__name__ = MuseGlimmerForConditionalGeneration.__name__  # what it saves

AutoModelForCausalLM.register(MuseGlimmerConfig, MuseGlimmerText, exist_ok=True)


def their_config(model_type: str, **values: Any) -> Any:
    """transformers' config of these values, or the multimodal one around it."""
    if model_type not in WRAPPED:
        return AutoConfig.for_model(model_type, **values)
    outer, rest = WRAPPED[model_type]
    shared = {key: values[key] for key in ("dtype", "tie_word_embeddings") if key in values}
    text = {"model_type": model_type, **values}
    return AutoConfig.for_model(outer, text_config=text, **rest, **shared)


def reference(
    model_type: str,
    overrides: Overrides,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Any:
    """transformers' model in evaluation mode, saved to the directory.

    Its norms, biases and saved buffers are random, and its matrices large enough that no error
    hides.
    """
    torch.manual_seed(0)
    config = their_config(model_type, **SIZES | overrides, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-5, 1)  # some heads remember
            elif p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.copy_(torch.randn_like(p) * 0.08)  # 4 times transformers' own, the pad row too
            if model_type in UNSCALED and name.endswith("q_norm.weight"):
                p.mul_(0.2)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).eval().save_pretrained(directory, **save)
    return model


def load_case(model_type: str, case: str, directory: Path) -> CausalLM:
    """Our model of a case, loaded from transformers' checkpoint of it."""
    reference(model_type, CASES[model_type][case], directory)
    return from_pretrained(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def on_meta(config: ModelConfig) -> CausalLM:
    """The model of a config, without weights."""
    return MODELS[config.model_type].from_config(config, dtype=torch.float32, device="meta")


def windows(config: ModelConfig) -> list[int | None]:
    """Of the attention of each layer; None where it has none, or chunks."""
    mixers = [layer.mixer for layer in on_meta(config).model.layers]
    return [None if getattr(m, "chunked", False) else getattr(m, "window", None) for m in mixers]


def load_reference(directory: Path, attention: str = "eager", dtype: Any = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention, dtype=dtype
    ).eval()


def exact(model: Any) -> Any:
    """transformers' model again in float64, RoPE's frequencies too; to be called in `float64()`."""
    weights = model.state_dict()
    with float64():
        twin = AutoModelForCausalLM.from_config(
            model.config,
            attn_implementation="eager",
            experts_implementation="eager",  # the grouped product takes no float64
            dtype=torch.float64,
        ).double()  # what transformers keeps in fp32, too
    twin.load_state_dict(weights)
    state = (*twin.parameters(), *twin.buffers())
    assert all(t.dtype == torch.float64 for t in state if t.is_floating_point())
    return twin.eval()
