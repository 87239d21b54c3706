"""Rotary position embedding, also of a packed projection whose heads are split and normed.

# B batch, T tokens, N = B * T, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
# P programs that share the tokens of a block of heads in the backward pass
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.norm.rms_norm import Cast, check_norm, rms_norm_ref
from tigon.kernels.recompute import has_function_mode
from tigon.kernels.runtime import (
    check_devices,
    is_transformed,
    num_sms,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

# Elements and warps of one program's tile, which is some heads of one token; with norms, NORMED
LAUNCH = (1024, 2)
NORMED = (1024, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns x with pairs of its first R dims rotated by cos and sin [..., R/2], in fp32."""
    r = 2 * cos.shape[-1]
    whole = r == x.shape[-1]
    rotated = (x if whole else x[..., :r]).float()
    if interleaved:
        x1, x2 = rotated[..., 0::2], rotated[..., 1::2]
    else:
        x1, x2 = rotated.chunk(2, dim=-1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)
    y = y.to(x.dtype)
    return y if whole else torch.cat((y, x[..., r:]), -1)


def rope_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns q and k, the first R dims of every head rotated by the angles of its position, fp32
    inside: the definition of `rope`."""
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)  # [B, T, 1, R/2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@triton.jit
def token_pointers(x, batch, token, heads, D):
    """Returns the pointer to a token of `x`, a tuple `Heads`, and the offsets of its heads."""
    rows = heads * D if x[4] is None else heads.to(tl.int64) * x[4]
    return x[0] + x[1] + batch * x[2] + token * x[3], rows


@triton.jit
def load_pairs(x, rows, keep, HALF, BLOCK, INTERLEAVED):
    """Loads first and second members of every pair in fp32, [HEADS, BLOCK] each, HALF of BLOCK
    valid.

    `rows` [HEADS] are the offsets of the heads from `x`, `keep` says which exist.
    """
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK)
        mask = keep[:, None] & (i < 2 * HALF)[None, :]
        pairs = tl.load(x + rows[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, (rows.shape[0], BLOCK, 2)))
    else:
        i = tl.arange(0, BLOCK)
        mask = keep[:, None] & (i < HALF)[None, :]
        at = x + rows[:, None] + i[None, :]
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(y, rows, keep, first, second, HALF, BLOCK, INTERLEAVED):
    """Stores first and second members of pairs, in the layout that `load_pairs` reads."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK)
        mask = keep[:, None] & (i < 2 * HALF)[None, :]
        tl.store(y + rows[:, None] + i[None, :], tl.interleave(first, second), mask=mask)
    else:
        i = tl.arange(0, BLOCK)
        mask = keep[:, None] & (i < HALF)[None, :]
        at = y + rows[:, None] + i[None, :]
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)


@triton.jit
def load_rest(x, rows, keep, START, D, BLOCK):
    """Loads the dims from START on."""
    i = START + tl.arange(0, BLOCK)
    mask = keep[:, None] & (i < D)[None, :]
    return tl.load(x + rows[:, None] + i[None, :], mask=mask, other=0.0)


@triton.jit
def store_rest(y, rows, keep, values, START, D, BLOCK):
    """Stores the dims from START on."""
    i = START + tl.arange(0, BLOCK)
    mask = keep[:, None] & (i < D)[None, :]
    tl.store(y + rows[:, None] + i[None, :], values, mask=mask)


