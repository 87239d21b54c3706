"""Forms of activations, products of one row, casts to 8 bits, mixtures of experts, and sums over
ranks."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.compiled.compiling import BF16, FP16, FP32, INT32, Forms, backward, zeros
from tigon.kernels import gated_act, gemv, grouped_mlp, sigmoid_gate, softmax_topk
from tigon.kernels.comm import one_shot_all_reduce
from tigon.kernels.linear.dropout import Dropout, apply_dropout
from tigon.kernels.linear.fp8_casts import (
    _cast_normed,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
)
from tigon.kernels.linear.fp8_mlp import cast_gated_gradients, cast_gated_rows
from tigon.kernels.linear.low_rank import low_rank_gradients, low_rank_product
from tigon.kernels.linear.maxima import Maxima
from tigon.kernels.linear.quantized import E4M3, E5M2
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.kernels.mlp.gated_act import ACTIVATIONS, Activation, gradient_and_product
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.mlp.slot_order import sort_slots
from tigon.layers import FP8Weight, NF4Weight


def forms() -> Forms:
    for act in ACTIVATIONS:
        yield f"gated_act {act}", partial(_gated_act, act, 8, 2048, BF16)
    yield "gated_act fp32", partial(_gated_act, "gelu", 8, 2048, FP32)
    yield "gated_act with product", _with_product
    yield "gated_act narrow", partial(_gated_act, "silu", 8, 100, BF16)
    yield "gated_act large", partial(_gated_act, "silu", 300, 2048, BF16)
    for N, C, dtype in (8, 2048, BF16), (8, 100, FP32), (300, 4096, BF16):
        yield f"sigmoid_gate {N} {C} {dtype}", partial(_sigmoid_gate, N, C, dtype)
    for name, options in ROWS.items():
        yield f"row_linear {name}", partial(_row_linear, **options)
    yield "fp8 rows", lambda: cast_rows(zeros(64, 2048))
    yield "fp8 wide rows", lambda: cast_rows(zeros(4, 20480))
    for C in (2048, 14336):
        yield f"fp8 rows and maxima, {C}", partial(_rows_and_maxima, C)
    yield "fp8 columns", lambda: cast_columns(zeros(64, 2048))
    yield "fp8 both", lambda: cast_both(zeros(64, 2048))
    yield "fp8 both, known", _known
    yield "fp8 both, odd", lambda: cast_both(zeros(50, 208))
    yield "fp8 normed", lambda: _cast_normed(*_normed(), 0.0, True)
    yield "fp8 normed, after", lambda: _cast_normed(*_normed(), 1.0, False)
    for act in ACTIVATIONS:
        yield f"fp8 gated {act}", partial(_fp8_gated, act, 14336)
    yield "fp8 gated, narrow", partial(_fp8_gated, "silu", 80)
    for name, options in ADDITIONS.items():
        yield f"low rank {name}", partial(_low_rank, **options)
    for dtype in (BF16, FP32):
        yield f"dropout {dtype}", partial(_dropout, 4096, dtype)
    yield "dropout, odd", partial(_dropout, 1001, FP16)
    for name, (matrices, dtype) in FEW_BITS.items():
        yield f"nf4 {name}", partial(_nf4, matrices, dtype)
    yield "block fp8 e4m3", partial(_block_fp8, E4M3)
    yield "block fp8 e5m2", partial(_block_fp8, E5M2)
    for name, options in EXPERTS.items():
        yield f"grouped_mlp {name}", partial(_grouped_mlp, **options)
    yield "expert_rows", _expert_rows
    for slots in 64, 1024:
        chosen = zeros(slots, dtype=torch.int64)
        yield f"slot_order {slots}", partial(sort_slots, chosen, 128, False, fused=True)
    for normalize in (True, False):
        yield f"softmax_topk, normalize={normalize}", partial(_softmax_topk, normalize)
    for dtype in one_shot_all_reduce.BITS:
        yield f"one_shot_sum {dtype}", partial(_one_shot_sum, dtype)
        yield f"one_shot_join {dtype}", partial(_one_shot_sum, dtype, 128)
        for C in (4096, 5120):
            yield f"one_shot_norm {C} {dtype}", partial(_one_shot_norm, dtype, C)
    yield "one_shot_norm of a row, Gemma's", partial(_one_shot_norm, BF16, 2304, 1, 1.0, False)


def _rows_and_maxima(C: int) -> None:
    cast_rows_and_maxima(zeros(64, C))


def _known() -> None:
    x, rows, columns = zeros(64, 2048), zeros(64, dtype=INT32), zeros(2048, dtype=INT32)
    cast_both(x, Maxima(rows, columns))
    cast_columns(x, columns)


def _normed() -> tuple[Tensor, ...]:
    of_columns = zeros(2048, dtype=INT32), zeros(64, dtype=FP32), zeros(2048)
    return zeros(64, 2048), *of_columns


def _fp8_gated(act: Activation, inner: int) -> None:
    cast_gated_rows(zeros(8, 2 * inner), act)
    cast_gated_gradients(zeros(8, inner), zeros(8, 2 * inner), act)


def _gated_act(act: Activation, N: int, inner: int, dtype: torch.dtype) -> None:
    backward(gated_act(zeros(N, 2 * inner, dtype=dtype, grad=True), act))


def _sigmoid_gate(N: int, C: int, dtype: torch.dtype) -> None:
    """Of a gate that is part of a projection."""
    gate = zeros(N, 2 * C, dtype=dtype, grad=True)[:, :C]
    backward(sigmoid_gate(zeros(N, C, dtype=dtype, grad=True), gate))


def _with_product() -> None:
    gradient_and_product(zeros(8, 2048), zeros(8, 4096), "silu", True)


ROWS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, bias": {"dtype": FP32, "bias": True},
    "silu": {"act": "silu"},
    "gelu, bias": {"act": "gelu", "bias": True},
    "gelu_tanh, fp32": {"act": "gelu_tanh", "dtype": FP32},
    "odd": {"C": 1000},
    "wide": {"C": 14336},
    "wide, odd, silu, bias": {"C": 5000, "act": "silu", "bias": True},
    "several steps": {"C": 20480},
    "several odd steps, silu, bias": {"C": 9000, "act": "silu", "bias": True},
}


def _row_linear(
    C: int = 2048, dtype: torch.dtype = BF16, bias: bool = False, act: Activation | None = None
) -> None:
    weight, of_output = zeros(512, C, dtype=dtype), zeros(512, dtype=dtype) if bias else None
    gemv(zeros(1, C, dtype=dtype), weight, of_output, act)


ADDITIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "one": {"sizes": (4096,), "ranks": (16,), "of_bs": False},
    "fp16, bias, odd": {"sizes": (1000, 200), "ranks": (5, 20), "dtype": FP16, "bias": True},
    "fp32": {"dtype": FP32},
    "parameters in fp32": {"own": FP32},
    "one strip": {"sizes": (64,), "ranks": (4,)},  # integers of 1 are constants to Triton
}


def _low_rank(
    sizes: tuple[int, ...] = (4096, 1024, 1024),
    ranks: tuple[int, ...] = (16, 16, 16),
    dtype: torch.dtype = BF16,
    own: torch.dtype | None = None,
    bias: bool = False,
    of_bs: bool = True,
) -> None:
    u, columns = zeros(512, sum(ranks), dtype=dtype), sum(sizes)
    bs = [zeros(K, r, dtype=own or dtype) for K, r in zip(sizes, ranks, strict=True)]
    firsts, scales = [sum(sizes[:i]) for i in range(len(sizes))], [2.0] * len(sizes)
    added = zeros(columns, dtype=dtype) if bias else None
    low_rank_product(u, bs, firsts, scales, columns, added, False)
    low_rank_product(u, [zeros(sum(ranks), 4096, dtype=own or dtype)], [0], [1.0], 4096, None, True)
    low_rank_gradients(zeros(512, columns, dtype=dtype), u, bs, firsts, scales, of_bs)


def _dropout(C: int, dtype: torch.dtype) -> None:
    dropout = Dropout(zeros(512, dtype=torch.int64), -(2**60) - 1, 0.1)
    backward(apply_dropout(zeros(512, C, dtype=dtype, grad=True), dropout))
    given = zeros(512, 16, dtype=dtype), [zeros(16, C, dtype=dtype)], [0], [1.0], C, None, True
    low_rank_product(*given, dropout.keys, dropout.seed, dropout.threshold)


FEW_BITS: dict[str, tuple[list[tuple[int, int]], torch.dtype]] = {
    "bf16": ([(64, 512), (32, 512)], BF16),
    "fp32": ([(64, 512)], FP32),
    "odd": ([(5, 13), (7, 13)], FP16),
}


def _nf4(matrices: list[tuple[int, int]], dtype: torch.dtype) -> None:
    made = NF4Weight([rows for rows, _ in matrices], matrices[0][1], dtype)
    made.allocate(torch.device("cpu"))
    made.dequantize()


def _block_fp8(stored: torch.dtype) -> None:
    made = FP8Weight([256], 512, BF16, blocks=[(128, 128)], stored=stored)
    made.allocate(torch.device("cpu"))
    made.dequantize()


def _expert_rows() -> None:
    """Of tokens, and of what their routers chose, to several ranks and back."""
    places = zeros(64 * 3, dtype=torch.int64)
    for columns, dtype in (2048, BF16), (16, FP32):
        rows = spread_rows(zeros(64, columns, dtype=dtype), places, 3, 150)
        combine_rows(rows, places, None, 3)


def _softmax_topk(normalize: bool) -> None:
    """With a loss on all probabilities, and without."""
    logits = zeros(64, 128, grad=True)
    for used in (0, 2), (2,):
        found = softmax_topk(logits, 8, normalize=normalize)
        backward(*(found[i] for i in used))


def _buffers(dtype: torch.dtype) -> one_shot_all_reduce.SymmetricBuffers:
    """Of two ranks."""
    shape = one_shot_all_reduce.TURNS, 2, one_shot_all_reduce.P * one_shot_all_reduce.S
    own = zeros(*shape, dtype=one_shot_all_reduce.BITS[dtype])
    addresses, turns = zeros(2, dtype=torch.int64), zeros(one_shot_all_reduce.P, dtype=INT32)
    return one_shot_all_reduce.SymmetricBuffers(own, addresses, turns, 0, dtype)


def _one_shot_norm(
    dtype: torch.dtype, C: int, N: int = 2, offset: float = 0.0, before: bool = True
) -> None:
    x, stream, weight = zeros(N, C, dtype=dtype), zeros(N, C, dtype=dtype), zeros(C, dtype=dtype)
    buffers = _buffers(dtype)
    one_shot_all_reduce.one_shot_all_reduce_norm(
        x, stream, weight, 1e-5, buffers, offset=offset, before=before
    )


def _one_shot_sum(dtype: torch.dtype, size: int | None = None) -> None:
    """A token's 4,096 elements."""
    buffers = _buffers(dtype)
    if size is None:
        one_shot_all_reduce.one_shot_all_reduce(zeros(4096, dtype=dtype), buffers)
    else:
        one_shot_all_reduce.one_shot_all_gather(zeros(2, 64, dtype=dtype), 64, size, buffers)


EXPERTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, fp32 weights, gelu": {"dtype": FP16, "weights": FP32, "act": "gelu"},
    "gelu_tanh": {"act": "gelu_tanh"},
    "one": {"N": 1, "k": 1},
    "gpt-oss": {"act": ClampedSwiGLU(1.702, 7.0), "biased": True, "transposed": True},
    "biases": {"biased": True},
}


def _grouped_mlp(
    N: int = 64,
    k: int = 2,
    C: int = 256,
    inner: int = 128,
    experts: int = 8,
    dtype: torch.dtype = BF16,
    weights: torch.dtype = BF16,
    act: Activation | ClampedSwiGLU = "silu",
    biased: bool = False,
    transposed: bool = False,
) -> None:
    x = zeros(N, C, dtype=dtype, grad=True)
    sizes = (C, 2 * inner, inner, C) if transposed else (2 * inner, C, C, inner)
    gate_up = zeros(experts, *sizes[:2], dtype=dtype, grad=True)
    down = zeros(experts, *sizes[2:], dtype=dtype, grad=True)
    biases = None
    if biased:
        shapes = (experts, 2 * inner), (experts, C)
        biases = ExpertBiases(*(zeros(*shape, dtype=dtype, grad=True) for shape in shapes))
    given = zeros(N, k, dtype=torch.int64), zeros(N, k, dtype=weights, grad=True), act
    backward(grouped_mlp(x, gate_up, down, *given, biases=biases, transposed=transposed))
