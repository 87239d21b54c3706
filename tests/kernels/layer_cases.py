"""Cases of norms, rotations, activations, convolutions and recurrences.

# B batch, T tokens, H query heads, K kv heads, D head dim
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import definitions as exact
from tests.kernels.definitions import EPS
from tests.kernels.op_case import Call, Inputs, OpCase
from tigon.kernels import (
    causal_conv,
    causal_conv_qkv,
    causal_conv_qkv_ref,
    causal_conv_ref,
    gated_act,
    gated_act_ref,
    gated_delta_rule,
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
)

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


# Activations


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
