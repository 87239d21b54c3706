"""Fused attention for head dims up to 512, where others end at 256: the backend "triton".

# B sequences, N queries and M keys of all, T and S of the longest, H query heads, K kv heads,
# D head dim

The registers of a multiprocessor hold one sum of 64 x 512 or 128 x 256 numbers and little else. So
every program computes half of the dims of one result, with scores of its own: the output and dq by
blocks of queries, dk and dv by blocks of keys over all heads of a group. No sum is shared between
programs: every run has the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.rope.rope import with_contiguous_dim
from tigon.kernels.runtime import next_power_of_2, operator, refuse_second_derivative, tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LENGTHS = ("T", "S", "N", "left", "right")  # kernels are not compiled again for other ones
UNLIMITED = 1 << 30  # more than any sequence
LOWEST = tl.constexpr(-1e38)  # below every score, and finite: the difference of two is a number


class Launch(NamedTuple):
    """How a kernel divides its work."""

    queries: int  # of a block
    keys: int  # of a block
    warps: int
    stages: int

    def options(self, q: Tensor, k: Tensor) -> dict[str, int]:
        """Returns what a kernel is compiled for."""
        (_, H, D), K = q.shape, k.shape[1]
        sizes = {"H": H, "K": K, "D": D, "HALF": max(16, next_power_of_2(D) // 2)}
        blocks = {"BT": self.queries, "BS": self.keys, "STAGES": self.stages}
        return sizes | blocks | {"num_warps": self.warps}


# What fits into the 227 KiB (232,448 bytes) of shared memory and 255 registers a thread of Hopper,
# for 512 dims
FORWARD = Launch(128, 32, 8, 2)
DQ = Launch(64, 16, 4, 3)
DK = Launch(16, 64, 4, 3)
DV = Launch(32, 128, 8, 2)


@triton.jit
def _place(longest, H, BLOCK: tl.constexpr, REVERSED: tl.constexpr):
    """Returns the sequence, first row, head and half of the dims of this program."""
    item, blocks = tl.program_id(0) // 2, tl.cdiv(longest, BLOCK)
    block = item // H % blocks
    if REVERSED:
        block = blocks - 1 - block
    return item // H // blocks, block * BLOCK, item % H, tl.program_id(0) % 2


@triton.jit
def _halves(part, HALF: tl.constexpr):
    """Returns the dims that a program computes, and the others."""
    dims = tl.arange(0, HALF)
    return part * HALF + dims, (1 - part) * HALF + dims


@triton.jit
def _sequence(bounds, b, longest):
    """Returns the first row of a sequence, and its length; without bounds all have the longest."""
    if bounds is None:
        first, length = b.to(tl.int64) * longest, longest
    else:
        first = tl.load(bounds + b).to(tl.int64)
        length = (tl.load(bounds + b + 1) - first).to(tl.int32)
    return first, length


@triton.jit
def _load(x, rows, stride, count, dims, D: tl.constexpr):
    """Loads rows of a head, with zeros behind the sequence and the head dim."""
    mask = (rows < count)[:, None] & (dims < D)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _seen(queries, keys, count, left, right):
    """Whether a query sees a key, by their positions among the keys."""
    return (keys < count) & (keys >= queries - left) & (keys <= queries + right)


@triton.jit(do_not_specialize=LENGTHS)
def _wide_attention_forward_kernel(
    q, k, v, out,  # [N or M, heads, D]
    lse,  # [H, N]
    bounds, key_bounds,  # [B + 1], or None
    T, S, N, scale, left, right,
    qn, qh, kn, kh, vn, vh,  # strides of tokens and heads
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes half of the output of BT queries; what sees most keys comes first."""
    b, at, h, part = _place(T, H, BT, True)
    first, t = _sequence(bounds, b, T)
    if at >= t:
        return
    first_key, s = _sequence(key_bounds, b, S)
    past = s - t
    rows, cols, dims = at + tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, 2 * HALF)
    half, _ = _halves(part, HALF)
    queries = _load(q + first * qn + h * qh, rows, qn, t, dims, D)
    k += first_key * kn + h // (H // K) * kh
    v += first_key * vn + h // (H // K) * vh
    highest = tl.full((BT,), LOWEST, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    mean = tl.zeros((BT, HALF), tl.float32)
    begin = tl.maximum(at + past - left, 0) // BS * BS
    for j in tl.range(begin, tl.minimum(s, at + BT + past + right), BS, num_stages=STAGES):
        keys = _load(k, j + cols, kn, s, dims, D)
        seen = _seen((rows + past)[:, None], (j + cols)[None, :], s, left, right)
        scores = tl.where(seen, tl.dot(queries, keys.T) * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = _load(v, j + cols, vn, s, half, D)
        mean = tl.dot(weights.to(values.dtype), values, mean * shrink[:, None])
        highest = higher
    total = tl.where(total > 0, total, 1.0)  # the output of a query that sees nothing is 0
    mean /= total[:, None]
    at_out = (first + rows)[:, None] * (H * D) + h * D + half[None, :]
    mask = (rows < t)[:, None] & (half < D)[None, :]
    tl.store(out + at_out, mean.to(out.dtype.element_ty), mask=mask)
    if part == 0:
        natural = (highest + tl.log2(total)) / LOG2E
        tl.store(lse + h * N + first + rows, natural, mask=rows < t)


@triton.jit(do_not_specialize=LENGTHS)
def _wide_attention_dq_kernel(
    q, k, v, out, dout, dq,  # [N or M, heads, D]
    lse, row_sums,  # [H, N]; the sums of dout * out are an output, for `_wide_attention_dkv_kernel`
    bounds, key_bounds,  # [B + 1], or None
    T, S, N, scale, left, right,
    qn, qh, kn, kh, vn, vh, gn, gh,  # strides of tokens and heads; g is dout
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes half of the gradient of BT queries; what sees most keys comes first."""
    b, at, h, part = _place(T, H, BT, True)
    first, t = _sequence(bounds, b, T)
    if at >= t:
        return
    first_key, s = _sequence(key_bounds, b, S)
    past = s - t
    rows, cols, dims = at + tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, 2 * HALF)
    half, rest = _halves(part, HALF)
    outputs = _load(out + first * (H * D) + h * D, rows, H * D, t, dims, D)
    ups = _load(dout + first * gn + h * gh, rows, gn, t, dims, D)
    sums = tl.sum(outputs.to(tl.float32) * ups.to(tl.float32), 1)
    at_rows = h * N + first + rows
    tl.store(row_sums + at_rows, sums, mask=rows < t)  # the same in both halves' programs
    logs = tl.load(lse + at_rows, mask=rows < t, other=float("inf")) * LOG2E
    q += first * qn + h * qh
    k += first_key * kn + h // (H // K) * kh
    v += first_key * vn + h // (H // K) * vh
    queries, other_queries = _load(q, rows, qn, t, half, D), _load(q, rows, qn, t, rest, D)
    gradient = tl.zeros((BT, HALF), tl.float32)
    begin = tl.maximum(at + past - left, 0) // BS * BS
    for j in tl.range(begin, tl.minimum(s, at + BT + past + right), BS, num_stages=STAGES):
        keys, others = _load(k, j + cols, kn, s, half, D), _load(k, j + cols, kn, s, rest, D)
        products = tl.dot(queries, keys.T, tl.dot(other_queries, others.T)) * (scale * LOG2E)
        seen = _seen((rows + past)[:, None], (j + cols)[None, :], s, left, right)
        weights = tl.where(seen, tl.exp2(products - logs[:, None]), 0.0)
        values = _load(v, j + cols, vn, s, dims, D)
        dscores = weights * (tl.dot(ups, values.T) - sums[:, None])
        gradient = tl.dot(dscores.to(keys.dtype), keys, gradient)
    at_dq = (first + rows)[:, None] * (H * D) + h * D + half[None, :]
    mask = (rows < t)[:, None] & (half < D)[None, :]
    tl.store(dq + at_dq, (gradient * scale).to(dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=LENGTHS)
def _wide_attention_dkv_kernel(
    q, k, v, dout, gradient,  # [N or M, heads, D]
    lse, row_sums,  # [H, N]
    bounds, key_bounds,  # [B + 1], or None
    T, S, N, scale, left, right,
    qn, qh, kn, kh, vn, vh, gn, gh,  # strides of tokens and heads; g is dout
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Computes half of the gradient of BS keys of a kv head, or of its values.

    All scores are [BS, BT]: no rounded product is transposed, which Triton 3.4 to 3.7.0 miscompile
    on Hopper. Keys that most queries see come first.
    """
    b, at, h, part = _place(S, K, BS, False)
    first_key, s = _sequence(key_bounds, b, S)
    if at >= s:
        return
    first, t = _sequence(bounds, b, T)
    past = s - t
    rows, cols, dims = at + tl.arange(0, BS), tl.arange(0, BT), tl.arange(0, 2 * HALF)
    half, rest = _halves(part, HALF)
    k += first_key * kn + h * kh
    if OF_KEYS:
        keys, other_keys = _load(k, rows, kn, s, half, D), _load(k, rows, kn, s, rest, D)
        values = _load(v + first_key * vn + h * vh, rows, vn, s, dims, D)
    else:
        keys = _load(k, rows, kn, s, dims, D)
    total = tl.zeros((BS, HALF), tl.float32)
    begin = tl.maximum(at - past - right, 0) // BT * BT
    steps = tl.cdiv(tl.maximum(tl.minimum(t, at + BS - past + left) - begin, 0), BT)
    for step in tl.range(0, H // K * steps, num_stages=STAGES):
        head, i = h * (H // K) + step // steps, begin + step % steps * BT
        x, up = q + first * qn + head * qh, dout + first * gn + head * gh
        if OF_KEYS:
            queries = _load(x, i + cols, qn, t, half, D)
            products = tl.dot(other_keys, _load(x, i + cols, qn, t, rest, D).T)
            products = tl.dot(keys, queries.T, products)
        else:
            products = tl.dot(keys, _load(x, i + cols, qn, t, dims, D).T)
        at_rows, real = head * N + first + i + cols, i + cols < t
        logs = tl.load(lse + at_rows, mask=real, other=float("inf")) * LOG2E
        seen = _seen((i + cols + past)[None, :], rows[:, None], s, left, right)
        weights = tl.where(seen, tl.exp2(products * (scale * LOG2E) - logs[None, :]), 0.0)
        if OF_KEYS:
            sums = tl.load(row_sums + at_rows, mask=real, other=0.0)
            dweights = tl.dot(values, _load(up, i + cols, gn, t, dims, D).T)
            dscores = weights * (dweights - sums[None, :]) * scale
            total = tl.dot(dscores.to(queries.dtype), queries, total)
        else:
            ups = _load(up, i + cols, gn, t, half, D)
            total = tl.dot(weights.to(ups.dtype), ups, total)
    at_out = (first_key + rows)[:, None] * (K * D) + h * D + half[None, :]
    mask = (rows < s)[:, None] & (half < D)[None, :]
    tl.store(gradient + at_out, total.to(gradient.dtype.element_ty), mask=mask)


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the output and the lse."""
    return q.new_empty(q.shape), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)


def _strides(*tensors: Tensor) -> list[int]:
    """Returns the strides of tokens and heads of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:2]]


@operator("wide_attention", _outputs)
def _forward(
    q: Tensor,  # [N, H, D]
    k: Tensor,  # [M, K, D]
    v: Tensor,
    cu_seqlens: Tensor | None,  # [B + 1]; None: sequences of T queries and S keys
    key_cu_seqlens: Tensor | None,  # None: the same
    T: int,
    S: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """Returns attention [N, H, D], and the log-sum-exp [H, N] of the scores."""
    out, lse = _outputs(q)
    N, H = q.shape[:2]
    B = N // max(T, 1) if cu_seqlens is None else len(cu_seqlens) - 1
    key_cu_seqlens = cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
    _wide_attention_forward_kernel[(2 * H * B * triton.cdiv(T, FORWARD.queries),)](
        *(q, k, v, out, lse, cu_seqlens, key_cu_seqlens, T, S, N, scale, left, right),
        *_strides(q, k, v),
        **FORWARD.options(q, k),
    )
    return out, lse


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator("wide_attention_backward", _gradients)
def _backward(
    dout: Tensor,  # [N, H, D]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    key_cu_seqlens: Tensor | None,
    T: int,
    S: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v; see `_forward`."""
    dq, dk, dv = _gradients(dout, q, k, v)
    (N, H, _), K = q.shape, k.shape[1]
    B = N // max(T, 1) if cu_seqlens is None else len(cu_seqlens) - 1
    key_cu_seqlens = cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
    shared = cu_seqlens, key_cu_seqlens, T, S, N, scale, left, right, *_strides(q, k, v, dout)
    row_sums = torch.empty_like(lse)
    _wide_attention_dq_kernel[(2 * H * B * triton.cdiv(T, DQ.queries),)](
        *(q, k, v, out, dout, dq, lse, row_sums, *shared), **DQ.options(q, k)
    )
    for gradient, launch in ((dk, DK), (dv, DV)):
        _wide_attention_dkv_kernel[(2 * K * B * triton.cdiv(S, launch.keys),)](
            *(q, k, v, dout, gradient, lse, row_sums, *shared),
            **launch.options(q, k),
            OF_KEYS=gradient is dk,
        )
    return dq, dk, dv


class _WideAttention(torch.autograd.Function):
    """Computes `wide_attention` and its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        out, lse = _forward(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse, *how[:2])
        ctx.how = how[2:]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        return *_backward(with_contiguous_dim(dout), *ctx.saved_tensors, *ctx.how), *[None] * 7


def wide_attention(
    q: Tensor,  # [N, H, D]
    k: Tensor,  # [M, K, D]
    v: Tensor,
    bounds: tuple[Tensor | None, Tensor | None],  # cu_seqlens of queries and of keys, [B + 1]
    longest: tuple[int, int],  # queries and keys of a sequence
    *,
    scale: float | None,
    reach: tuple[int | None, int | None],
) -> Tensor:
    """Returns attention [N, H, D] within sequences, the last query aligned with the last key.

    Without bounds all sequences have the lengths of the longest. `reach` is how many keys before
    and after itself a query sees; None is all.
    """
    q, k, v = (with_contiguous_dim(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (UNLIMITED if side is None else side for side in reach)
    cu, key_cu = bounds
    key_cu = None if key_cu is cu else key_cu  # torch.compile takes no tensor twice
    out: Tensor = _WideAttention.apply(q, k, v, cu, key_cu, *longest, scale, left, right)
    return out
