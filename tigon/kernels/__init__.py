"""Operators, one file each: the plain-torch definition (`*_ref`), then the public function."""

from tigon.kernels._check import checks
from tigon.kernels._run_criteria import HeadValue, run_criteria
from tigon.kernels._triton import use
from tigon.kernels._vocabulary import VocabularyShard
from tigon.kernels.append_attention import append_attention, append_attention_ref
from tigon.kernels.attention import AttentionMask, attention, attention_ref
from tigon.kernels.criteria import KL, CrossEntropy, Head, LogProbs
from tigon.kernels.cross_entropy import cross_entropy, cross_entropy_ref, divergence, kl_ref
from tigon.kernels.embedding_rows import embedding_rows, embedding_rows_ref
from tigon.kernels.fp8_linear import fp8_linear, fp8_linear_ref
from tigon.kernels.gated_act import gated_act, gated_act_ref
from tigon.kernels.grouped_mlp import grouped_mlp, grouped_mlp_ref
from tigon.kernels.kv_buffers import KVBuffers
from tigon.kernels.likeliest import likeliest, likeliest_ref
from tigon.kernels.linear_criteria import (
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_kl,
    linear_kl_ref,
    selected_logprobs,
    selected_logprobs_ref,
)
from tigon.kernels.lora_linear import lora_linear, lora_linear_ref
from tigon.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_ref
from tigon.kernels.rms_norm import rms_norm, rms_norm_ref
from tigon.kernels.rope import rope, rope_ref
from tigon.kernels.row_linear import row_linear, row_linear_ref
from tigon.kernels.sandwich_norm import sandwich_norm, sandwich_norm_ref

__all__ = [
    "KL",
    "AttentionMask",
    "CrossEntropy",
    "Head",
    "HeadValue",
    "KVBuffers",
    "LogProbs",
    "VocabularyShard",
    "append_attention",
    "append_attention_ref",
    "attention",
    "attention_ref",
    "checks",
    "cross_entropy",
    "cross_entropy_ref",
    "divergence",
    "embedding_rows",
    "embedding_rows_ref",
    "fp8_linear",
    "fp8_linear_ref",
    "gated_act",
    "gated_act_ref",
    "grouped_mlp",
    "grouped_mlp_ref",
    "kl_ref",
    "likeliest",
    "likeliest_ref",
    "linear_cross_entropy",
    "linear_cross_entropy_ref",
    "linear_kl",
    "linear_kl_ref",
    "lora_linear",
    "lora_linear_ref",
    "qk_norm_rope",
    "qk_norm_rope_ref",
    "rms_norm",
    "rms_norm_ref",
    "rope",
    "rope_ref",
    "row_linear",
    "row_linear_ref",
    "run_criteria",
    "sandwich_norm",
    "sandwich_norm_ref",
    "selected_logprobs",
    "selected_logprobs_ref",
    "use",
]
