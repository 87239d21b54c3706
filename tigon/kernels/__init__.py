"""Operators, one file each: the plain-torch definition (`*_ref`), then the public function."""

from tigon.kernels.attention.api import attention, attention_ref
from tigon.kernels.attention.decode import append_attention, append_attention_ref
from tigon.kernels.attention.kv_buffers import KVBuffers
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.attention.sigmoid_gate import sigmoid_gate, sigmoid_gate_ref
from tigon.kernels.delta.causal_conv import (
    causal_conv,
    causal_conv_qkv,
    causal_conv_qkv_ref,
    causal_conv_ref,
)
from tigon.kernels.delta.delta_gates import delta_gates, delta_gates_ref
from tigon.kernels.delta.gated_delta import (
    gated_delta_rule,
    gated_delta_rule_ref,
    gated_delta_step,
    gated_delta_step_ref,
)
from tigon.kernels.linear.fp8 import fp8_linear, fp8_linear_ref
from tigon.kernels.linear.linear import gemv, gemv_ref
from tigon.kernels.linear.lora import lora_linear, lora_linear_ref
from tigon.kernels.loss.api import (
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_kl,
    linear_kl_ref,
    selected_logprobs,
    selected_logprobs_ref,
)
from tigon.kernels.loss.argmax import argmax, argmax_ref
from tigon.kernels.loss.cross_entropy_rows import cross_entropy_ref
from tigon.kernels.loss.divergence_rows import kl_ref
from tigon.kernels.loss.fused_linear import HeadValue, run_loss_terms
from tigon.kernels.loss.terms import KL, CrossEntropy, Head, LogProbs
from tigon.kernels.loss.vocab_parallel import VocabularyShard, embedding_rows, embedding_rows_ref
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.kernels.mlp.gated_act import gated_act, gated_act_ref
from tigon.kernels.mlp.grouped_mlp import grouped_mlp, grouped_mlp_ref
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases
from tigon.kernels.mlp.softmax_topk import softmax_topk, softmax_topk_ref
from tigon.kernels.norm.rms_norm import rms_norm, rms_norm_ref, sandwich_norm, sandwich_norm_ref
from tigon.kernels.norm.rms_norm_add import rms_norm_add, rms_norm_add_ref
from tigon.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_ref
from tigon.kernels.rope.rope import rope, rope_ref
from tigon.kernels.runtime import checks, use

__all__ = [
    "KL", "AttentionMask", "ClampedSwiGLU", "CrossEntropy", "ExpertBiases", "Head", "HeadValue",
    "KVBuffers", "LogProbs", "VocabularyShard", "append_attention", "append_attention_ref",
    "argmax", "argmax_ref", "attention", "attention_ref", "causal_conv", "causal_conv_qkv",
    "causal_conv_qkv_ref", "causal_conv_ref", "checks", "cross_entropy", "cross_entropy_ref",
    "delta_gates", "delta_gates_ref", "embedding_rows", "embedding_rows_ref",
    "fp8_linear", "fp8_linear_ref", "gated_act", "gated_act_ref", "gated_delta_rule",
    "gated_delta_rule_ref", "gated_delta_step", "gated_delta_step_ref", "gemv", "gemv_ref",
    "grouped_mlp", "grouped_mlp_ref", "kl_ref", "linear_cross_entropy", "linear_cross_entropy_ref",
    "linear_kl", "linear_kl_ref", "lora_linear", "lora_linear_ref", "qk_norm_rope",
    "qk_norm_rope_ref", "rms_norm", "rms_norm_add", "rms_norm_add_ref", "rms_norm_ref", "rope",
    "rope_ref", "run_loss_terms", "sandwich_norm", "sandwich_norm_ref", "selected_logprobs",
    "selected_logprobs_ref", "sigmoid_gate", "sigmoid_gate_ref", "softmax_topk", "softmax_topk_ref",
    "use",
]  # fmt: skip
