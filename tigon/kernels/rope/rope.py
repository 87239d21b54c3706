"""Rotary position embedding of queries and keys, of which a kernel can norm the heads first.

# B batch, T tokens, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.recompute import chain_recompute, find_recompute
from tigon.kernels.runtime import (
    check_devices,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from tigon.kernels.saved_sources import note_parts

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


@operator("rope", lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)))
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """Returns rotated copies of q and k, by the kernel; `back` negates the angles."""
    yq, yk = q.new_empty(q.shape), k.new_empty(k.shape)
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
        out = _rope(q, k, cos, sin, interleaved, False)
        if not torch.compiler.is_compiling() and find_recompute(q) is not None:
            compute, saved = chain_recompute(_rope, (q, k, cos, sin))
            note_parts(out, compute, saved, interleaved, False)
        return out

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
