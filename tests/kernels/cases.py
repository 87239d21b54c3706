"""Operators with their definitions, and what their inputs are: `test_operators*.py` check each.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim, I inner dim, E experts,
# N rows, V vocab
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels import definitions as exact
from tests.kernels.conftest import CUDA
from tests.kernels.definitions import EPS
from tigon.kernels import (
    AttentionMask,
    KVBuffers,
    append_attention,
    attention,
    causal_conv,
    causal_conv_qkv,
    causal_conv_qkv_ref,
    causal_conv_ref,
    cross_entropy,
    cross_entropy_ref,
    delta_gates,
    divergence,
    fp8_linear,
    fp8_linear_ref,
    gated_act,
    gated_act_ref,
    gated_delta_rule,
    gemv,
    grouped_mlp,
    grouped_mlp_ref,
    linear_cross_entropy,
    linear_kl,
    lora_linear,
    lora_linear_ref,
    qk_norm_rope,
    qk_norm_rope_ref,
    rms_norm,
    rms_norm_add,
    rms_norm_add_ref,
    rms_norm_ref,
    rope,
    rope_ref,
    sandwich_norm,
    sandwich_norm_ref,
    selected_logprobs,
    sigmoid_gate,
    sigmoid_gate_ref,
    softmax_topk,
)
from tigon.kernels.linear.fp8_mlp import fp8_mlp
from tigon.kernels.linear.lora import LoRATerm
from tigon.kernels.loss.logits import Options, scale_and_cap
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.kernels.mlp.grouped_mlp import unchecked_grouped_mlp
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases, LoRAFactors
from tigon.kernels.norm.rms_norm import MAX_COLUMNS, MAX_SANDWICH_COLUMNS

Inputs = dict[str, Any]
Call = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OpCase:
    operator: Call
    definition: Call  # in float64, of the same arguments
    inputs: Callable[..., Inputs]  # of a size, in float32, by their names
    eager: Call | None = None  # plain torch, beside which half precision is judged
    options: Inputs = field(default_factory=dict)
    sizes: Sequence[Any] = ()  # the first is small
    real: Sequence[Any] = ()  # more of them, on a GPU in half precision
    empty: Sequence[Any] = ()
    constant: Sequence[str] = ()  # floats without gradients
    parameters: Sequence[str] = ()  # which are such, as those of a layer
    whole: Sequence[str] = ()  # floats that stay float32 beside half precision
    dtype: torch.dtype = torch.float32  # another one's numbers are compared elsewhere
    halves: Sequence[torch.dtype] = HALF
    result: torch.dtype | None = None  # whatever the inputs' dtype
    autocast: Sequence[str] = ()  # what is cast
    second: str = ""  # what an error about second derivatives names
    rtol: float = 1e-4  # of gradients
    factor: float = 2.0  # of plain torch's error, which real sizes may have

    def make(self, size: Any = None, dtype: torch.dtype | None = None) -> Inputs:
        """Leaves, those that learn with gradients."""
        made, dtype = self.inputs(*(self.sizes[0] if size is None else size)), dtype or self.dtype
        for name, x in made.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                x = x.to(torch.float32 if name in self.whole else dtype)
                made[name] = nn.Parameter(x) if name in self.parameters else x
                made[name].requires_grad_(name not in self.constant)
        return made

    def run(self, inputs: Inputs, function: Call | None = None) -> list[Tensor]:
        found = (function or self.operator)(**inputs, **self.options)
        if hasattr(found, "metrics"):  # a value and its metrics
            return [found.value]
        return [found] if isinstance(found, Tensor) else list(found)


def learned(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


# Norms. 41 and 101 rows make a program take several steps, of which the last is not full

ROWS = [((2, 5, 33),), ((1, 1),), ((3, 7),), ((41, 200),), ((101, 30),), ((3, 1152),)]
REAL_ROWS = [((63, 96),), ((2047, 2880),), ((63, 4096),), ((5, 9000),), ((5, 20000),)]
NO_ROWS = [((0, 8),), ((2, 0, 8),), ((3, 0),)]
GEMMA = {"offset": 1.0, "cast": "after_weight"}


def rows(*names: str, weights: Sequence[str] = ("weight",)) -> Callable[..., Inputs]:
    def make(shape: tuple[int, ...]) -> Inputs:
        made = {name: 0.3 * torch.randn(shape) for name in names}  # small, so that eps counts
        return made | {name: torch.randn(shape[-1]) for name in weights}

    return make


def eager_norm(x: Tensor, weight: Tensor | None = None, residual: Any = None, **how: Any) -> Any:
    total = x if residual is None else x + residual
    y = rms_norm_ref(total, weight, **how)
    return y if residual is None else (y, total)


def norm_case(*names: str, **more: Any) -> OpCase:
    options = {"eps": EPS, **more.pop("options", {})}
    if "weight" not in names:
        options["weight"] = None
    return OpCase(
        rms_norm,
        exact.rms_norm,
        rows(*(n for n in names if n != "weight"), weights=[n for n in names if n == "weight"]),
        eager_norm,
        options,
        **{"sizes": ROWS, "real": REAL_ROWS, "empty": NO_ROWS, "second": "rms_norm"} | more,
    )


def sandwich_case(**options: Any) -> OpCase:
    return OpCase(
        sandwich_norm,
        exact.sandwich_norm,
        rows("x", "residual", weights=("post_weight", "weight")),
        sandwich_norm_ref,
        {"eps": EPS, **options},
        ROWS,
        [((2047, 2304),), ((63, 5376),)],
        NO_ROWS,
        second="sandwich_norm",
    )


def added_case(**options: Any) -> OpCase:
    return OpCase(
        rms_norm_add,
        exact.rms_norm_add,
        rows("x", "residual"),
        rms_norm_add_ref,
        {"eps": EPS, **options},
        ROWS,
        [((2047, 2304),), ((5, 20000),)],
        NO_ROWS,
        second="rms_norm_add",
    )


# Rotations

B, T, H, K, D = 2, 3, 6, 3, 14
HEADS = [  # batch, tokens, heads, kv heads, head dim, rotated dims, batch of angles
    (B, T, H, K, D, D, B),
    (B, T, H, K, D, 6, 1),
    (1, 1, 1, 1, 2, 2, 1),
    (1, 2, 9, 1, 128, 128, 1),
    (2, 1, 3, 3, 96, 96, 2),
    (1, 2, 2, 5, 80, 32, 1),
]
REAL_HEADS = [(2, t, 28, 4, d, d, 1) for t in (63, 100, 2047) for d in (64, 96, 128, 256)]
NO_HEADS = [(0, T, H, K, D, D, 1), (B, 0, H, K, D, D, 1)]


def angles(tokens: int = T, rotated: int = D, batch: int = 1) -> dict[str, Tensor]:
    theta = 6 * torch.rand(batch, tokens, rotated // 2)
    return {"cos": theta.cos(), "sin": theta.sin()}


def heads(b: int, t: int, h: int, k: int, d: int, rotated: int, batch: int) -> Inputs:
    q_and_k = {"q": torch.randn(b, t, h, d), "k": torch.randn(b, t, k, d)}
    return q_and_k | angles(t, rotated, batch if b else 1)


def packed(*sizes: int, weights: bool = False) -> Inputs:
    b, t, h, k, d, rotated, batch = sizes
    made = {"qkv": 0.3 * torch.randn(b, t, (h + 2 * k) * d)} | angles(t, rotated, batch if b else 1)
    made |= {"heads": h, "kv_heads": k}
    return made | ({n: torch.randn(d) for n in ("q_weight", "k_weight")} if weights else {})


def rope_case(**options: Any) -> OpCase:
    return OpCase(
        rope, exact.rope, heads, rope_ref, options, HEADS, REAL_HEADS, NO_HEADS, ("cos", "sin"),
        second="rope", factor=1.01,
    )  # fmt: skip


def packed_case(weights: bool, **options: Any) -> OpCase:
    make = partial(packed, weights=weights)
    options = {"eps": EPS, **options}
    return OpCase(
        qk_norm_rope, exact.qk_norm_rope, make, qk_norm_rope_ref, options, HEADS, REAL_HEADS,
        NO_HEADS, ("cos", "sin"), second="qk_norm_rope", factor=1.1,
    )  # fmt: skip


# Activations and experts


def act_case(act: str, **options: Any) -> OpCase:
    return OpCase(
        gated_act,
        exact.gated_act,
        lambda *shape: {"gate_up": 3 * torch.randn(shape)},
        lambda gate_up, act, **_: gated_act_ref(gate_up, act),
        {"act": act, **options},
        [(2, 5, 202), (1, 2), (3, 14), (2, 2200)],
        [(n, 2 * i) for n in (63, 2047) for i in (96, 1152, 6912, 18944)],
        [(0, 6), (3, 0), (2, 0, 4)],
        second="gated_act",
        factor=1.1,
    )


def experts(n: int, c: int, i: int, e: int, k: int) -> Inputs:
    """No token chooses the last expert but one."""
    chances = torch.rand(n, e)
    if e > k:
        chances[:, -2] = -1
    weights, chosen = chances.topk(k)
    return {
        "x": torch.randn(n, c),
        "gate_up": torch.randn(e, 2 * i, c) / c**0.5,
        "down": torch.randn(e, c, i) / i**0.5,
        "experts": chosen,
        "weights": weights,
    }


# C and I are multiples of 8, which the kernel needs in 16 bits; 7 and 5 start rows at no multiple
# of 16 bytes
EXPERTS = [
    *(
        (6, 16, 24, 5, 2),
        (13, 24, 40, 7, 3),
        (1, 24, 40, 7, 3),
        (1, 24, 40, 7, 1),
        (13, 24, 40, 7, 1),
    ),
    *((13, 24, 40, 1, 1), (13, 24, 40, 3, 3), (13, 24, 40, 90, 3)),
    *((13, 7, 5, 7, 3), (13, 8, 5, 7, 3), (13, 1, 1, 7, 3)),
]


def experts_case(act: str, sizes: Sequence[Any] = EXPERTS[:1]) -> OpCase:
    return OpCase(
        grouped_mlp, exact.grouped_mlp, experts, grouped_mlp_ref, {"act": act}, sizes,
        [(700, 328, 200, 7, 3)], [(0, 24, 40, 7, 3)],
        halves=HALF if CUDA else HALF[:1],  # the interpreter has no products of bf16
        autocast=("x", "gate_up", "down"), second="grouped_mlp",
    )  # fmt: skip


def topk_case(normalize: bool) -> OpCase:
    def run(**given: Any) -> tuple[Tensor, Tensor]:
        probs, _, weights = softmax_topk(**given)
        return probs, weights

    def make(n: int, e: int, k: int) -> Inputs:
        # No two as near as half precision's numbers: rounding does not choose the larger
        return {"logits": torch.rand(n, e).argsort(1) * (8.0 / e) - 4, "k": k}

    return OpCase(
        run, exact.softmax_topk, make, None, {"normalize": normalize},
        [(6, 5, 2), (70, 40, 3), (3, 9, 9), (1, 1, 1), (2, 3000, 5)], [], [(0, 5, 2)],
        result=torch.float32, second="softmax_topk",
    )  # fmt: skip


CLAMPED = ClampedSwiGLU(1.702, 0.6)


def biased_experts(transposed: bool) -> Callable[..., Inputs]:
    def make(n: int, c: int, i: int, e: int, k: int) -> Inputs:
        made = experts(n, c, i, e, k)
        if transposed:
            made |= {name: made[name].mT.contiguous() for name in ("gate_up", "down")}
        return made | {"gate_up_bias": torch.randn(e, 2 * i), "down_bias": torch.randn(e, c)}

    return make


def with_biases(function: Call) -> Call:
    def call(gate_up_bias: Tensor, down_bias: Tensor, **given: Any) -> Any:
        return function(**given, biases=ExpertBiases(gate_up_bias, down_bias))

    return call


def biased_case(act: Any, transposed: bool, sizes: Sequence[Any] = EXPERTS[:1]) -> OpCase:
    names = "x", "gate_up", "down", "gate_up_bias", "down_bias"
    return replace(
        experts_case("silu", sizes), operator=with_biases(grouped_mlp),
        definition=with_biases(exact.grouped_mlp), inputs=biased_experts(transposed),
        eager=with_biases(grouped_mlp_ref), options={"act": act, "transposed": transposed},
        autocast=names,
    )  # fmt: skip


# Low-rank additions

# Of each part the first column of y, columns, rank and scale
PARTS = {
    "ends": ((0, 30, 3, 0.5), (50, 20, 5, -1.5)),
    "one": ((0, 70, 4, 2.0),),
    "all": ((0, 30, 4, 2.0), (30, 20, 4, 2.0), (50, 20, 4, 2.0)),
    "inside": ((30, 20, 1, -2.0),),
}
FACTORS = {"both": (5, 8), "gate_up": (3, 0), "down": (0, 4)}


def lora_case(*constant: str, layout: str = "ends") -> OpCase:
    parts = PARTS[layout]
    names = [f"b{i}" for i in range(len(parts))]

    def additions(n: int, c: int, k: int) -> Inputs:
        made = {
            "x": torch.randn(2, n, c),
            "weight": torch.randn(k, c) / c**0.5,
            "bias": torch.randn(k),
            "a": torch.randn(sum(rank for *_, rank, _ in parts), c) / c**0.5,
        }
        return made | {n: torch.randn(p[1], p[2]) for n, p in zip(names, parts, strict=True)}

    def with_parts(function: Call) -> Call:
        def call(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, **bs: Tensor) -> Tensor:
            added = [LoRATerm(p[0], bs[n], p[3]) for n, p in zip(names, parts, strict=True)]
            return function(x, weight, bias, a, added)

        return call

    def definition(**inputs: Tensor) -> Tensor:
        return with_parts(lora_linear_ref)(**{n: x.double() for n, x in inputs.items()})

    return OpCase(
        with_parts(lora_linear), definition, additions, with_parts(lora_linear_ref),
        sizes=[(3, 48, 70), (1, 48, 70)], empty=[(0, 48, 70)], constant=constant,
        parameters=("weight", "bias", "a", *names),
        second="low-rank additions",
    )  # fmt: skip


def low_rank_experts(r: int, q: int) -> Inputs:
    n, c, i, e, k = EXPERTS[0]
    shapes = {"a_up": (e, r, c), "b_up": (e, 2 * i, r), "a_down": (e, q, i), "b_down": (e, c, q)}
    return experts(n, c, i, e, k) | {name: 0.3 * torch.randn(s) for name, s in shapes.items()}


def with_factors(function: Call) -> Call:
    def call(
        x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, **low: Any
    ) -> Any:
        low_rank = LoRAFactors(**low)
        return function(x, gate_up, down, experts, weights, "silu", low=low_rank)

    return call


def merged(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: str,
    low: LoRAFactors,
) -> Tensor:
    """By sums of matrices."""
    low = LoRAFactors(*(t.double() for t in low))
    whole = gate_up.double() + low.b_up @ low.a_up, down.double() + low.b_down @ low.a_down
    return exact.grouped_mlp(x, *whole, experts, weights, act)


def transposed_low_rank(r: int, q: int) -> Inputs:
    made = low_rank_experts(r, q)
    return made | {name: made[name].mT.contiguous() for name in ("gate_up", "down")}


def merged_transposed(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, act: str, **low: Any
) -> Tensor:
    return merged(x, gate_up.mT, down.mT, experts, weights, act, low["low"])


def lora_experts_case(*constant: str) -> OpCase:
    return OpCase(
        with_factors(unchecked_grouped_mlp), with_factors(merged), low_rank_experts, None, {},
        list(FACTORS.values()), constant=constant, second="lora_grouped_mlp",
    )  # fmt: skip


# Recurrences

# Batch, tokens, key heads, value heads, dims of keys and of values
RECURRENT = [
    (2, 70, 1, 2, 16, 24),
    (1, 64, 2, 2, 8, 32),
    (2, 1, 1, 3, 24, 7),
    (1, 129, 1, 1, 40, 16),
]
PACKED = [((1, 63, 0, 65, 6), 1, 2, 16, 24), ((64, 64), 1, 1, 16, 16)]


def recurrent(b: int, t: int, k: int, h: int, dk: int, dv: int) -> Inputs:
    made = {name: torch.randn(b, t, k, dk) for name in "qk"} | {"v": torch.randn(b, t, h, dv)}
    made |= {name: torch.randn(b, t, h) for name in ("g", "beta")}
    return made | {"state": torch.randn(b, h, dk, dv)}


def packed_recurrent(lengths: tuple[int, ...], k: int, h: int, dk: int, dv: int) -> Inputs:
    made = recurrent(1, sum(lengths), k, h, dk, dv)
    bounds = torch.tensor((0, *lengths)).cumsum(0).int()
    return made | {"state": torch.randn(len(lengths), h, dk, dv), "cu_seqlens": bounds}


def of_any_numbers(rule: Call) -> Call:
    """Keys of length 1, decays and betas of any numbers; states in the dtype of outputs."""

    def call(k: Tensor, g: Tensor, beta: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        gates = {"g": -2 * F.softplus(g), "beta": beta.sigmoid()}
        o, final = rule(k=k * (k.square().sum(-1, True) + 1e-6).rsqrt(), **gates, **given)
        return o, final.to(o.dtype)

    return call


def recurrent_case(make: Call, sizes: Sequence[Any], empty: Sequence[Any]) -> OpCase:
    return OpCase(
        of_any_numbers(gated_delta_rule), of_any_numbers(exact.gated_delta_rule), make,
        sizes=sizes, empty=empty, constant=("state",), whole=("g", "state"),
        second="gated_delta_rule",
    )  # fmt: skip


# Convolutions

# Batch, tokens, channels, taps. 300 tokens are several chunks in the kernels
ROWS_OF_TOKENS = [(2, 9, 12, 4), (1, 1, 7, 3), (3, 2, 5, 2), (1, 300, 3, 4), (2, 21, 140, 3)]
# Batch, tokens, key heads, their dim, other channels, taps
QKV_ROWS = [(2, 9, 2, 6, 10, 4), (1, 21, 1, 16, 48, 3), (1, 300, 1, 1, 2, 4)]


def conv_rows(b: int, t: int, c: int, w: int) -> Inputs:
    return {
        "x": torch.randn(b, t, c),
        "weight": torch.randn(c, w),
        "state": torch.randn(b, w - 1, c),
        "starts": torch.rand(b, t) < 0.2,
    }


def qkv_rows(b: int, t: int, k: int, d: int, c: int, w: int) -> Inputs:
    made = conv_rows(b, t, 2 * k * d + c, w) | {"key_heads": k, "key_dim": d}
    made["x"].narrow(-1, 0, d).mul_(1e-2)  # so short that eps counts
    return made


def conv_case(*without: str, **more: Any) -> OpCase:
    def make(*size: int) -> Inputs:
        return {n: x for n, x in conv_rows(*size).items() if n not in without}

    return OpCase(
        causal_conv, exact.causal_conv, make, causal_conv_ref, sizes=ROWS_OF_TOKENS,
        real=[(2, 2047, 2048, 3), (1, 5000, 1000, 4)], empty=[(0, 3, 4, 3), (2, 0, 4, 3)],
        second="causal_conv", factor=1.1, **more,
    )  # fmt: skip


def qkv_case(*without: str) -> OpCase:
    def make(*size: int) -> Inputs:
        return {n: x for n, x in qkv_rows(*size).items() if n not in without}

    return OpCase(
        causal_conv_qkv, exact.causal_conv_qkv, make, causal_conv_qkv_ref, sizes=QKV_ROWS,
        real=[(2, 2047, 16, 128, 4096, 4), (1, 5000, 3, 96, 300, 4)],
        empty=[(0, 3, 1, 2, 2, 3), (2, 0, 1, 2, 2, 3)], second="causal_conv", factor=1.1,
    )  # fmt: skip


def lora_transposed_case() -> OpCase:
    return replace(
        lora_experts_case(), inputs=transposed_low_rank, definition=with_factors(merged_transposed),
        operator=with_factors(partial(unchecked_grouped_mlp, transposed=True)),
    )  # fmt: skip


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

# Losses of a head

SMALL = 2**14  # bytes of logits: several chunks of rows
LOSSES = {
    "plain": Options(),
    "softcap": Options(softcap=1.5),
    "logit scale": Options(logit_scale=0.3),
    "smoothing": Options(label_smoothing=0.2),
    "z-loss": Options(z_loss=1e-2),
    "all": Options(softcap=2.0, logit_scale=0.7, label_smoothing=0.1, z_loss=3e-3),
}


def targets(n: int, v: int) -> Tensor:
    drawn = torch.randint(0, v, (n,))
    drawn[::5] = -100
    return drawn


def head(n: int, c: int, v: int) -> Inputs:
    """A head, and rows of which some do not count."""
    return {
        "hidden": torch.randn(n, c),
        "weight": c**-0.5 * torch.randn(v, c),
        "bias": torch.randn(v),
        "targets": targets(n, v),
        "token_weights": torch.rand(n) + 0.1,
    }


def every_row(n: int, c: int, v: int) -> Inputs:
    return head(n, c, v) | {"targets": torch.randint(0, v, (n,))}


def logits(n: int, v: int) -> Inputs:
    return {
        "logits": 2 * torch.randn(n, v),
        "targets": targets(n, v),
        "token_weights": torch.rand(n) + 0.1,
    }


def narrow_linear(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits in the dtype of their factors."""
    return F.linear(hidden, weight, bias).float()


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    linear: Call = exact.linear,
    losses: Call = exact.losses,
    **how: Any,
) -> Tensor:
    z = linear(hidden, weight, bias)
    return logits_loss(z, targets, token_weights, losses, **how)


