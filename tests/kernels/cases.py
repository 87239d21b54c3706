"""Operators with their definitions, and what their inputs are: `test_operators*.py` check each.

Most rows are made by functions of `layer_cases.py`, `expert_cases.py` and `loss_cases.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels import definitions as exact
from tests.kernels.expert_cases import (
    CLAMPED,
    EXPERTS,
    biased_case,
    experts_case,
    lora_case,
    lora_experts_case,
    lora_transposed_case,
    topk_case,
)
from tests.kernels.layer_cases import (
    GEMMA,
    NO_ROWS,
    PACKED,
    REAL_ROWS,
    RECURRENT,
    ROWS,
    act_case,
    added_case,
    conv_case,
    norm_case,
    packed_case,
    packed_recurrent,
    qkv_case,
    recurrent,
    recurrent_case,
    rope_case,
    rows,
    sandwich_case,
)
from tests.kernels.loss_cases import (
    BETAS,
    BOTH,
    CAPPED,
    LOSSES,
    SMALL,
    every_row,
    in_chunks,
    kl_case,
    logits_case,
    logprobs_case,
    loss_case,
)
from tests.kernels.op_case import Call, Inputs, OpCase
from tigon.kernels import (
    AttentionMask,
    KVBuffers,
    append_attention,
    attention,
    delta_gates,
    fp8_linear,
    fp8_linear_ref,
    gated_act_ref,
    gemv,
    sigmoid_gate,
    sigmoid_gate_ref,
)
from tigon.kernels.linear.fp8_mlp import fp8_mlp
from tigon.kernels.loss.logits import Options
from tigon.kernels.norm.rms_norm import MAX_COLUMNS, MAX_SANDWICH_COLUMNS

# Operators whose numbers have files of their own


def factors(n: int, c: int, k: int) -> Inputs:
    return {"x": torch.randn(n, c), "weight": torch.randn(k, c)}


def mlp_factors(n: int, c: int, k: int) -> Inputs:
    return factors(n, c, 2 * k) | {"down": torch.randn(c, k) / k}


def whole_mlp(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    return fp8_mlp(x, weight, "silu", down)


def mlp_in_steps(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    return fp8_linear_ref(gated_act_ref(fp8_linear_ref(x, weight), "silu"), down)


def fp8_case(operator: Call, definition: Call, inputs: Call, *parameters: str) -> OpCase:
    return OpCase(
        operator, definition, inputs, sizes=[(3, 48, 32)], empty=[(0, 48, 32)],
        parameters=("weight", *parameters), dtype=torch.bfloat16, second="fp8_\\w+",
    )  # fmt: skip


def one_row(x: Tensor, weight: Tensor) -> Tensor:
    return gemv(x, weight).detach()


def append(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Any:
    with torch.no_grad():
        return append_attention(q, k, v, KVBuffers(keys, values), lengths)


def tokens(b: int, t: int, h: int, k: int, d: int, slots: int = 0) -> Inputs:
    made = {name: torch.randn(b, t, n, d) for name, n in (("q", h), ("k", k), ("v", k))}
    cache = {name: torch.randn(b, k, slots, d) for name in ("keys", "values")}
    return made | ({**cache, "lengths": torch.zeros(b, dtype=torch.int64)} if slots else {})


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=AttentionMask(q.shape[1]))


FP8 = {
    "fp8_linear": fp8_case(fp8_linear, fp8_linear_ref, factors),
    "fp8_mlp": fp8_case(whole_mlp, mlp_in_steps, mlp_factors, "down"),
}
SHAPES = {  # of these nothing but shapes is asked in test_operators_traced.py
    "fp8_linear": FP8["fp8_linear"],
    "gemv": OpCase(one_row, one_row, factors, sizes=[(1, 8, 4)]),
    "append_attention": OpCase(append, append, tokens, sizes=[(2, 1, 4, 2, 8, 9)]),
    "attention": OpCase(causal, causal, tokens, sizes=[(2, 3, 4, 2, 8)]),
}
FEW = {"sizes": ROWS[:1]}
# For the kernels, which leave them to torch
TOO_WIDE, TOO_WIDE_SANDWICH = [((2, n + 1),) for n in (MAX_COLUMNS, MAX_SANDWICH_COLUMNS)]
ONLY: Inputs = {"real": (), "empty": ()}
CASES: dict[str, OpCase] = {
    "rms_norm": norm_case("x", "weight"),
    "rms_norm, Gemma": norm_case("x", "weight", options=GEMMA),
    "rms_norm, no weight": norm_case("x", **FEW),
    "rms_norm, residual": norm_case("x", "weight", "residual"),
    "rms_norm, too wide": norm_case("x", "weight", sizes=[TOO_WIDE], **ONLY),
    "sandwich_norm, too wide": replace(sandwich_case(), sizes=[TOO_WIDE_SANDWICH], **ONLY),
    "rms_norm, gate": norm_case("x", "weight", "gate", **FEW),
    "rms_norm, gate, no weight": norm_case("x", "gate", **FEW),
    "rms_norm, gate, residual": norm_case("x", "weight", "residual", "gate", **FEW),
    "sandwich_norm": sandwich_case(),
    "sandwich_norm, before": sandwich_case(offset=0.0, cast="before_weight"),
    "sandwich_norm, two eps": sandwich_case(post_eps=1.0),
    "rms_norm_add": added_case(),
    "rms_norm_add, Gemma": added_case(**GEMMA),
    "rms_norm_add, too wide": replace(added_case(), sizes=[TOO_WIDE], **ONLY),
    "rope": rope_case(),
    "rope, interleaved": rope_case(interleaved=True),
    "qk_norm_rope": packed_case(True),
    "qk_norm_rope, Gemma": packed_case(True, **GEMMA),
    "qk_norm_rope, interleaved": packed_case(True, interleaved=True, offset=0.5),
    "qk_norm_rope, no norm": packed_case(False),
    "qk_norm_rope, no norm, interleaved": packed_case(False, interleaved=True),
    **{f"gated_act, {act}": act_case(act) for act in ("silu", "gelu", "gelu_tanh")},
    "sigmoid_gate": OpCase(
        sigmoid_gate,
        exact.sigmoid_gate,
        rows("x", "gate", weights=()),
        sigmoid_gate_ref,
        sizes=ROWS,
        real=REAL_ROWS,
        empty=NO_ROWS,
        second="sigmoid_gate",
        factor=1.1,
    ),
    "causal_conv": conv_case("starts", "state"),
    "causal_conv, packed": conv_case(),
    "causal_conv, silu": conv_case("starts", options={"activation": "silu"}),
    "causal_conv, five taps": replace(conv_case(), sizes=[(2, 9, 12, 5)], **ONLY),
    "causal_conv_qkv": qkv_case("starts", "state"),
    "causal_conv_qkv, packed": qkv_case(),
    "gated_act, overwrite": act_case("silu", overwrite=True),  # nothing is written over a leaf
    "grouped_mlp, silu": experts_case("silu", EXPERTS),
    **{f"grouped_mlp, {act}": experts_case(act) for act in ("gelu", "gelu_tanh")},
    # 600 tokens of 3 heads and 70 of 40 are several programs
    "delta_gates": OpCase(
        delta_gates,
        exact.delta_gates,
        rows("a", "b", weights=("A_log", "dt_bias")),
        sizes=[((2, 5, 4),), ((600, 3),), ((2, 35, 40),), ((1, 1),)],
        empty=[((2, 0, 4),)],
        whole=("A_log", "dt_bias"),
        second="delta_gates",
    ),
    "gated_delta_rule": recurrent_case(
        recurrent, RECURRENT, [(2, 0, 1, 2, 8, 8), (0, 3, 1, 2, 8, 8)]
    ),
    "gated_delta_rule, packed": recurrent_case(packed_recurrent, PACKED, [((0, 0), 1, 2, 8, 8)]),
    "softmax_topk": topk_case(False),
    "softmax_topk, normalize": topk_case(True),
    "grouped_mlp, biases": biased_case("gelu", False),
    "grouped_mlp, gpt-oss": biased_case(CLAMPED, True, EXPERTS),
    "lora_linear": lora_case("weight", "bias"),
    "lora_linear, base learns": lora_case("bias"),
    **{
        f"lora_linear, {layout}": lora_case("weight", "bias", layout=layout)
        for layout in ("one", "all", "inside")
    },
    "lora_grouped_mlp": lora_experts_case(),
    "lora_grouped_mlp, transposed": lora_transposed_case(),
    "lora_grouped_mlp, frozen base": lora_experts_case("gate_up", "down"),
    **{f"cross_entropy, {name}": logits_case(name, "none") for name in LOSSES},
    "cross_entropy, sum": logits_case("all", "sum"),
    **{f"linear_cross_entropy, {name}": loss_case(name, "none") for name in LOSSES},
    **{f"linear_cross_entropy, {name}, sum": loss_case(name, "sum") for name in LOSSES},
    "linear_cross_entropy, every row": replace(loss_case("all", "sum"), inputs=every_row),
    **{f"linear_cross_entropy, {r}, chunks": in_chunks(loss_case("all", r)) for r in BOTH},
    **{f"linear_kl, {beta}, {r}": kl_case(beta, r) for beta in BETAS for r in BOTH},
    "linear_kl, chunks": in_chunks(kl_case(0.3)),
    "linear_kl, temperature": kl_case(0.3, "none", temperature=2.5),
    "linear_kl, capped": kl_case(0.0, **CAPPED),
    "linear_kl, capped, reverse, chunks": kl_case(1.0, **CAPPED, logits_bytes=SMALL),
    "selected_logprobs": logprobs_case(Options()),
    "selected_logprobs, chunks": logprobs_case(Options(logit_scale=2.0), logits_bytes=3000),
    "selected_logprobs, capped": logprobs_case(Options(softcap=3.0)),
}
# One of each operator, and those whose kernels have other branches
KINDS = (
    "rms_norm, gate, residual", "sandwich_norm", "rms_norm_add", "rope", "qk_norm_rope",
    "gated_act, silu", "grouped_mlp, silu", "lora_linear", "lora_grouped_mlp, frozen base",
    "cross_entropy, sum",
    "sigmoid_gate", "delta_gates", "causal_conv, silu", "causal_conv_qkv, packed",
    "linear_cross_entropy, all, sum", "linear_kl, 0.3, sum", "selected_logprobs",
    "gated_delta_rule", "softmax_topk, normalize",
)  # fmt: skip
MORE_KINDS = (
    "causal_conv, packed",
    "rms_norm", "rms_norm, residual", "qk_norm_rope, no norm", "lora_grouped_mlp",
    "grouped_mlp, gpt-oss",
    "cross_entropy, all", "linear_cross_entropy, all", "linear_cross_entropy, every row",
    "linear_kl, 0.0, none",
)  # fmt: skip
