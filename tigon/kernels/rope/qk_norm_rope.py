"""Splits a packed projection into the heads of q, k and v, norms and rotates them.

# B batch, T tokens, N = B * T, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
# P programs that share the tokens of a block of heads in the backward pass
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.norm.rms_norm import Cast, check_norm, rms_norm_ref
from tigon.kernels.norm.rms_norm_kernels import sum_partials
from tigon.kernels.recompute import has_function_mode
from tigon.kernels.rope.rope import (
    Heads,
    angles,
    check_angles,
    dims,
    effective_weight,
    heads_per_tile,
    launch_rope,
    load_angles,
    load_pairs,
    load_rest,
    load_weight,
    packed_heads,
    rope_ref,
    separate_heads,
    store_pairs,
    store_rest,
    token_pointers,
    with_contiguous_dim,
)
from tigon.kernels.runtime import (
    check_devices,
    is_plain,
    is_watched,
    num_sms,
    operator,
    owns_storage,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from tigon.kernels.saved_sources import note_parts

# Of the backward pass: elements and warps of one program's tile, which is some heads of one token
BACKWARD = (1024, 2)
# Programs on each multiprocessor, and stages of their loop over tokens
RESIDENT = 4
STAGES = tl.constexpr(4)


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


def _rotate_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool
) -> None:
    """Rotates q and k inside a contiguous `qkv`; on meta it does nothing."""
    if not qkv.is_meta:
        d = qkv.shape[-1] // (heads + 2 * kv_heads)
        inputs = packed_heads(qkv), packed_heads(qkv, heads * d), None
        with torch.cuda.device_of(qkv):
            launch_rope(inputs, (None,) * 3, cos, sin, heads, kv_heads, d, interleaved)
    # Whoever has saved qkv nevertheless gets an error, not other numbers
    torch.autograd.graph.increment_version(qkv)


def _gradients(
    dq: Tensor, dk: Tensor, dv: Any, q_weight: Any, k_weight: Any, weight_grad: bool, *_: Any
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
        sum_partials(partials, rows[0], d, dwq, dwk, rows[1])
    return gradients


class _QKNormRope(torch.autograd.Function):
    """`qk_norm_rope` with its gradients; backward writes that of `qkv` in one piece."""

    @staticmethod
    def forward(ctx: Any, overwrite: bool, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cos, sin, q_weight, k_weight, heads, kv_heads, *options = args  # as of `_forward`
        ctx.save_for_backward(q_weight, k_weight, None if q_weight is None else qkv, cos, sin)
        ctx.options = options
        if overwrite:
            _rotate_in_place(qkv, cos, sin, heads, kv_heads, options[-1])
            return _split(qkv, heads, kv_heads)
        q, k = _forward(*args)
        if q_weight is not None and not torch.compiler.is_compiling():
            note_parts((q, k), _forward, (qkv, cos, sin, q_weight, k_weight), *args[5:])
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
    if torch.compiler.is_compiling() or not is_plain(qkv) or is_watched(qkv):
        return False
    exclusive = owns_storage(qkv) and qkv.is_contiguous()
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