@triton.jit
def load_angles(angles, batch, token, HEADS, HALF, BLOCK):
    """Loads cosines and sines of one token, [HEADS, BLOCK] each.

    Broadcasting a load of one row would go through shared memory.
    """
    i = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    at = batch * angles[2] + token * angles[3]
    c = tl.load(angles[0] + at + i, mask=i < HALF, other=0.0).to(tl.float32)
    s = tl.load(angles[1] + at + i, mask=i < HALF, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def load_rotated(heads, dims, mask, angles, at, HALF: tl.constexpr, EVEN: tl.constexpr):
    """Loads dims of heads [HEADS, 1], rotated in halves: [HEADS, BLOCK].

    Rounded as in `rope`, except for the last bit where the compiler fuses a product with the sum.
    `at` [HEADS, 1] is where the angles of a head's token begin. EVEN divides HALF.
    """
    inside = mask & (dims < 2 * HALF)[None, :]
    angle = tl.where(dims < HALF, dims, dims - HALF)
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    # What Triton cannot tell: both are consecutive in parts of EVEN
    angle = tl.max_contiguous(tl.multiple_of(angle, EVEN), EVEN)[None, :]
    other = tl.max_contiguous(tl.multiple_of(other, EVEN), EVEN)[None, :]
    x = tl.load(heads + dims[None, :], mask=mask, other=0.0)
    y = tl.load(heads + other, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(angles[0] + at + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(angles[1] + at + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.where((dims < HALF)[None, :], -s, s)
    return (x.to(tl.float32) * c + y * s).to(x.dtype)


@triton.jit
def effective_weight(weight, offset, AFTER):
    """Returns offset + weight in fp32, rounded where the definition of the norm rounds it."""
    total = weight.to(tl.float32) + offset
    if not AFTER:
        total = total.to(weight.dtype).to(tl.float32)
    return total


@triton.jit
def load_weight(weight, offset, HEADS: tl.constexpr, HALF, BLOCK, INTERLEAVED, AFTER):
    """Loads offset + weight of the rotated dims as pairs [HEADS, BLOCK], all rows the same."""
    rows = tl.zeros((HEADS,), tl.int32)
    first, second = load_pairs(weight, rows, rows == 0, HALF, BLOCK, INTERLEAVED)
    first, second = first.to(weight.dtype.element_ty), second.to(weight.dtype.element_ty)
    return effective_weight(first, offset, AFTER), effective_weight(second, offset, AFTER)


@triton.jit
def _apply_weight(h, w, dtype, AFTER):
    """Returns h * w rounded to dtype, in the cast order."""
    if not AFTER:
        h = h.to(dtype).to(tl.float32)
    return (h * w).to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x, y, weight, angles, norm, batch, token, block, COUNT, HEADS, DIMS, AFTER, BACK,
    COPY: tl.constexpr,
):  # fmt: skip
    """Rotates heads from `block * HEADS` on of one token's COUNT; a weight norms them first.

    Without COPY they are rotated in place, not to y, and dims that pass through are not written.
    """
    D: tl.constexpr = DIMS[0]
    HALF: tl.constexpr = DIMS[1]
    BLOCK: tl.constexpr = DIMS[2]
    REST: tl.constexpr = DIMS[3]
    INTERLEAVED: tl.constexpr = DIMS[4]
    heads = block * HEADS + tl.arange(0, HEADS)
    keep = heads < COUNT
    x, rows = token_pointers(x, batch, token, heads, D)
    if COPY:
        y, to_rows = token_pointers(y, batch, token, heads, D)
    else:
        y, to_rows = x, rows
    c, s = load_angles(angles, batch, token, HEADS, HALF, BLOCK)
    if BACK:
        s = -s
    a, b = load_pairs(x, rows, keep, HALF, BLOCK, INTERLEAVED)
    if not COPY:
        # Of a tile with fewer elements than the program has threads, several threads load the same
        # one: all of them before the first writes
        tl.debug_barrier()
    if COPY and 2 * HALF < D:
        rest = load_rest(x, rows, keep, 2 * HALF, D, REST)
    if weight is not None:
        dtype: tl.constexpr = y.dtype.element_ty
        wa, wb = load_weight(weight, norm[1], HEADS, HALF, BLOCK, INTERLEAVED, AFTER)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < D:
            rest = rest.to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(squares / D + norm[0])[:, None]
        a, b = _apply_weight(a * rstd, wa, dtype, AFTER), _apply_weight(b * rstd, wb, dtype, AFTER)
        if 2 * HALF < D:
            w = load_rest(weight, heads * 0, keep, 2 * HALF, D, REST)
            rest = _apply_weight(rest * rstd, effective_weight(w, norm[1], AFTER), dtype, AFTER)
    store_pairs(y, to_rows, keep, a * c - b * s, b * c + a * s, HALF, BLOCK, INTERLEAVED)
    if COPY and 2 * HALF < D:
        store_rest(y, to_rows, keep, rest, 2 * HALF, D, REST)


@triton.jit(do_not_specialize_on_alignment=["T"])  # a token, as in decoding, needs no division
def _rope_kernel(
    q,  # the six tensors as `Heads`; v and yv may be None, and yq and yk to write over q and k
    k, v, yq, yk, yv,
    weights,  # of the norms of q and k [D] each, None for no norm
    angles,  # what `angles` gives
    norm,  # eps and offset
    T,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIMS: tl.constexpr,  # what `dims` gives
    WHOLE: tl.constexpr, AFTER: tl.constexpr, BACK: tl.constexpr,
    COPY: tl.constexpr,  # to yq and yk; Triton 3.6 compares no tuple that has a None with None
    VALUES: tl.constexpr,  # there is a v
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile is some heads of one token's q, of its k, or of its v, which is only copied."""
    pdl_wait(PDL)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + KV_HEADS - 1) // KV_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS + (K_BLOCKS if VALUES else 0)
    at = tl.program_id(0) // BLOCKS
    i = tl.program_id(0) % BLOCKS
    b, t = (at // T).to(tl.int64), (at % T).to(tl.int64)
    if i < Q_BLOCKS:
        _rotate_heads(
            q, yq, weights[0], angles, norm, b, t, i, H, HEADS, DIMS, AFTER, BACK, COPY
        )  # fmt: skip
    elif i < Q_BLOCKS + K_BLOCKS:
        i -= Q_BLOCKS
        _rotate_heads(
            k, yk, weights[1], angles, norm, b, t, i, K, KV_HEADS, DIMS, AFTER, BACK, COPY
        )  # fmt: skip
    elif VALUES:
        heads = (i - Q_BLOCKS - K_BLOCKS) * KV_HEADS + tl.arange(0, KV_HEADS)
        x, rows = token_pointers(v, b, t, heads, DIMS[0])
        y, to_rows = token_pointers(yv, b, t, heads, DIMS[0])
        values = load_rest(x, rows, heads < K, 0, DIMS[0], WHOLE)
        store_rest(y, to_rows, heads < K, values, 0, DIMS[0], WHOLE)


# What kernels take of heads: tensor, where they begin, strides per batch row, token and head; a
# head's stride of None is D, known when the kernel is compiled
Heads = tuple[Tensor, int, int, int, int | None]


def separate_heads(x: Tensor) -> Heads:
    """Returns the heads of x [B, T, heads, D] as `Heads`."""
    x = with_contiguous_dim(x)
    return (x, 0, *x.stride()[:3])  # type: ignore[return-value]


def packed_heads(x: Tensor, start: int = 0) -> Heads:
    """Returns adjacent heads of x [B, T, heads * D] or [B, T, heads, D] from element `start` on."""
    return (x, start, *x.stride()[:2], None)  # type: ignore[return-value]


def with_contiguous_dim(x: Tensor) -> Tensor:
    """Returns `x` with adjacent elements in its last dimension: a copy only if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Returns cos and sin with equal strides, and these per batch row and per token."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)


def dims(head_dim: int, half: int, interleaved: bool) -> tuple[int, int, int, int, bool]:
    """Returns D, HALF = R / 2, tile widths for HALF and for the D - R that pass, the layout."""
    block = triton.next_power_of_2(max(half, 1))
    rest = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    return head_dim, half, block, rest, interleaved


def heads_per_tile(heads: int, head_dim: int, tile: int) -> int:
    """Returns how many heads of one token a tile of `tile` elements has: a power of two."""
    return min(
        triton.next_power_of_2(max(1, heads)), max(1, tile // int(triton.next_power_of_2(head_dim)))
    )


def launch_rope(
    inputs: tuple[Heads, Heads, Heads | None],  # q, k and, to be copied, v
    outputs: tuple[Heads | None, Heads | None, Heads | None],  # None: in place, without weights
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool,
    *,
    back: bool = False,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
    norm: tuple[float, float] = (0.0, 0.0),  # eps and offset
    after: bool = False,  # round after the weight
) -> None:
    """Norms heads, if there are weights, and rotates them, by the negative angles if `back`."""
    q, _, v = inputs
    b, t = q[0].shape[:2]
    if not b * t:
        return
    tile, warps = LAUNCH if weights[0] is None else NORMED
    per_tile = heads_per_tile(heads, head_dim, tile)
    kv_per_tile = heads_per_tile(kv_heads, head_dim, tile)
    kv_blocks = triton.cdiv(kv_heads, kv_per_tile) * (1 if v is None else 2)
    _rope_kernel[(b * t * (triton.cdiv(heads, per_tile) + kv_blocks),)](
        *inputs, *outputs, weights, angles(cos, sin), norm, t,
        H=heads, K=kv_heads, HEADS=per_tile, KV_HEADS=kv_per_tile,
        DIMS=dims(head_dim, cos.shape[-1], interleaved), WHOLE=triton.next_power_of_2(head_dim),
        AFTER=after, BACK=back, COPY=outputs[0] is not None, VALUES=v is not None, num_warps=warps,
        **pdl_options(q[0]),
    )  # fmt: skip


def _rope_outputs(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the rotated q and k."""
    return q.new_empty(q.shape), k.new_empty(k.shape)


@operator("rope", _rope_outputs)
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """Returns rotated copies of q and k, by the kernel; `back` negates the angles."""
    yq, yk = _rope_outputs(q, k)
    inputs = separate_heads(q), separate_heads(k), None
    outputs = packed_heads(yq), packed_heads(yk), None
    sizes = q.shape[2], k.shape[2], q.shape[3]
    launch_rope(inputs, outputs, cos, sin, *sizes, interleaved, back=back)
    return yq, yk


class _Rope(torch.autograd.Function):
    """Rotates q and k; backward rotates their gradients by the negative angles."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rope(q, k, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rope")
        return *_rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def check_angles(cos: Tensor, sin: Tensor, batch: int, tokens: int, head_dim: int) -> None:
    """Raises ValueError unless cos and sin fit the heads [B, T, ..., D]."""
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"cos rotates {2 * cos.shape[-1]} dims, but heads have {head_dim}")
    if cos.shape != sin.shape or cos.shape[:-1] not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are not [B or 1, T, R/2] with "
            f"B={batch} and T={tokens}"
        )


def rope(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, T, K, D]
    cos: Tensor,  # [B or 1, T, R/2]
    sin: Tensor,  # [B or 1, T, R/2]
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns rotated copies of `q` and `k`.

    Pairs are dims (i, i + R/2), or (2i, 2i + 1) when interleaved; dims from R on pass through.
    Source: Su et al. 2021 (arXiv 2104.09864), in the half-rotation layout of transformers.
    """
    check_devices(q=q, k=k, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] + q.shape[3:] != k.shape[:2] + k.shape[3:]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} are not [B, T, heads, D] "
            "with the same B, T and D"
        )
    check_angles(cos, sin, q.shape[0], q.shape[1], q.shape[3])
    angles_learn = cos.requires_grad or sin.requires_grad
    if angles_learn or not (runs_triton(q) and runs_triton(k)):
        return rope_ref(q, k, cos, sin, interleaved=interleaved)
    return _Rope.apply(q, k, cos, sin, interleaved)


# Splits a packed projection into the heads of q, k and v, norms and rotates them

# Of the backward pass: elements and warps of one program's tile, which is some heads of one token
BACKWARD = (1024, 2)
# Programs on each multiprocessor, and stages of their loop over tokens
RESIDENT = 4
STAGES = tl.constexpr(4)
# Rows and columns of one step of the sum over programs
SUM = (256, 16)


def qk_norm_rope_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k, normed by head where there are weights and then rotated, and v as it is,
    [B, T, heads, D] each: the definition of `qk_norm_rope`."""
    q, k, v = _split(qkv, heads, kv_heads)
    if q_weight is not None and k_weight is not None:
        q = rms_norm_ref(q, q_weight, eps, offset=offset, cast=cast)
        k = rms_norm_ref(k, k_weight, eps, offset=offset, cast=cast)
    return *rope_ref(q, k, cos, sin, interleaved=interleaved), v


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views [B, T, heads, D] of q, k and v."""
    total = heads + 2 * kv_heads
    packed = qkv.view(*qkv.shape[:-1], total, qkv.shape[-1] // total)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q, k, v


@triton.jit
def _norm_heads_backward(
    part, weight, angles, norm, sums, walk, block, COUNT, HEADS, DIMS, AFTER, WEIGHT_GRAD
):
    """Differentiates heads from `block * HEADS` on, of every P-th token; `sums` are weights'."""
    D: tl.constexpr = DIMS[0]
    HALF: tl.constexpr = DIMS[1]
    BLOCK: tl.constexpr = DIMS[2]
    REST: tl.constexpr = DIMS[3]
    INTERLEAVED: tl.constexpr = DIMS[4]
    first, P, N, T = walk
    heads = block * HEADS + tl.arange(0, HEADS)
    keep = heads < COUNT
    row = tl.zeros((1,), tl.int32)
    wa, wb = load_weight(weight, norm[1], HEADS, HALF, BLOCK, INTERLEAVED, AFTER)
    sum_a = tl.zeros((HEADS, BLOCK), tl.float32)
    sum_b = tl.zeros((HEADS, BLOCK), tl.float32)
    if 2 * HALF < D:
        w = effective_weight(load_rest(weight, heads * 0, keep, 2 * HALF, D, REST), norm[1], AFTER)
        sum_rest = tl.zeros((HEADS, REST), tl.float32)
    for at in tl.range(first, N, P, num_stages=STAGES):
        batch, token = (at // T).to(tl.int64), (at % T).to(tl.int64)
        c, s = load_angles(angles, batch, token, HEADS, HALF, BLOCK)
        inside, rows = token_pointers(part[1], batch, token, heads, D)
        a, b = load_pairs(inside, rows, keep, HALF, BLOCK, INTERLEAVED)
        up, up_rows = token_pointers(part[0], batch, token, heads, D)
        ga, gb = load_pairs(up, up_rows, keep, HALF, BLOCK, INTERLEAVED)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < D:
            rest = load_rest(inside, rows, keep, 2 * HALF, D, REST).to(tl.float32)
            g = load_rest(up, up_rows, keep, 2 * HALF, D, REST).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(squares / D + norm[0])[:, None]
        a, b = a * rstd, b * rstd
        ga, gb = ga * c + gb * s, gb * c - ga * s
        if WEIGHT_GRAD:
            sum_a += ga * a
            sum_b += gb * b
        ga, gb = ga * wa, gb * wb
        dot = tl.sum(ga * a, 1) + tl.sum(gb * b, 1)
        if 2 * HALF < D:
            rest *= rstd
            if WEIGHT_GRAD:
                sum_rest += g * rest
            g *= w
            dot += tl.sum(g * rest, 1)
        dot = dot[:, None] / D
        out, out_rows = token_pointers(part[2], batch, token, heads, D)
        ga, gb = rstd * (ga - a * dot), rstd * (gb - b * dot)
        store_pairs(out, out_rows, keep, ga, gb, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < D:
            store_rest(out, out_rows, keep, rstd * (g - rest * dot), 2 * HALF, D, REST)
    if WEIGHT_GRAD:
        total_a, total_b = tl.sum(sum_a, 0)[None, :], tl.sum(sum_b, 0)[None, :]
        store_pairs(sums, row, row == 0, total_a, total_b, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < D:
            store_rest(sums, row, row == 0, tl.sum(sum_rest, 0)[None, :], 2 * HALF, D, REST)


@triton.jit(do_not_specialize=["P", "N", "T"])
def _qk_norm_rope_backward_kernel(
    q,  # each of these three: upstream gradient, input and gradient, as `Heads`
    k, v,
    weights,  # of q and k, [D] each
    angles,
    norm,  # eps and offset
    partials,  # [blocks of q and k, P, D]
    P, N, T,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIMS: tl.constexpr, WHOLE: tl.constexpr, AFTER: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of qkv and partial sums of the weights' gradients."""
    D: tl.constexpr = DIMS[0]
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + KV_HEADS - 1) // KV_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * K_BLOCKS
    first = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    sums = partials + (block * P + first) * D
    walk = first, P, N, T
    if block < Q_BLOCKS:
        _norm_heads_backward(
            q, weights[0], angles, norm, sums, walk, block, H, HEADS, DIMS, AFTER, WEIGHT_GRAD
        )
    elif block < Q_BLOCKS + K_BLOCKS:
        block -= Q_BLOCKS
        _norm_heads_backward(
            k, weights[1], angles, norm, sums, walk, block, K, KV_HEADS, DIMS, AFTER, WEIGHT_GRAD
        )
    else:
        heads = (block - Q_BLOCKS - K_BLOCKS) * KV_HEADS + tl.arange(0, KV_HEADS)
        for at in tl.range(first, N, P, num_stages=STAGES):
            batch, token = (at // T).to(tl.int64), (at % T).to(tl.int64)
            up, rows = token_pointers(v[0], batch, token, heads, D)
            values = load_rest(up, rows, heads < K, 0, D, WHOLE)
            out, out_rows = token_pointers(v[1], batch, token, heads, D)
            store_rest(out, out_rows, heads < K, values, 0, D, WHOLE)


@triton.jit
def _sum_rows(x, y, N, D, ROWS, COLS):
    """Sums x [N, D] over its rows to y [D], for the program's COLS columns."""
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < N)[:, None] & (cols < D)[None, :]
        total += tl.load(x + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(y + cols, tl.sum(total, 0), mask=cols < D)


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def _weight_gradient_kernel(
    partials, dwq, dwk, q_rows, k_rows, D, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Adds up the partial weight gradients of q in the first row of programs, of k in the next."""
    if tl.program_id(0) == 0:
        _sum_rows(partials, dwq, q_rows, D, ROWS, COLS)
    else:
        _sum_rows(partials + q_rows * D, dwk, k_rows, D, ROWS, COLS)


def _parts(x: Tensor, heads: int, kv_heads: int, d: int) -> tuple[Heads, Heads, Heads]:
    """Returns q, k and v in x [B, T, (H + 2K) * D]."""
    return packed_heads(x), packed_heads(x, heads * d), packed_heads(x, (heads + kv_heads) * d)


def _outputs(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Any, k_weight: Any, h: int, k: int, *_: Any
) -> tuple[Tensor, Tensor]:
    """Allocates q [B, T, H, D] and k [B, T, K, D]."""
    b, t, row = qkv.shape
    d = row // (h + 2 * k)
    return qkv.new_empty(b, t, h, d), qkv.new_empty(b, t, k, d)


@operator("qk_norm_rope", _outputs)
def _forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
    offset: float,
    after: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Norms and rotates the heads of q and k; returns `_outputs`."""
    q, k = _outputs(qkv, cos, sin, q_weight, k_weight, heads, kv_heads)
    d = q.shape[3]
    inputs = packed_heads(qkv), packed_heads(qkv, heads * d), None
    outputs = packed_heads(q), packed_heads(k), None
    options = dict[str, Any]()
    if q_weight is not None and k_weight is not None:
        weights = q_weight.contiguous(), k_weight.contiguous()
        options = {"weights": weights, "norm": (eps, offset), "after": after}
    launch_rope(inputs, outputs, cos, sin, heads, kv_heads, d, interleaved, **options)
    return q, k


@operator("packed_rope", lambda qkv, *_: qkv.new_empty(qkv.shape))
def _packed_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool
) -> Tensor:
    """Returns q and k rotated and v as it is, packed like `qkv`."""
    y, d = qkv.new_empty(qkv.shape), qkv.shape[-1] // (heads + 2 * kv_heads)
    parts, outputs = (_parts(x, heads, kv_heads, d) for x in (qkv, y))
    launch_rope(parts, outputs, cos, sin, heads, kv_heads, d, interleaved)
    return y


def _rotate_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool
) -> Tensor:
    """Rotates q and k inside a contiguous `qkv` and returns it; a new one under dispatch modes."""
    if torch._C._len_torch_dispatch_stack():  # modes see ops, and may keep what ops return
        return _packed_rope(qkv, cos, sin, heads, kv_heads, interleaved)
    if not qkv.is_meta:
        d = qkv.shape[-1] // (heads + 2 * kv_heads)
        inputs = packed_heads(qkv), packed_heads(qkv, heads * d), None
        with torch.cuda.device_of(qkv):
            launch_rope(inputs, (None,) * 3, cos, sin, heads, kv_heads, d, interleaved)
    # Whoever has saved qkv nevertheless gets an error, not other numbers
    torch.autograd.graph.increment_version(qkv)
    return qkv


def _gradients(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    weight_grad: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of qkv and of the weights, empty if these need none."""
    b, t, heads, d = dq.shape
    dx = dq.new_empty(b, t, (heads + 2 * dk.shape[2]) * d)
    if not weight_grad or q_weight is None or k_weight is None:
        return dx, dq.new_empty(0), dq.new_empty(0)
    return dx, q_weight.new_empty(d), k_weight.new_empty(d)


@operator("qk_norm_rope_backward", _gradients)
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    weight_grad: bool,
    qkv: Tensor | None,  # with the weights
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    after: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of qkv and of both weights."""
    dx, dwq, dwk = gradients = _gradients(dq, dk, dv, q_weight, k_weight, weight_grad)
    (b, t, heads, d), kv_heads = dq.shape, dk.shape[2]
    ups = separate_heads(dq), separate_heads(dk), separate_heads(dv)
    outputs = _parts(dx, heads, kv_heads, d)
    if qkv is None or q_weight is None or k_weight is None:
        launch_rope(ups, outputs, cos, sin, heads, kv_heads, d, interleaved, back=True)
        return gradients
    inputs = _parts(qkv, heads, kv_heads, d)
    tile, warps = BACKWARD
    per_tile, kv_per_tile = heads_per_tile(heads, d, tile), heads_per_tile(kv_heads, d, tile)
    q_blocks, k_blocks = triton.cdiv(heads, per_tile), triton.cdiv(kv_heads, kv_per_tile)
    blocks = q_blocks + 2 * k_blocks
    programs = max(1, min(b * t, RESIDENT * num_sms(dq) // blocks))
    rows = q_blocks * programs, k_blocks * programs
    partials = dx.new_empty(sum(rows) * dwq.numel(), dtype=torch.float32)
    _qk_norm_rope_backward_kernel[(programs * blocks,)](
        (ups[0], inputs[0], outputs[0]), (ups[1], inputs[1], outputs[1]), (ups[2], outputs[2]),
        (q_weight.contiguous(), k_weight.contiguous()), angles(cos, sin), (eps, offset), partials,
        programs, b * t, t,
        H=heads, K=kv_heads, HEADS=per_tile, KV_HEADS=kv_per_tile,
        DIMS=dims(d, cos.shape[-1], interleaved), WHOLE=triton.next_power_of_2(d), AFTER=after,
        WEIGHT_GRAD=weight_grad, num_warps=warps,
    )  # fmt: skip
    if weight_grad:
        step, cols = SUM
        grid = (2, triton.cdiv(d, cols))
        _weight_gradient_kernel[grid](partials, dwq, dwk, *rows, d, ROWS=step, COLS=cols)
    return gradients


class _QKNormRope(torch.autograd.Function):
    """`qk_norm_rope` with its gradients; backward writes that of `qkv` in one piece."""

    @staticmethod
    def forward(ctx: Any, overwrite: bool, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cos, sin, q_weight, k_weight, heads, kv_heads, *options = args  # as of `_forward`
        ctx.save_for_backward(q_weight, k_weight, None if q_weight is None else qkv, cos, sin)
        ctx.options = options
        if overwrite:
            packed = _rotate_in_place(qkv, cos, sin, heads, kv_heads, options[-1])
            return _split(packed, heads, kv_heads)
        q, k = _forward(*args)
        return q, k, _split(qkv, heads, kv_heads)[2]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("qk_norm_rope")
        needs = ctx.needs_input_grad[4:6]
        q_weight, k_weight, *rest = ctx.saved_tensors
        computed = _backward(dq, dk, dv, q_weight, k_weight, any(needs), *rest, *ctx.options)
        dx, dwq, dwk = computed
        weights = dwq if needs[0] else None, dwk if needs[1] else None
        return None, dx, None, None, *weights, *6 * (None,)


def _may_overwrite(qkv: Tensor) -> bool:
    """Whether nothing else can need the memory of `qkv`, and a graph would save it."""
    if torch.compiler.is_compiling() or type(qkv) is not Tensor or is_transformed(qkv):
        return False
    base = qkv if qkv._base is None else qkv._base
    # What has no gradient is a leaf
    belongs_to_leaf = qkv.is_leaf or (base.is_leaf and base.requires_grad)
    full = qkv.untyped_storage().nbytes() == qkv.numel() * qkv.element_size()
    exclusive = full and not belongs_to_leaf and qkv.is_contiguous()
    return exclusive and torch.is_grad_enabled() and not has_function_mode()


def qk_norm_rope(
    qkv: Tensor,  # [B, T, (H + 2K) * D], the heads of q, then k, then v
    cos: Tensor,  # [B or 1, T, R/2]
    sin: Tensor,  # [B or 1, T, R/2]
    *,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,  # [D]
    k_weight: Tensor | None = None,  # [D]
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    interleaved: bool = False,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [B, T, H, D], k and v [B, T, K, D]: q and k normed if there are weights, and
    rotated.

    `rms_norm` of every head of q and k, then `rope`; v is a view of `qkv`. The backward pass writes
    the gradient of `qkv` in one piece. The norm before the rotation is that of Qwen3 (arXiv
    2505.09388) and Gemma 3 (arXiv 2503.19786).

    With `overwrite` the caller promises that nothing else reads `qkv`. If a graph would save it and
    there are no weights, whose gradient needs it, q and k may be rotated in place, and all three
    are views of it.
    """
    check_devices(qkv=qkv, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight)
    total = heads + 2 * kv_heads
    if qkv.dim() != 3 or qkv.shape[-1] % total:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} is not [B, T, ({heads} + 2 * {kv_heads}) * head_dim]"
        )
    b, t, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // total
    check_angles(cos, sin, b, t, d)
    check_norm(eps, offset, cast)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("give q_weight and k_weight, or neither")
    for name, weight in ("q_weight", q_weight), ("k_weight", k_weight):
        if weight is not None and weight.shape != (d,):
            raise ValueError(f"{name} {tuple(weight.shape)} does not fit heads of {d} dims")
    if cos.requires_grad or sin.requires_grad or not runs_triton(qkv):
        norm: dict[str, Any] = {"eps": eps, "offset": offset, "cast": cast}
        norm |= {"q_weight": q_weight, "k_weight": k_weight}
        layout: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
        return qk_norm_rope_ref(qkv, cos, sin, **layout, **norm, interleaved=interleaved)
    after = cast == "after_weight"
    options = heads, kv_heads, eps, offset, after, interleaved
    overwrite = overwrite and q_weight is None and _may_overwrite(qkv)
    return _QKNormRope.apply(
        overwrite, with_contiguous_dim(qkv), cos, sin, q_weight, k_weight, *options
    )
