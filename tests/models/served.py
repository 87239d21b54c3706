"""What vLLM 0.33.0 and SGLang 0.5.23 read of a checkpoint, by the source of their loaders.

Written down from vllm/model_executor/models and sglang/srt/models: of the class that an
architecture is loaded by, which docs/serve_elsewhere.md has, the fields of config.json that it
reads without a default, and the names and shapes of the tensors that it takes.

# V tokens, C hidden size, H heads, K heads of keys and values, D a head's size, I MLP's size,
# M an expert's size, E experts, S a shared expert's size, Q and L ranks of latent queries and keys,
# N, R and U sizes of a latent head: without rotation, with it, and of values; A a token's size for
# each layer
"""

from typing import NamedTuple

# Fields of config.json that one of the classes reads without a default
EVERY = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
    max_position_embeddings tie_word_embeddings rope_parameters pad_token_id"""
MOST = "intermediate_size hidden_act rms_norm_eps"  # but where a family has its own
GEMMA = "attention_bias head_dim hidden_activation layer_types query_pre_attn_scalar sliding_window"
GROUPS = """first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group"""
LATENT = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
DELTA = """layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim head_dim"""
QWEN_MOE = "moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok"
FIELDS = {
    "deepseek_v3": f"{GROUPS} {LATENT} moe_layer_freq rope_theta scoring_func topk_method",
    "exaone4": "layer_types sliding_window",
    "gemma": "head_dim",
    "gemma2": f"{GEMMA} attn_logit_softcapping final_logit_softcapping",
    "gemma3_text": f"{GEMMA} final_logit_softcapping rope_local_base_freq",
    "gemma3n_text": """activation_sparsity_pattern altup_active_idx altup_coef_clip
        altup_correct_scale altup_num_inputs attention_bias final_logit_softcapping head_dim
        hidden_activation hidden_size_per_layer_input laurel_rank layer_types num_kv_shared_layers
        sliding_window vocab_size_per_layer_input""",
    "gemma4_text": """attention_bias head_dim hidden_activation layer_types moe_intermediate_size
        sliding_window top_k_experts""",
    "glm4_moe": f"{GROUPS} attention_bias use_qk_norm head_dim",
    "glm4_moe_lite": f"{GROUPS} {LATENT}",
    "gpt_oss": """attention_bias layer_types num_experts_per_tok num_local_experts sliding_window
        swiglu_limit head_dim""",
    "granite": "attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
    "granite_swa": """attention_multiplier embedding_multiplier layer_rope_theta layer_types
        residual_multiplier logits_scaling sliding_window""",
    "lfm2": """block_auto_adjust_ff_dim block_dim block_ffn_dim_multiplier block_multiple_of
        conv_L_cache conv_bias conv_dim intermediate_size layer_types norm_eps""",
    "lfm2_moe": f"""{QWEN_MOE} conv_L_cache conv_bias intermediate_size layer_types norm_eps
        num_dense_layers routed_scaling_factor use_expert_bias""",
    "llama4_text": """attention_chunk_size attn_scale attn_temperature_tuning floor_scale head_dim
        interleave_moe_layer_step intermediate_size_mlp no_rope_layers num_experts_per_tok
        num_local_experts use_qk_norm""",
    "ministral3": "head_dim",
    "mistral": "head_dim",
    "mixtral": "num_experts_per_tok num_local_experts",
    "muse_glimmer_text": """final_logit_softcapping head_dim hidden_activation layer_rope_theta
        layer_types output_multiplier post_norm_eps qk_scale_factor sliding_window""",
    "olmo2": "attention_bias",
    "olmoe": "num_experts num_experts_per_tok",
    "qwen2": "max_window_layers",
    "qwen2_moe": f"{QWEN_MOE} decoder_sparse_step shared_expert_intermediate_size",
    "qwen3": "attention_bias head_dim",
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": f"{DELTA} moe_intermediate_size num_experts num_experts_per_tok",
    "qwen3_moe": f"{QWEN_MOE} attention_bias decoder_sparse_step head_dim",
    "qwen3_next": f"""{DELTA} {QWEN_MOE} full_attention_interval partial_rotary_factor
        shared_expert_intermediate_size""",
}
# In place of MOST
OTHERS = {
    "gemma2": "intermediate_size rms_norm_eps",
    "gemma3_text": "intermediate_size rms_norm_eps",
    "gemma3n_text": "intermediate_size rms_norm_eps",
    "gemma4_text": "intermediate_size rms_norm_eps",
    "lfm2": "",
    "lfm2_moe": "",
    "muse_glimmer_text": "intermediate_size rms_norm_eps",
}


def fields(model_type: str) -> set[str]:
    """Those that config.json of a family must have."""
    own = f"{OTHERS.get(model_type, MOST)} {FIELDS.get(model_type, '')}"
    return {*EVERY.split(), *own.split()}


# Tensors, with numbers of layers and experts as {}; shapes as products of sizes, "?" where layers
# or families differ


class Tensors(NamedTuple):
    """Names of tensors in a layer, and of those around the layers, with their shapes."""

    layer: dict[str, str]
    around: dict[str, str]


PLAIN = {
    "self_attn.q_proj.weight": "H*D C",
    "self_attn.k_proj.weight": "K*D C",
    "self_attn.v_proj.weight": "K*D C",
    "self_attn.q_proj.bias": "H*D",
    "self_attn.k_proj.bias": "K*D",
    "self_attn.v_proj.bias": "K*D",
    "self_attn.o_proj.weight": "C H*D",
    "self_attn.q_norm.weight": "?",  # D, or in OLMo's families all heads
    "self_attn.k_norm.weight": "?",
    "mlp.gate_proj.weight": "I C",
    "mlp.up_proj.weight": "I C",
    "mlp.down_proj.weight": "C I",
    "input_layernorm.weight": "C",
    "post_attention_layernorm.weight": "C",
}
SANDWICH = {"pre_feedforward_layernorm.weight": "C", "post_feedforward_layernorm.weight": "C"}
EXPERTS = {
    "mlp.gate.weight": "E C",
    "mlp.experts.{}.gate_proj.weight": "M C",
    "mlp.experts.{}.up_proj.weight": "M C",
    "mlp.experts.{}.down_proj.weight": "C M",
}
SHARED = {
    "mlp.shared_expert.gate_proj.weight": "S C",
    "mlp.shared_expert.up_proj.weight": "S C",
    "mlp.shared_expert.down_proj.weight": "C S",
    "mlp.shared_expert_gate.weight": "1 C",
}
SEVERAL_SHARED = {
    "mlp.gate.e_score_correction_bias": "E",
    "mlp.shared_experts.gate_proj.weight": "M*S C",
    "mlp.shared_experts.up_proj.weight": "M*S C",
    "mlp.shared_experts.down_proj.weight": "C M*S",
}
LATENTS = {
    "self_attn.q_a_proj.weight": "Q C",
    "self_attn.q_a_layernorm.weight": "Q",
    "self_attn.q_b_proj.weight": "H*(N+R) Q",
    "self_attn.q_proj.weight": "H*(N+R) C",
    "self_attn.kv_a_proj_with_mqa.weight": "L+R C",
    "self_attn.kv_a_layernorm.weight": "L",
    "self_attn.kv_b_proj.weight": "H*(N+U) L",
    "self_attn.o_proj.weight": "C H*U",
}
RECURRENT = {
    "linear_attn.A_log": "?",
    "linear_attn.dt_bias": "?",
    "linear_attn.conv1d.weight": "?",
    "linear_attn.norm.weight": "?",
    "linear_attn.out_proj.weight": "?",
    "self_attn.q_proj.weight": "2*H*D C",  # with its gate
    "self_attn.q_proj.bias": "2*H*D",
}
APART = dict.fromkeys(
    (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "a", "b")), "?"
)
TOGETHER = dict.fromkeys((f"linear_attn.in_proj_{name}.weight" for name in ("qkvz", "ba")), "?")
AROUND = {"model.embed_tokens.weight": "V C", "model.norm.weight": "C", "lm_head.weight": "V C"}
FUSED = {"mlp.gate_up_proj.weight": "2*I C"}
PACKED = {"self_attn.qkv_proj.weight": "(H+2*K)*D C", **FUSED}
INPUTS = {
    "per_layer_input_gate.weight": "A C",
    "per_layer_projection.weight": "C A",
    "post_per_layer_input_norm.weight": "C",
}
INPUTS_AROUND = {
    "model.embed_tokens_per_layer.weight": "?",
    "model.per_layer_model_projection.weight": "?",
    "model.per_layer_projection_norm.weight": "A",
}
SIZES_PER_LAYER = dict.fromkeys((n for n in PLAIN if "self_attn" in n or "mlp" in n), "?")
MIXTRAL = {"block_sparse_moe.gate.weight": "E C"}
MIXTRAL |= {
    f"block_sparse_moe.experts.{{}}.{n}.weight": s
    for n, s in zip(("w1", "w2", "w3"), ("I C", "C I", "I C"), strict=True)
}
ALTUP = """altup.correct_output_scale altup.correction_coefs.weight altup.modality_router.weight
    altup.prediction_coefs.weight altup.router_norm.weight laurel.linear_left.weight
    laurel.linear_right.weight laurel.post_laurel_norm.weight"""
ALTUP_AROUND = ("model.altup_projections.{}.weight", "model.altup_unembed_projections.{}.weight")
GPT_OSS = {
    "self_attn.sinks": "H",
    "self_attn.o_proj.bias": "C",
    "mlp.router.weight": "E C",
    "mlp.router.bias": "E",
    "mlp.experts.gate_up_proj": "E C 2*I",
    "mlp.experts.gate_up_proj_bias": "E 2*I",
    "mlp.experts.down_proj": "E I C",
    "mlp.experts.down_proj_bias": "E C",
}
LLAMA4 = {
    "feed_forward.router.weight": "E C",
    "feed_forward.experts.gate_up_proj": "E C 2*I",
    "feed_forward.experts.down_proj": "E I C",
    **dict.fromkeys((f"feed_forward.{n}_proj.weight" for n in ("gate", "up", "down")), "?"),
    "feed_forward.shared_expert.gate_proj.weight": "I C",
    "feed_forward.shared_expert.up_proj.weight": "I C",
    "feed_forward.shared_expert.down_proj.weight": "C I",
}
LFM2 = {
    "conv.conv.weight": "?",
    "conv.in_proj.weight": "3*C C",
    "conv.out_proj.weight": "C C",
    "feed_forward.w1.weight": "?",
    "feed_forward.w2.weight": "?",
    "feed_forward.w3.weight": "?",
    "ffn_norm.weight": "C",
    "operator_norm.weight": "C",
    "self_attn.out_proj.weight": "C H*D",
    "self_attn.q_layernorm.weight": "D",
    "self_attn.k_layernorm.weight": "D",
}
LFM2_MOE = {
    "feed_forward.gate.weight": "E C",
    "feed_forward.expert_bias": "E",
    "feed_forward.experts.{}.w1.weight": "M C",
    "feed_forward.experts.{}.w2.weight": "C M",
    "feed_forward.experts.{}.w3.weight": "M C",
}
GEMMA4 = {
    "layer_scalar": "1",
    "router.proj.weight": "E C",
    "router.scale": "C",
    "router.per_expert_scale": "E",
    "experts.gate_up_proj": "E 2*M C",
    "experts.down_proj": "E C M",
    "pre_feedforward_layernorm_2.weight": "C",
    "post_feedforward_layernorm_1.weight": "C",
    "post_feedforward_layernorm_2.weight": "C",
}
# Families of which an engine reads biases of attention's output, and of the MLP, too; a checkpoint
# of another family that has some is refused
MLP_BIASES = "exaone4 granite granite_swa hunyuan_v1_dense llama olmo3 seed_oss smollm3"
OUTPUT_BIASES = f"gemma2 gemma3_text gemma3n_text gemma4_text olmo2 qwen3 qwen3_moe {MLP_BIASES}"
CONVOLUTION_BIASES = ("conv.conv.bias", "conv.in_proj.bias", "conv.out_proj.bias")
# Beside PLAIN and AROUND
LAYERS: dict[str, dict[str, str]] = {
    "deepseek_v3": LATENTS | EXPERTS | SEVERAL_SHARED,
    "exaone4": SANDWICH,
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "gemma3n_text": SANDWICH | INPUTS | SIZES_PER_LAYER | dict.fromkeys(ALTUP.split(), "?"),
    "gemma4_text": SANDWICH | INPUTS | SIZES_PER_LAYER | GEMMA4,
    "glm4": FUSED | {"post_self_attn_layernorm.weight": "C", "post_mlp_layernorm.weight": "C"},
    "glm4_moe": EXPERTS | SEVERAL_SHARED,
    "glm4_moe_lite": LATENTS | EXPERTS | SEVERAL_SHARED,
    "gpt_oss": GPT_OSS,
    "granite_swa": {"self_attn.sinks": "H"},
    "hunyuan_v1_dense": {
        "self_attn.query_layernorm.weight": "D",
        "self_attn.key_layernorm.weight": "D",
    },
    "lfm2": LFM2,
    "lfm2_moe": LFM2 | LFM2_MOE,
    "llama4_text": LLAMA4,
    "mixtral": MIXTRAL,
    "muse_glimmer_text": SANDWICH | {"self_attn.gate_proj.weight": "H*D C"},
    "olmo2": SANDWICH,
    "olmo3": SANDWICH,
    "olmoe": EXPERTS | {name: shape.replace("M", "I") for name, shape in EXPERTS.items()},
    "phi3": PACKED,
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3_5_text": RECURRENT | APART,
    "qwen3_5_moe_text": RECURRENT | APART | EXPERTS | SHARED,
    "qwen3_moe": EXPERTS,
    "qwen3_next": RECURRENT | TOGETHER | EXPERTS | SHARED,
}
MORE_AROUND = {
    "gemma3n_text": INPUTS_AROUND | dict.fromkeys(ALTUP_AROUND, "C C"),
    "gemma4_text": INPUTS_AROUND,
    "lfm2": {"model.embedding_norm.weight": "C"},
    "lfm2_moe": {"model.embedding_norm.weight": "C"},
}


def tensors(model_type: str) -> Tensors:
    """Those that the loaders take of a family."""
    layer = PLAIN | LAYERS.get(model_type, {})
    if model_type in OUTPUT_BIASES.split():
        layer |= {"self_attn.o_proj.bias": "C"}
    if model_type in MLP_BIASES.split():
        layer |= dict.fromkeys((f"mlp.{n}_proj.bias" for n in ("gate", "up", "down")), "?")
    layer |= dict.fromkeys(CONVOLUTION_BIASES, "?") if "lfm2" in model_type else {}
    return Tensors(layer, AROUND | MORE_AROUND.get(model_type, {}))
