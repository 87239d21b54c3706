"""A softmax over tokens of which a program sees some at a time, and other programs the rest.

# N tokens, H query heads, D head dim
"""

from tigon.kernels._triton import pdl_wait, tl, triton
from tigon.kernels.kv_buffers import unpack


@triton.jit
def fold(queries, tile, seen, state, scale, softcap, PACKED):
    """One tile of tokens into the running softmax, whose exponents are of two.

    `queries`, and `out` of the state, have their even dims and their odd ones, PACKED alone.
    """
    q, q_high = queries
    k, v, k_scales, v_scales = tile
    best, total, out, out_high = state
    if PACKED:
        low, high = unpack(k, q.dtype)
        scores = tl.dot(q, low.T, input_precision="ieee")
        scores = tl.dot(q_high, high.T, scores, input_precision="ieee") * scale
        scores *= k_scales[None, :]
    else:
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
    if softcap is not None:  # tanh(y) = 2 sigmoid(2 y) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf + inf) is not
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(best - shift)
    total = total * shrink + tl.sum(p, 1)
    if PACKED:
        p = (p * v_scales[None, :]).to(q.dtype)
        low, high = unpack(v, q.dtype)
        out = tl.dot(p, low, out * shrink[:, None], input_precision="ieee")
        out_high = tl.dot(p, high, out_high * shrink[:, None], input_precision="ieee")
    else:
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return higher, total, out, out_high


@triton.jit
def combine_kernel(
    parts,  # [N * H, splits, D]
    logsums,  # [N * H, splits]
    y,  # [N * H, D]
    splits,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    head = tl.program_id(0).to(tl.int64)
    i, columns = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logsum = tl.load(logsums + head * splits + i, mask=i < splits, other=float("-inf"))
    weight = tl.exp2(logsum - tl.max(logsum))
    mask = (i < splits)[:, None] & (columns < D)[None, :]
    at = (head * splits + i)[:, None] * D + columns[None, :]
    out = tl.sum(weight[:, None] * tl.load(parts + at, mask=mask, other=0.0), 0) / tl.sum(weight)
    tl.store(y + head * D + columns, out.to(y.dtype.element_ty), mask=columns < D)
