"""Rotary position embedding.

# B batch, T tokens, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels._triton import (
    check_devices,
    closely,
    follow,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

# Elements and warps of one program's tile, which is some heads of one token
LAUNCH = (1024, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
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
    """Rotate the first R dims of every head by the angles of its position, fp32 inside."""
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)  # [B, T, 1, R/2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@triton.jit
def load_pairs(x, rows, keep, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of every pair in fp32, [HEADS, BLOCK] each; HALF of BLOCK exist.

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
def store_pairs(
    y, rows, keep, first, second, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
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
def load_rest(x, rows, keep, START: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Dims from START on."""
    i = START + tl.arange(0, BLOCK)
    mask = keep[:, None] & (i < D)[None, :]
    return tl.load(x + rows[:, None] + i[None, :], mask=mask, other=0.0)


@triton.jit
def store_rest(y, rows, keep, values, START: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    i = START + tl.arange(0, BLOCK)
    mask = keep[:, None] & (i < D)[None, :]
    tl.store(y + rows[:, None] + i[None, :], values, mask=mask)


@triton.jit
def load_angles(cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines of one token, [HEADS, BLOCK] each.

    A load of one row, to be broadcast, would reach the threads through shared memory.
    """
    i = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (HEADS, BLOCK))
    c = tl.load(cos + i, mask=i < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _turn_heads(
    x,
    y,
    x_head,
    block,
    cos,
    sin,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    """Heads `block * HEADS` and on, of one token's COUNT."""
    heads = block * HEADS + tl.arange(0, HEADS)
    keep = heads < COUNT
    rows = heads.to(tl.int64) * x_head
    c, s = load_angles(cos, sin, HEADS, HALF, BLOCK)
    if BACK:
        s = -s
    a, b = load_pairs(x, rows, keep, HALF, BLOCK, INTERLEAVED)
    store_pairs(y, heads * D, keep, a * c - b * s, b * c + a * s, HALF, BLOCK, INTERLEAVED)
    if 2 * HALF < D:
        rest = load_rest(x, rows, keep, 2 * HALF, D, REST)
        store_rest(y, heads * D, keep, rest, 2 * HALF, D, REST)


@triton.jit
def _rope_kernel(
    q,
    k,
    v,
    cos,
    sin,
    yq,
    yk,
    yv,
    T,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    angle_batch,
    angle_token,
    yq_token,
    yk_token,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    COPY_V: tl.constexpr,
    CLOSELY: tl.constexpr,
):
    follow(CLOSELY)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + KV_HEADS - 1) // KV_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + K_BLOCKS + (K_BLOCKS if COPY_V else 0)
    token = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    batch, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    token = token.to(tl.int64)
    cos += batch * angle_batch + t * angle_token
    sin += batch * angle_batch + t * angle_token
    if block < Q_BLOCKS:
        _turn_heads(
            q + batch * q_batch + t * q_token,
            yq + token * yq_token,
            q_head,
            block,
            cos,
            sin,
            H,
            D,
            HALF,
            BLOCK,
            REST,
            HEADS,
            INTERLEAVED,
            BACK,
        )
    elif block < Q_BLOCKS + K_BLOCKS:
        _turn_heads(
            k + batch * k_batch + t * k_token,
            yk + token * yk_token,
            k_head,
            block - Q_BLOCKS,
            cos,
            sin,
            K,
            D,
            HALF,
            BLOCK,
            REST,
            KV_HEADS,
            INTERLEAVED,
            BACK,
        )
    elif COPY_V:
        heads = (block - Q_BLOCKS - K_BLOCKS) * KV_HEADS + tl.arange(0, KV_HEADS)
        v += batch * v_batch + t * v_token
        values = load_rest(v, heads.to(tl.int64) * v_head, heads < K, 0, D, WHOLE)
        store_rest(yv + token * yk_token, heads * D, heads < K, values, 0, D, WHOLE)


def adjacent(x: Tensor) -> Tensor:
    """`x` with its last dimension's elements side by side: a copy only if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin with equal strides, and these per batch row and per token."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)


def dims(head_dim: int, half: int, interleaved: bool) -> dict[str, int | bool]:
    """The constants of a head; BLOCK and REST are widths of tiles."""
    block = triton.next_power_of_2(max(half, 1))
    rest = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    return {"D": head_dim, "HALF": half, "BLOCK": block, "REST": rest, "INTERLEAVED": interleaved}


def heads_per_tile(heads: int, head_dim: int, tile: int) -> int:
    return min(triton.next_power_of_2(heads), max(1, tile // int(triton.next_power_of_2(head_dim))))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,  # copied
    yq: Tensor,
    yk: Tensor,
    yv: Tensor | None,  # with the strides of yk
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    back: bool,
) -> None:
    """Rotates [B, T, heads, D] into the `y`, by the negative angles if `back`."""
    b, t, h, d = q.shape
    if not b * t:
        return
    q, k, v = adjacent(q), adjacent(k), None if v is None else adjacent(v)
    cos, sin, *angle_strides = angles(cos, sin)
    tile, warps = LAUNCH
    heads, kv_heads = heads_per_tile(h, d, tile), heads_per_tile(k.shape[2], d, tile)
    blocks = triton.cdiv(h, heads) + triton.cdiv(k.shape[2], kv_heads) * (1 if v is None else 2)
    _rope_kernel[(b * t * blocks,)](
        q,
        k,
        v,
        cos,
        sin,
        yq,
        yk,
        yv,
        t,
        *q.stride()[:3],
        *k.stride()[:3],
        *(k if v is None else v).stride()[:3],
        *angle_strides,
        yq.stride(1),
        yk.stride(1),
        H=h,
        K=k.shape[2],
        **dims(d, cos.shape[-1], interleaved),
        WHOLE=triton.next_power_of_2(d),
        HEADS=heads,
        KV_HEADS=kv_heads,
        BACK=back,
        COPY_V=v is not None,
        num_warps=warps,
        **closely(q),
    )


def _rope_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@operator("rope", _rope_fake)
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    yq, yk = q.new_empty(q.shape), k.new_empty(k.shape)
    launch(q, k, None, yq, yk, None, cos, sin, interleaved=interleaved, back=back)
    return yq, yk


class _Rope(torch.autograd.Function):
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
    """Rotated copies of `q` and `k`.

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
