"""Tiny configs of families with experts, recurrences, convolutions, latents or a RoPE by layer."""

from tests.models.dense_cases import DEFAULT, FULL, LLAMA3, SLIDING, WINDOW, YARN, Overrides

# No token chooses some of the experts where there are many
EXPERTS: Overrides = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MANY: Overrides = {**EXPERTS, "num_experts": 90, "num_experts_per_tok": 1}
SHARED: Overrides = {**EXPERTS, "shared_expert_intermediate_size": 56}
SPARSE: dict[str, dict[str, Overrides]] = {
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
SPARSE |= {
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
SPARSE |= {
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
SPARSE |= {
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
SPARSE |= {
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
SPARSE |= {
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
# Chunks shorter than texts, queries that grow early, and a layer without experts
CHUNKS: Overrides = {"attention_chunk_size": 7, "floor_scale": 3, "attn_scale": 0.4}
CHUNKS |= {"num_local_experts": 5, "intermediate_size_mlp": 72, "intermediate_size": 40}
SPARSE |= {
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
SPARSE |= {
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
SPARSE |= {
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
