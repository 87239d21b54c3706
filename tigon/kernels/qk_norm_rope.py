"""From the packed output of one projection to what attention takes: heads, normed and rotated.

# B batch, T tokens, N = B * T, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
# P programs that share the tokens of a block of heads in the backward pass
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels._triton import (
    check_devices,
    closely,
    follow,
    multiprocessors,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from tigon.kernels.rms_norm import Cast, check_norm, rms_norm_ref
from tigon.kernels.rope import (
    adjacent,
    angles,
    check_angles,
    dims,
    heads_per_tile,
    load_angles,
    load_pairs,
    load_rest,
    rope_ref,
    store_pairs,
    store_rest,
)
from tigon.kernels.rope import launch as launch_rope

# Elements and warps of one program's tile, which is some heads of one token
FORWARD = (1024, 1)
BACKWARD = (1024, 2)
# Of the backward pass: programs on each multiprocessor, and stages of their loop over tokens
RESIDENT = 4
STAGES = 4
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
    """RMSNorm of every head of q and k where there are weights, then RoPE; v as it is."""
    q, k, v = _split(qkv, heads, kv_heads)
    if q_weight is not None and k_weight is not None:
        q = rms_norm_ref(q, q_weight, eps, offset=offset, cast=cast)
        k = rms_norm_ref(k, k_weight, eps, offset=offset, cast=cast)
    return *rope_ref(q, k, cos, sin, interleaved=interleaved), v


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, T, heads, D] of q, k and v."""
    total = heads + 2 * kv_heads
    packed = qkv.view(*qkv.shape[:-1], total, qkv.shape[-1] // total)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q, k, v


@triton.jit
def _effective(weight, offset, AFTER: tl.constexpr):
    """offset + weight in fp32, rounded where the definition rounds it."""
    total = weight.to(tl.float32) + offset
    if not AFTER:
        total = total.to(weight.dtype).to(tl.float32)
    return total


@triton.jit
def _load_weight(
    weight,
    offset,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AFTER: tl.constexpr,
):
    """offset + weight of the rotated dims as pairs, [HEADS, BLOCK] each, all rows the same."""
    rows = tl.zeros((HEADS,), tl.int32)
    first, second = load_pairs(weight, rows, rows == 0, HALF, BLOCK, INTERLEAVED)
    first, second = first.to(weight.dtype.element_ty), second.to(weight.dtype.element_ty)
    return _effective(first, offset, AFTER), _effective(second, offset, AFTER)


@triton.jit
def _weigh(h, w, dtype: tl.constexpr, AFTER: tl.constexpr):
    """h * w rounded to dtype, in the cast order."""
    if not AFTER:
        h = h.to(dtype).to(tl.float32)
    return (h * w).to(dtype).to(tl.float32)


@triton.jit
def _norm_heads(
    x,
    y,
    weight,
    block,
    cos,
    sin,
    eps,
    offset,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Heads `block * HEADS` and on, of one token's COUNT."""
    dtype: tl.constexpr = y.dtype.element_ty
    heads = block * HEADS + tl.arange(0, HEADS)
    keep = heads < COUNT
    rows = heads * D
    c, s = load_angles(cos, sin, HEADS, HALF, BLOCK)
    wa, wb = _load_weight(weight, offset, HEADS, HALF, BLOCK, INTERLEAVED, AFTER)
    a, b = load_pairs(x, rows, keep, HALF, BLOCK, INTERLEAVED)
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if 2 * HALF < D:
        rest = load_rest(x, rows, keep, 2 * HALF, D, REST).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(squares / D + eps)[:, None]
    a, b = _weigh(a * rstd, wa, dtype, AFTER), _weigh(b * rstd, wb, dtype, AFTER)
    store_pairs(y, rows, keep, a * c - b * s, b * c + a * s, HALF, BLOCK, INTERLEAVED)
    if 2 * HALF < D:
        same = tl.zeros((HEADS,), tl.int32)
        w = _effective(load_rest(weight, same, keep, 2 * HALF, D, REST), offset, AFTER)
        store_rest(y, rows, keep, _weigh(rest * rstd, w, dtype, AFTER), 2 * HALF, D, REST)


@triton.jit
def _qk_norm_rope_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    yq,
    yk,
    T,
    x_batch,
    x_token,
    angle_batch,
    angle_token,
    eps,
    offset,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AFTER: tl.constexpr,
    CLOSELY: tl.constexpr,
):
    follow(CLOSELY)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (K + KV_HEADS - 1) // KV_HEADS
    token = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    batch, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    token = token.to(tl.int64)
    cos += batch * angle_batch + t * angle_token
    sin += batch * angle_batch + t * angle_token
    x = qkv + batch * x_batch + t * x_token
    if block < Q_BLOCKS:
        _norm_heads(
            x,
            yq + token * H * D,
            q_weight,
            block,
            cos,
            sin,
            eps,
            offset,
            H,
            D,
            HALF,
            BLOCK,
            REST,
            HEADS,
            INTERLEAVED,
            AFTER,
        )
    else:
        _norm_heads(
            x + H * D,
            yk + token * K * D,
            k_weight,
            block - Q_BLOCKS,
            cos,
            sin,
            eps,
            offset,
            K,
            D,
            HALF,
            BLOCK,
            REST,
            KV_HEADS,
            INTERLEAVED,
            AFTER,
        )


@triton.jit
def _norm_heads_back(
    dy,
    x,
    dx,
    weight,
    cos,
    sin,
    sums,
    block,
    first,
    P,
    N,
    T,
    dy_batch,
    dy_token,
    dy_head,
    x_batch,
    x_token,
    angle_batch,
    angle_token,
    eps,
    offset,
    COUNT: tl.constexpr,
    ROW: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AFTER: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Heads `block * HEADS` and on, of every P-th token's COUNT; `sums` takes the weight's part."""
    heads = block * HEADS + tl.arange(0, HEADS)
    keep = heads < COUNT
    rows = heads * D
    dy_rows = heads.to(tl.int64) * dy_head
    row = tl.zeros((1,), tl.int32)
    wa, wb = _load_weight(weight, offset, HEADS, HALF, BLOCK, INTERLEAVED, AFTER)
    sum_a = tl.zeros((HEADS, BLOCK), tl.float32)
    sum_b = tl.zeros((HEADS, BLOCK), tl.float32)
    if 2 * HALF < D:
        w = _effective(load_rest(weight, heads * 0, keep, 2 * HALF, D, REST), offset, AFTER)
        sum_rest = tl.zeros((HEADS, REST), tl.float32)
    for token in tl.range(first, N, P, num_stages=STAGES):
        batch, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
        at = batch * angle_batch + t * angle_token
        c, s = load_angles(cos + at, sin + at, HEADS, HALF, BLOCK)
        here = x + batch * x_batch + t * x_token
        a, b = load_pairs(here, rows, keep, HALF, BLOCK, INTERLEAVED)
        up = dy + batch * dy_batch + t * dy_token
        ga, gb = load_pairs(up, dy_rows, keep, HALF, BLOCK, INTERLEAVED)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < D:
            rest = load_rest(here, rows, keep, 2 * HALF, D, REST).to(tl.float32)
            g = load_rest(up, dy_rows, keep, 2 * HALF, D, REST).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(squares / D + eps)[:, None]
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
        out = dx + (batch * T + t) * ROW
        ga, gb = rstd * (ga - a * dot), rstd * (gb - b * dot)
        store_pairs(out, rows, keep, ga, gb, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < D:
            store_rest(out, rows, keep, rstd * (g - rest * dot), 2 * HALF, D, REST)
    if WEIGHT_GRAD:
        total_a, total_b = tl.sum(sum_a, 0)[None, :], tl.sum(sum_b, 0)[None, :]
        store_pairs(sums, row, row == 0, total_a, total_b, HALF, BLOCK, INTERLEAVED)
        if 2 * HALF < D:
            store_rest(sums, row, row == 0, tl.sum(sum_rest, 0)[None, :], 2 * HALF, D, REST)


@triton.jit
def _qk_norm_rope_backward_kernel(
    dq,
    dk,
    dv,
    qkv,
    dx,
    q_weight,
    k_weight,
    cos,
    sin,
    partials,  # [blocks of q and k, P, D]
    P,
    N,
    T,
    dq_batch,
    dq_token,
    dq_head,
    dk_batch,
    dk_token,
    dk_head,
    dv_batch,
    dv_token,
    dv_head,
    x_batch,
    x_token,
    angle_batch,
    angle_token,
    eps,
    offset,
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
    AFTER: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + KV_HEADS - 1) // KV_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * K_BLOCKS
    ROW: tl.constexpr = (H + 2 * K) * D
    first = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    sums = partials + (block * P + first) * D
    if block < Q_BLOCKS:
        _norm_heads_back(
            dq,
            qkv,
            dx,
            q_weight,
            cos,
            sin,
            sums,
            block,
            first,
            P,
            N,
            T,
            dq_batch,
            dq_token,
            dq_head,
            x_batch,
            x_token,
            angle_batch,
            angle_token,
            eps,
            offset,
            H,
            ROW,
            D,
            HALF,
            BLOCK,
            REST,
            HEADS,
            INTERLEAVED,
            AFTER,
            WEIGHT_GRAD,
            STAGES,
        )
    elif block < Q_BLOCKS + K_BLOCKS:
        _norm_heads_back(
            dk,
            qkv + H * D,
            dx + H * D,
            k_weight,
            cos,
            sin,
            sums,
            block - Q_BLOCKS,
            first,
            P,
            N,
            T,
            dk_batch,
            dk_token,
            dk_head,
            x_batch,
            x_token,
            angle_batch,
            angle_token,
            eps,
            offset,
            K,
            ROW,
            D,
            HALF,
            BLOCK,
            REST,
            KV_HEADS,
            INTERLEAVED,
            AFTER,
            WEIGHT_GRAD,
            STAGES,
        )
    else:
        heads = (block - Q_BLOCKS - K_BLOCKS) * KV_HEADS + tl.arange(0, KV_HEADS)
        keep = heads < K
        for token in tl.range(first, N, P, num_stages=STAGES):
            batch, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
            up = dv + batch * dv_batch + t * dv_token
            values = load_rest(up, heads.to(tl.int64) * dv_head, keep, 0, D, WHOLE)
            out = dx + (batch * T + t) * ROW + (H + K) * D
            store_rest(out, heads * D, keep, values, 0, D, WHOLE)


@triton.jit
def _sum_rows(x, y, N, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, N, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < N)[:, None] & (cols < D)[None, :]
        total += tl.load(x + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(y + cols, tl.sum(total, 0), mask=cols < D)


@triton.jit
def _weight_gradient_kernel(
    partials, dwq, dwk, q_rows, k_rows, D, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Adds up the partial weight gradients of q in the first row of programs, of k in the next."""
    if tl.program_id(0) == 0:
        _sum_rows(partials, dwq, q_rows, D, ROWS, COLS)
    else:
        _sum_rows(partials + q_rows * D, dwk, k_rows, D, ROWS, COLS)


def _forward_fake(
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
    b, t, row = qkv.shape
    d = row // (heads + 2 * kv_heads)
    return qkv.new_empty(b, t, heads, d), qkv.new_empty(b, t, kv_heads, d)


@operator("qk_norm_rope", _forward_fake)
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
    b, t, row = qkv.shape
    d = row // (heads + 2 * kv_heads)
    yq, yk = qkv.new_empty(b, t, heads, d), qkv.new_empty(b, t, kv_heads, d)
    if q_weight is None or k_weight is None:
        q, k, _ = _split(qkv, heads, kv_heads)
        launch_rope(q, k, None, yq, yk, None, cos, sin, interleaved=interleaved, back=False)
    elif b * t:
        cos, sin, *angle_strides = angles(cos, sin)
        tile, warps = FORWARD
        per_tile, kv_per_tile = heads_per_tile(heads, d, tile), heads_per_tile(kv_heads, d, tile)
        blocks = triton.cdiv(heads, per_tile) + triton.cdiv(kv_heads, kv_per_tile)
        _qk_norm_rope_kernel[(b * t * blocks,)](
            qkv,
            q_weight.contiguous(),
            k_weight.contiguous(),
            cos,
            sin,
            yq,
            yk,
            t,
            *qkv.stride()[:2],
            *angle_strides,
            eps,
            offset,
            H=heads,
            K=kv_heads,
            **dims(d, cos.shape[-1], interleaved),
            HEADS=per_tile,
            KV_HEADS=kv_per_tile,
            AFTER=after,
            num_warps=warps,
            **closely(qkv),
        )
    return yq, yk


def _backward_fake(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    after: bool,
    interleaved: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, heads, d = dq.shape
    dx = dq.new_empty(b, t, (heads + 2 * dk.shape[2]) * d)
    if not weight_grad or q_weight is None or k_weight is None:
        return dx, dq.new_empty(0), dq.new_empty(0)
    return dx, q_weight.new_empty(d), k_weight.new_empty(d)


@operator("qk_norm_rope_backward", _backward_fake)
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv: Tensor | None,  # with the weights
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    after: bool,
    interleaved: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv and, else empty, of the weights."""
    b, t, heads, d = dq.shape
    kv_heads = dk.shape[2]
    dx = dq.new_empty(b, t, (heads + 2 * kv_heads) * d)
    if qkv is None or q_weight is None or k_weight is None:
        out = _split(dx, heads, kv_heads)
        launch_rope(dq, dk, dv, *out, cos, sin, interleaved=interleaved, back=True)
        return dx, dq.new_empty(0), dq.new_empty(0)
    width = d if weight_grad else 0
    dwq, dwk = q_weight.new_empty(width), k_weight.new_empty(width)
    dq, dk, dv = adjacent(dq), adjacent(dk), adjacent(dv)
    cos, sin, *angle_strides = angles(cos, sin)
    tile, warps = BACKWARD
    per_tile, kv_per_tile = heads_per_tile(heads, d, tile), heads_per_tile(kv_heads, d, tile)
    q_blocks, k_blocks = triton.cdiv(heads, per_tile), triton.cdiv(kv_heads, kv_per_tile)
    blocks = q_blocks + 2 * k_blocks
    programs = max(1, min(b * t, RESIDENT * multiprocessors(dq) // blocks))
    partials = dx.new_empty((q_blocks + k_blocks) * programs * width, dtype=torch.float32)
    _qk_norm_rope_backward_kernel[(programs * blocks,)](
        dq,
        dk,
        dv,
        qkv,
        dx,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos,
        sin,
        partials,
        programs,
        b * t,
        t,
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        *qkv.stride()[:2],
        *angle_strides,
        eps,
        offset,
        H=heads,
        K=kv_heads,
        **dims(d, cos.shape[-1], interleaved),
        WHOLE=triton.next_power_of_2(d),
        HEADS=per_tile,
        KV_HEADS=kv_per_tile,
        AFTER=after,
        WEIGHT_GRAD=weight_grad,
        STAGES=STAGES,
        num_warps=warps,
    )
    if weight_grad:
        rows = q_blocks * programs, k_blocks * programs
        step, cols = SUM
        grid = (2, triton.cdiv(d, cols))
        _weight_gradient_kernel[grid](partials, dwq, dwk, *rows, d, ROWS=step, COLS=cols)
    return dx, dwq, dwk


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, None if q_weight is None else qkv, q_weight, k_weight)
        ctx.options = (eps, offset, after, interleaved)
        options = heads, kv_heads, *ctx.options
        q, k = _forward(qkv, cos, sin, q_weight, k_weight, *options)
        return q, k, _split(qkv, heads, kv_heads)[2]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("qk_norm_rope")
        wanted = ctx.needs_input_grad[3:5]
        dx, dwq, dwk = _backward(dq, dk, dv, *ctx.saved_tensors, *ctx.options, any(wanted))
        weights = dwq if wanted[0] else None, dwk if wanted[1] else None
        return dx, None, None, *weights, *6 * (None,)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D]: normed if there are weights, and rotated.

    `rms_norm` of every head of q and k, then `rope`; v is a view of `qkv`. The backward pass
    writes the gradient of `qkv` in one piece. The norm before the rotation is that of Qwen3
    (arXiv 2505.09388) and Gemma 3 (arXiv 2503.19786).
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
        return qk_norm_rope_ref(
            qkv,
            cos,
            sin,
            heads=heads,
            kv_heads=kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            offset=offset,
            cast=cast,
            interleaved=interleaved,
        )
    after = cast == "after_weight"
    options = heads, kv_heads, eps, offset, after, interleaved
    return _QKNormRope.apply(adjacent(qkv), cos, sin, q_weight, k_weight, *options)