def logits_loss(
    logits: Tensor, targets: Tensor, token_weights: Any, losses: Call = exact.losses, **how: Any
) -> Tensor:
    rows = losses(logits, targets, how["options"])
    return exact.reduced(rows if token_weights is None else rows * token_weights, **how)


def eager_losses(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    return cross_entropy_ref(logits.float(), targets, options=options)


eager_head_loss = partial(head_loss, linear=narrow_linear, losses=eager_losses)
eager_logits_loss = partial(logits_loss, losses=eager_losses)


def loss_case(name: str, reduction: str, **more: Any) -> OpCase:
    how = {"reduction": reduction, "options": LOSSES[name]}
    how |= {"denominator": 7.0, "metrics": ("accuracy",)} if reduction == "sum" else {}
    return OpCase(
        linear_cross_entropy, head_loss, head, eager_head_loss, how | more, [(37, 19, 211)],
        [(63, 96, 151), (1000, 2880, 151), (2047, 1152, 32003), (63, 96, 262144)],
        [(0, 19, 211)], whole=("token_weights",), result=torch.float32,
        autocast=("hidden", "weight", "bias"), second="linear_cross_entropy",
    )  # fmt: skip


def logits_case(name: str, reduction: str) -> OpCase:
    how = {"reduction": reduction, "options": LOSSES[name]}
    return OpCase(
        cross_entropy, logits_loss, logits, eager_logits_loss, how, [(37, 211), (1, 1)],
        [(63, 151), (100, 32003), (100, 262144)], [(0, 7)], whole=("token_weights",),
        halves=HALF if CUDA else HALF[1:],  # the interpreter rounds a target's twice to fp16
        result=torch.float32, second="cross_entropy",
    )  # fmt: skip


def teacher_and_student(n: int, c: int, d: int, v: int) -> Inputs:
    return {
        "hidden": torch.randn(n, c),
        "weight": c**-0.5 * torch.randn(v, c),
        "bias": torch.randn(v),
        "teacher_hidden": torch.randn(n, d),
        "teacher_weight": d**-0.5 * torch.randn(v, d),
        "teacher_bias": torch.randn(v),
        "token_weights": torch.rand(n) + 0.1,
    }


def kl(
    hidden: Tensor, weight: Tensor, bias: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor, token_weights: Tensor, *, beta: float, temperature: float = 1.0,
    options: Options = LOSSES["plain"], teacher_options: Options = LOSSES["plain"],
    linear: Call = exact.linear, **how: Any,
) -> Tensor:  # fmt: skip
    def probabilities(z: Tensor, o: Options) -> Tensor:
        return (scale_and_cap(z, o) / temperature).softmax(-1)

    p = probabilities(linear(hidden, weight, bias), options)
    q = probabilities(linear(teacher_hidden, teacher_weight, teacher_bias), teacher_options)
    return exact.reduced(exact.divergences(p, q, beta) * token_weights, **how)


eager_kl = partial(kl, linear=narrow_linear)


def kl_case(beta: float, reduction: str = "sum", **more: Any) -> OpCase:
    how = {"beta": beta, "reduction": reduction}
    how |= {"denominator": 7.0} if reduction == "sum" else {}
    return OpCase(
        linear_kl, kl, teacher_and_student, None if more else eager_kl, how | more,
        [(21, 19, 13, 211)], [(1000, 1152, 512, 32003)], [(0, 19, 13, 211)],
        ("teacher_hidden", "teacher_weight", "teacher_bias"), ("token_weights",),
        autocast=[n for n in teacher_and_student(1, 1, 1, 1) if n != "token_weights"],
        result=torch.float32, second="linear_kl", rtol=1e-3,
    )  # fmt: skip


def logprobs_case(options: Options, **more: Any) -> OpCase:
    def definition(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **_: Any) -> Any:
        return -exact.losses(exact.linear(hidden, weight, bias), targets, options)

    def make(*size: int) -> Inputs:
        made = head(*size)
        del made["token_weights"]
        return made

    return OpCase(
        selected_logprobs, definition, make, None, {"options": options, **more}, [(37, 19, 211)],
        [], [(0, 19, 211)], result=torch.float32, second="linear_cross_entropy",
    )  # fmt: skip


def divergence_case(beta: float, reduction: str) -> OpCase:
    def make(n: int, v: int) -> Inputs:
        logprobs = torch.randn(n, v).log_softmax(-1), (2 * torch.randn(n, v)).log_softmax(-1)
        names = ("logprobs", "teacher_logprobs")
        return dict(zip(names, logprobs, strict=True)) | {"token_weights": torch.rand(n) + 0.1}

    def definition(
        logprobs: Tensor, teacher_logprobs: Tensor, token_weights: Tensor, **how: Any
    ) -> Tensor:
        p, q = logprobs.double().exp(), teacher_logprobs.double().exp()
        return exact.reduced(exact.divergences(p, q, beta) * token_weights, reduction)

    return OpCase(
        divergence, definition, make, None, {"beta": beta, "reduction": reduction}, [(21, 211)], [],
        [(0, 7)], ("teacher_logprobs", "token_weights"), result=torch.float32, second="kl",
        rtol=1e-3,
    )  # fmt: skip


def in_chunks(case: OpCase) -> OpCase:
    real = [(1000, 256, 5003)] if case.operator is linear_cross_entropy else []
    return replace(case, options=case.options | {"logits_bytes": SMALL}, real=real)


CAPPED = {
    "options": Options(softcap=2.0, logit_scale=0.7),
    "teacher_options": Options(softcap=3.0, logit_scale=1.3),
}
FEW = {"sizes": ROWS[:1]}
# For the kernels, which leave them to torch
TOO_WIDE, TOO_WIDE_SANDWICH = [((2, n + 1),) for n in (MAX_COLUMNS, MAX_SANDWICH_COLUMNS)]
ONLY: Inputs = {"real": (), "empty": ()}
BETAS, BOTH = (0.0, 0.3, 1.0), ("sum", "none")
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
    **{f"divergence, {beta}, {r}": divergence_case(beta, r) for beta in BETAS for r in BOTH},
}
# One of each operator, and those whose kernels have other branches
KINDS = (
    "rms_norm, gate, residual", "sandwich_norm", "rms_norm_add", "rope", "qk_norm_rope",
    "gated_act, silu", "grouped_mlp, silu", "lora_linear", "lora_grouped_mlp, frozen base",
    "cross_entropy, sum",
    "sigmoid_gate", "delta_gates", "causal_conv, silu", "causal_conv_qkv, packed",
    "linear_cross_entropy, all, sum", "linear_kl, 0.3, sum", "selected_logprobs",
    "divergence, 0.3, sum", "gated_delta_rule", "softmax_topk, normalize",
)  # fmt: skip
MORE_KINDS = (
    "causal_conv, packed",
    "rms_norm", "rms_norm, residual", "qk_norm_rope, no norm", "lora_grouped_mlp",
    "grouped_mlp, gpt-oss",
    "cross_entropy, all", "linear_cross_entropy, all", "linear_cross_entropy, every row",
    "linear_kl, 0.0, none",
)  # fmt: skip
