"""Arguments that do not fit together: the error names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.kernels.cases import CASES
from tests.kernels.conftest import CUDA
from tigon.kernels import (
    KL,
    AttentionMask,
    CrossEntropy,
    KVBuffers,
    LogProbs,
    append_attention,
    attention,
    fp8_linear,
    gated_delta_rule,
    gated_delta_step,
    gemv,
    run_loss_terms,
)
from tigon.kernels.attention.kv_buffers import append_tokens
from tigon.kernels.linear.dropout import Dropout
from tigon.kernels.linear.fp8_mlp import fp8_mlp
from tigon.kernels.loss.logits import Options
from tigon.kernels.loss.vocab_parallel import VocabularyShard, gather_logits

Given = dict[str, Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str | None = None) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def buffers(*scales: Tensor, dtype: torch.dtype = torch.float32) -> KVBuffers:
    return KVBuffers(*torch.zeros(2, 2, 2, 8, 16, dtype=dtype), *scales)


def at_positions(k: Tensor, v: Tensor) -> None:
    append_tokens(k, v, buffers(), zeros(3), zeros(3), zeros(3))


def masked(q: Tensor, k: Tensor, v: Tensor, past: int = 0, **options: Any) -> Tensor:
    return attention(q, k, v, mask=AttentionMask(3, past=past), **options)


def one_term(term: Callable[[], Any], weight: Tensor | None, **options: Any) -> Any:
    return run_loss_terms(ones(3, 4), weight, None, [term()], **options)


def smoothed() -> CrossEntropy:
    return CrossEntropy(targets=zeros(3), label_smoothing=1.5)


def stored() -> KL:
    return KL(teacher_tokens=zeros(4, 2), teacher_logprobs=ones(4, 2))


def logprobs() -> LogProbs:
    return LogProbs(targets=zeros(3))


def outside() -> LogProbs:
    return LogProbs(targets=zeros(3) + 131)


def drop(keys: Tensor) -> None:
    Dropout(keys, 1, 0.5).check(ones(3, 5, 8))


HALF, BF16, META, INT8 = torch.float16, torch.bfloat16, "meta", torch.int8
SHARD = VocabularyShard("none", ranks=2, first=66, rows=65, size=131)
WHOLE_MLP = {"x": ones(3, 32, dtype=BF16), "up": ones(96, 32, dtype=BF16), "act": "silu"} | {
    "down": ones(32, 48, dtype=BF16)
}
ONE_ROW = {"q": ones(1, 3, 2, 8), "k": ones(1, 3, 2, 8), "v": ones(1, 3, 4, 8)} | {
    name: -ones(1, 3, 4) for name in ("g", "beta")
}
BASES: dict[str, tuple[Callable[..., Any], Given]] = {
    "append_attention": (
        append_attention,
        {n: ones(2, 1, h, 16) for n, h in (("q", 6), ("k", 2), ("v", 2))}
        | {"buffers": buffers(), "lengths": zeros(2).int()},
    ),
    "append_tokens": (at_positions, {"k": ones(3, 2, 16), "v": ones(3, 2, 16)}),
    "attention": (masked, {name: ones(1, 3, 2, 4) for name in "qkv"}),
    "dropout": (drop, {}),
    "fp8_linear": (fp8_linear, {"x": ones(4, 32, dtype=BF16), "weight": ones(16, 32, dtype=BF16)}),
    "fp8_mlp": (fp8_mlp, WHOLE_MLP),
    "gated_delta_rule": (gated_delta_rule, ONE_ROW),
    "gated_delta_step": (gated_delta_step, ONE_ROW | {"state": ones(1, 4, 8, 8)}),
    "gemv": (gemv, {"x": ones(1, 1, 64), "weight": ones(8, 64)}),
    "join": (gather_logits, {"shard": SHARD}),
    "terms": (one_term, {"weight": ones(9, 4)}),
}
# The first of an operator's cases
OPERATORS = {
    "causal_conv": "causal_conv, packed",
    "causal_conv_qkv": "causal_conv_qkv, packed",
    "cross_entropy": "cross_entropy, plain",
    "delta_gates": "delta_gates",
    "gated_act": "gated_act, silu",
    "grouped_mlp": "grouped_mlp, silu",
    "grouped_mlp, biases": "grouped_mlp, gpt-oss",
    "linear_cross_entropy": "linear_cross_entropy, plain",
    "linear_kl": "linear_kl, 0.3, sum",
    "qk_norm_rope": "qk_norm_rope",
    "rms_norm": "rms_norm, gate, residual",
    "rms_norm_add": "rms_norm_add",
    "rope": "rope",
    "sandwich_norm": "sandwich_norm",
    "selected_logprobs": "selected_logprobs",
    "sigmoid_gate": "sigmoid_gate",
    "softmax_topk": "softmax_topk",
}
NORMS: list[tuple[Given, str]] = [
    ({"weight": ones(7)}, "weight (7,) does not fit x (2, 5, 33)"),
    ({"residual": ones(33)}, "residual (33,) does not fit x (2, 5, 33)"),
    ({"cast": "never"}, "cast='never'"),
    ({"eps": -1.0}, "eps=-1.0"),
    ({"weight": ones(33, device=META)}, "weight is on meta"),
]
ANGLES = "[B or 1, T, R/2]"
ROWS: list[tuple[str, Given, str]] = [
    *((name, *row) for name in ("rms_norm", "sandwich_norm", "rms_norm_add") for row in NORMS),
    ("rms_norm", {"gate": ones(1, 33)}, "gate (1, 33) does not fit"),
    ("sandwich_norm", {"post_weight": ones(7)}, "post_weight (7,) does not fit"),
    ("sandwich_norm", {"post_eps": -1.0}, "eps=-1.0"),
    ("rope", {"cos": ones(1, 3, 8)}, "rotates 16 dims, but heads have 14"),
    *(("rope", {"cos": ones(*s)}, ANGLES) for s in ((1, 2, 7), (3, 3, 7), (3, 7))),
    ("rope", {"sin": ones(1, 3, 6)}, "sin (1, 3, 6)"),
    *(
        ("rope", {"k": ones(*shape)}, "the same B, T and D")
        for shape in ((2, 3, 3, 16), (2, 2, 3, 14), (3, 3, 14))
    ),
    ("rope", {"cos": ones(1, 3, 7, device=META)}, "cos is on meta"),
    ("qk_norm_rope", {"qkv": ones(2, 3, 167)}, "qkv (2, 3, 167)"),
    ("qk_norm_rope", {"qkv": ones(3, 168)}, "qkv (3, 168)"),
    ("qk_norm_rope", {"k_weight": ones(13)}, "k_weight (13,) does not fit heads of 14"),
    ("qk_norm_rope", {"k_weight": None}, "give q_weight and k_weight, or neither"),
    ("qk_norm_rope", {"cos": ones(1, 3, 8)}, "rotates 16 dims, but heads have 14"),
    ("qk_norm_rope", {"cos": ones(1, 4, 7)}, ANGLES),
    ("qk_norm_rope", {"cast": "never"}, "cast='never'"),
    ("qk_norm_rope", {"eps": -1.0}, "eps=-1.0"),
    ("qk_norm_rope", {"q_weight": ones(14, device=META)}, "q_weight is on meta"),
    ("gated_act", {"act": "relu"}, "act='relu'"),
    ("gated_act", {"gate_up": ones(2, 5)}, "gate_up (2, 5) has no two halves"),
    ("delta_gates", {"b": ones(5, 4)}, "b (5, 4) does not fit a (2, 5, 4)"),
    ("delta_gates", {"A_log": ones(1)}, "A_log (1,) is not [H] = (4,)"),
    ("delta_gates", {"dt_bias": ones(4, device=META)}, "dt_bias is on meta"),
    ("sigmoid_gate", {"gate": ones(1, 33)}, "gate (1, 33) does not fit x (2, 5, 33)"),
    ("sigmoid_gate", {"gate": ones(2, 5, 33, device=META)}, "gate is on meta"),
    ("grouped_mlp, biases", {"down_bias": ones(5, 24)}, "biases [(5, 48), (5, 24)] are not"),
    ("grouped_mlp, biases", {"transposed": False}, "down (5, 24, 16), experts"),
    ("softmax_topk", {"k": 6}, "logits (6, 5), k=6"),
    ("softmax_topk", {"logits": ones(5)}, "logits (5,), k=2"),
    ("grouped_mlp", {"act": "relu"}, "act='relu'"),
    ("grouped_mlp", {"x": ones(6, 17)}, "x (6, 17), gate_up (5, 48, 16)"),
    ("grouped_mlp", {"x": ones(2, 6, 16)}, "x (2, 6, 16)"),
    ("grouped_mlp", {"gate_up": ones(5, 47, 16)}, "gate_up (5, 47, 16)"),
    ("grouped_mlp", {"gate_up": ones(6, 48, 16)}, "gate_up (6, 48, 16)"),
    ("causal_conv", {"x": ones(9, 12)}, "x (9, 12) is not [B, T, C]"),
    ("causal_conv", {"weight": ones(12, 1, 4)}, "weight (12, 1, 4) is not [C, W]"),
    ("causal_conv", {"weight": ones(11, 4)}, "with the 12 channels of x"),
    (
        "causal_conv",
        {"state": ones(2, 4, 12)},
        "state (2, 4, 12) is not [B, W - 1, C] = (2, 3, 12)",
    ),
    ("causal_conv", {"starts": zeros(2, 9)}, "starts (2, 9) torch.int64"),
    ("causal_conv", {"starts": zeros(9) > 0}, "is not (2, 9) torch.bool"),
    ("causal_conv", {"activation": "gelu"}, "activation='gelu'"),
    ("causal_conv", {"update_state": True}, "of rows without starts"),
    ("causal_conv", {"update_state": True, "starts": None, "state": None}, "a given state"),
    ("causal_conv", {"weight": ones(12, 4, device=META)}, "weight is on meta"),
    ("causal_conv_qkv", {"key_heads": 3}, "x has 34 channels: queries and keys of 3 heads of 6"),
    ("causal_conv_qkv", {"key_dim": 0}, "2 heads of 0"),
    ("causal_conv_qkv", {"state": ones(2, 3, 12)}, "state (2, 3, 12)"),
    ("grouped_mlp", {"down": ones(5, 24, 16)}, "down (5, 24, 16)"),
    ("grouped_mlp", {"experts": zeros(5, 2)}, "experts (5, 2), weights (6, 2)"),
    ("grouped_mlp", {"experts": zeros(6, 0), "weights": ones(6, 0)}, "experts (6, 0)"),
    ("grouped_mlp", {"experts": zeros(6, 2).int()}, "experts is torch.int32"),
    ("grouped_mlp", {"weights": zeros(6, 2)}, "weights torch.int64"),
    ("grouped_mlp", {"gate_up": ones(5, 48, 16, dtype=HALF)}, "gate_up torch.float16"),
    ("linear_cross_entropy", {"targets": zeros(38)}, "targets (38,) is not [N] = [37]"),
    ("linear_cross_entropy", {"targets": zeros(4)}, "targets (4,)"),
    ("linear_cross_entropy", {"targets": ones(37)}, "labels are integers"),
    ("linear_cross_entropy", {"targets": ones(37, dtype=torch.bool)}, "labels are integers"),
    ("linear_cross_entropy", {"token_weights": ones(3)}, "token_weights (3,)"),
    ("linear_cross_entropy", {"weight": ones(211, 20)}, "weight (211, 20)"),
    ("linear_cross_entropy", {"hidden": ones(2, 37, 19)}, "hidden (2, 37, 19)"),
    ("linear_cross_entropy", {"reduction": "mean"}, "reduction='mean'"),
    ("linear_cross_entropy", {"bias": ones(3)}, "bias (3,) is not [V] = [211]"),
    ("linear_cross_entropy", {"weight": ones(211, 19).double()}, "weight torch.float64"),
    ("linear_cross_entropy", {"weight": ones(211, 19, device=META)}, "weight is on meta"),
    ("linear_cross_entropy", {"metrics": ("entropie",)}, "entropie"),
    ("cross_entropy", {"class_weights": ones(3)}, "class_weights (3,) is not [V] = [211]"),
    ("linear_kl", {"hidden": ones(2, 3, 19)}, "hidden (2, 3, 19)"),
    ("linear_kl", {"teacher_hidden": ones(21, 5)}, "teacher_hidden (21, 5) and teacher_weight"),
    ("linear_kl", {"hidden": ones(4, 19), "token_weights": None}, "4 rows and 211 tokens"),
    ("linear_kl", {"teacher_bias": ones(3)}, "teacher_bias (3,) is not [V]"),
    ("linear_kl", {"beta": 1.5}, "beta=1.5"),
    ("linear_kl", {"temperature": 0.0}, "temperature=0.0"),
    ("linear_kl", {"options": Options(z_loss=1.0)}, "are for cross-entropy alone"),
    ("selected_logprobs", {"targets": ones(37)}, "labels are integers"),
    ("selected_logprobs", {"options": Options(label_smoothing=0.1)}, "for cross-entropy alone"),
    ("terms", {"term": CrossEntropy}, "CrossEntropy has no targets"),
    ("terms", {"term": lambda: CrossEntropy(targets=[1, 2])}, "targets is a list"),  # type: ignore[arg-type]
    ("terms", {"term": smoothed}, "1.5 is not in"),
    ("terms", {"term": KL}, "teacher_hidden and teacher"),
    ("terms", {"term": stored}, "for 3"),
    ("terms", {"term": logprobs, "vocabulary": SHARD}, "9 rows, and its shard"),
    ("terms", {"term": logprobs, "weight": None, "vocabulary": SHARD}, "for a head's weight"),
    ("join", {"logits": ones(3, 65)}, "rows 66 to 131 of 131"),
    ("gemv", {"x": ones(2, 1, 64)}, "(2, 1, 64) is not one row"),
    ("gemv", {"x": ones(1, 1, 32)}, "x has 32 columns, the weight (8, 64)"),
    ("gemv", {"bias": ones(7)}, "bias (7,) does not fit the weight (8, 64)"),
    ("gemv", {"act": "relu"}, "act='relu'"),
    ("gemv", {"weight": ones(7, 64), "act": "silu"}, "weight (7, 64) has no two halves"),
    ("fp8_linear", {"x": ones(4, 32)}, "x is torch.float32, the weight torch.bfloat16"),
    ("fp8_linear", {"x": ones(4, 16, dtype=BF16)}, "16 columns"),
    ("fp8_linear", {"weight": ones(8, 32, dtype=BF16)}, "(8, 32) are not multiples of 16"),
    ("fp8_mlp", {"x": ones(3, 48, dtype=BF16)}, "48 columns"),
    ("fp8_mlp", {"down": ones(32, 32, dtype=BF16)}, "48 columns"),
    ("fp8_mlp", {"act": "relu"}, "act='relu'"),
    ("dropout", {"keys": zeros(4)}, "one int64 for each row of (3, 5, 8)"),
    ("dropout", {"keys": zeros(3, 5).int()}, "one int64 for each row of (3, 5, 8)"),
    *(
        (name, *row)
        for name in ("gated_delta_rule", "gated_delta_step")
        for row in (
            ({"k": ones(1, 3, 1, 8)}, "k (1, 3, 1, 8) are not both [B, T, K, Dk]"),
            ({"v": ones(1, 2, 4, 8)}, "v (1, 2, 4, 8) is not [B, T, H, Dv] with (1, 3) tokens"),
            ({"v": ones(1, 3, 5, 8)}, "5 value heads cannot share 2 key heads"),
            ({"beta": ones(1, 3, 2)}, "beta (1, 3, 2) is not [B, T, H] = (1, 3, 4)"),
            ({"g": ones(1, 3, 4, dtype=BF16)}, "g is torch.bfloat16"),
            ({"g": ones(1, 3, 4, device=META)}, "g is on meta"),
            ({"state": ones(1, 4, 8, 7)}, "state (1, 4, 8, 7) is not [rows, H, Dk, Dv]"),
            ({"state": ones(1, 4, 8, 8, dtype=BF16)}, "state is torch.bfloat16"),
        )
    ),
    (
        "gated_delta_rule",
        {"cu_seqlens": zeros(3).int(), "state": ones(1, 4, 8, 8)},
        "= (2, 4, 8, 8)",
    ),
    ("gated_delta_rule", {"cu_seqlens": ones(2)}, "(2,) torch.float32 with 1 rows"),
    (
        "gated_delta_step",
        {n: ones(1, 17, *x.shape[2:]) for n, x in ONE_ROW.items()},
        "17 tokens are more than 16",
    ),
    ("attention", {"q": ones(1, 3, 5, 4)}, "5 query heads cannot share 2 key/value heads"),
    ("attention", {"q": ones(1, 2, 3, 4)}, "mask's 3 tokens"),
    ("attention", {"q": ones(3, 2, 4)}, "q (3, 2, 4) is not [B, T, H, D]"),
    ("attention", {"past": 2}, "2 tokens before its 3"),
    ("attention", {"v": ones(1, 2, 2, 4)}, "v (1, 2, 2, 4) are not [1, 3, K, 4]"),
    ("attention", {"k": ones(1, 3, 2, 8)}, "k (1, 3, 2, 8)"),
    ("attention", {"q": ones(2, 3, 2, 4)}, "are not [2, 3, K, 4]"),
    ("attention", {"window": 0}, "window=0"),
    ("attention", {"softcap": 0.0}, "softcap=0.0"),
    ("append_attention", {"q": ones(2, 6, 16)}, "q (2, 6, 16) is not [B, T, H, D]"),
    ("append_attention", {"q": ones(3, 1, 6, 16)}, "q (3, 1, 6, 16) is not (2, 1, 6"),
    ("append_attention", {"k": ones(2, 1, 3, 16)}, "k (2, 1, 3, 16) is not (2, 1, 2"),
    ("append_attention", {"v": ones(2, 2, 2, 16)}, "v (2, 2, 2, 16) is not (2, 1, 2"),
    ("append_attention", {"q": ones(2, 1, 6, 16, dtype=HALF)}, "q is torch.float16"),
    ("append_attention", {"q": ones(2, 1, 5, 16)}, "5 query heads cannot share 2 key/value"),
    ("append_attention", {"lengths": ones(2)}, "lengths (2,) torch.float32"),
    ("append_attention", {"lengths": zeros(3).int()}, "are not 2 integers"),
    (
        "append_attention",
        {n: ones(2, 9, h, 16) for n, h in (("q", 6), ("k", 2), ("v", 2))},
        "9 new tokens do not fit into 8 slots",
    ),
    ("append_attention", {"buffers": buffers(dtype=HALF)}, "keys are torch.float16"),
    ("append_attention", {"buffers": buffers(dtype=INT8)}, "they must be torch.float32"),
    ("append_attention", {"buffers": buffers(ones(2, 2, 8), dtype=INT8)}, "of keys and of values"),
    (
        "append_attention",
        {"buffers": buffers(*ones(2, 2, 2, 8, 1), dtype=INT8)},
        "scales are not (2, 2, 8)",
    ),
    ("append_attention", {"buffers": buffers(*ones(2, 2, 2, 8))}, "they must be torch.int8"),
    (
        "append_attention",
        {"buffers": KVBuffers(ones(2, 2, 8, 16), ones(2, 2, 9, 16))},
        "values (2, 2, 9, 16) are not [B, K, R, D]",
    ),
    (
        "append_attention",
        {"buffers": KVBuffers(*ones(2, 2, 2, 16, 8).transpose(-1, -2))},
        "must be adjacent",
    ),
    ("append_attention", {"angles": (ones(1, 2, 8), ones(1, 2, 8))}, "are not [B or 1"),
    ("append_attention", {"angles": (ones(1, 1, 16), ones(1, 1, 16))}, "rotates 32 dims"),
    ("append_tokens", {"k": ones(4, 2, 16)}, "k (4, 2, 16) and v (3, 2, 16)"),
    ("append_tokens", dict.fromkeys("kv", ones(3, 2, 16, dtype=HALF)), "they must be"),
]
# An assertion on a GPU ends the process's use of it
VALUES: list[tuple[str, Given, str]] = [
    ("grouped_mlp", {"experts": torch.full((6, 2), 5)}, "expert 5 at [0, 0] is not in [0, 5)"),
    ("grouped_mlp", {"experts": torch.full((6, 2), -1)}, "expert -1 at [0, 0]"),
    *(
        ("gated_delta_rule", {"cu_seqlens": torch.tensor(bad)}, f"cu_seqlens {bad} do not rise")
        for bad in ([0, 2], [1, 3], [0, 3, 2, 3], [0, 4, 3])
    ),
    *(
        ("cross_entropy", {"targets": torch.full((37,), bad)}, f"label {bad} at [0]")
        for bad in (211, -1, -99, 2**40)
    ),
    (
        "terms",
        {
            "term": lambda: LogProbs(targets=zeros(3) + 131),
            "weight": ones(66, 4),
            "vocabulary": SHARD,
        },
        "label 131 at [0]",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [pytest.param(*row, id=f"{row[0]}, {row[2]}") for row in ROWS]
    + [
        pytest.param(*row, id=f"{row[0]}, {row[2]}", marks=pytest.mark.skipif(CUDA, reason="a CPU"))
        for row in VALUES
    ],
)
def test_error_names_what_does_not_fit(name: str, change: Given, text: str) -> None:
    if name in OPERATORS:
        case = CASES[OPERATORS[name]]
        function, given = case.operator, case.options | case.make()
    else:
        function, given = BASES[name]
    device = torch.get_default_device()

    def moved(x: Tensor) -> Tensor:
        return x if x.is_meta else x.detach().to(device)

    with pytest.raises((ValueError, TypeError)) as error:
        function(**tree_map_only(Tensor, moved, given | change))
    assert text in str(error.value)
