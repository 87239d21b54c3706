"""Decode attention: appends new tokens to a preallocated cache and attends to it (Flash-Decoding).

# B rows, T new tokens of each, N of all, R cache slots, S slots in use, H query heads, K kv heads,
# D head dim
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.attention.kv_buffers import (
    KVBuffers,
    check_buffers,
    dequantize_slots,
    load_packed,
    unpack_int8,
    write_tokens,
)
from tigon.kernels.rope.rope import angles as strided_angles
from tigon.kernels.rope.rope import check_angles, load_rotated, rope, with_contiguous_dim
from tigon.kernels.runtime import (
    INTERPRETED,
    check_devices,
    has_values,
    next_power_of_2,
    num_sms,
    num_stages,
    operator,
    pdl_options,
    pdl_wait,
    runs_triton,
    shared_memory,
    tl,
    triton,
)

MAX_QUERY_TOKENS = 16  # what the kernel takes at once; more go in parts
LOG2E = 1.4426950408889634


@triton.jit
def accumulate_tile(queries, tile, seen, state, scale, softcap, PACKED):
    """Adds one tile of tokens to the running softmax, whose exponents are of two.

    `queries`, and `out` of the state, hold even and odd dims separately if PACKED.
    """
    q, q_high = queries
    k, v, k_scales, v_scales = tile
    best, total, out, out_high = state
    if PACKED:
        low, high = unpack_int8(k, q.dtype)
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
        low, high = unpack_int8(v, q.dtype)
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
    D: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the partial outputs of the splits of one query by their log-sum-exps."""
    pdl_wait(PDL)
    head = tl.program_id(0).to(tl.int64)
    i, columns = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logsum = tl.load(logsums + head * splits + i, mask=i < splits, other=float("-inf"))
    weight = tl.exp2(logsum - tl.max(logsum))
    mask = (i < splits)[:, None] & (columns < D)[None, :]
    at = (head * splits + i)[:, None] * D + columns[None, :]
    out = tl.sum(weight[:, None] * tl.load(parts + at, mask=mask, other=0.0), 0) / tl.sum(weight)
    tl.store(y + head * D + columns, out.to(y.dtype.element_ty), mask=columns < D)


def append_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: KVBuffers,
    lengths: Tensor,
    *,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Writes k and v after each row's tokens; returns `softmax(cap(q k^T * scale)) v`, fp32
    inside, over one more score, the head's sink, whose value is 0, if there are sinks."""
    b, t, h, d = q.shape
    kv_heads, slots = buffers.keys.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    positions = lengths[:, None] + torch.arange(t, device=q.device)  # [B, T]
    rows = torch.arange(b, device=q.device)[:, None]
    write_tokens(k, v, buffers, rows, positions % slots)
    on_cpu = q.device.type == "cpu" and has_values(q)
    if on_cpu:  # where looking at the lengths costs nothing, slots never used cost nothing
        slots = min(slots, int(positions.max()) + 1)
    # A slot holds the greatest position that ends up there, a negative one if none has yet
    last = positions[:, -1:]
    cached = last - (last - torch.arange(slots, device=q.device)) % slots  # [B, S]
    seen = (cached >= 0)[:, None] & (cached[:, None] <= positions[..., None])  # [B, T, S]
    if window is not None:
        least = positions // window * window if chunked else positions - window + 1
        seen &= cached[:, None] >= least[..., None]
    keys = dequantize_slots(buffers.keys, buffers.key_scales, slots)
    values = dequantize_slots(buffers.values, buffers.value_scales, slots)
    empty = cached < 0
    if not on_cpu or empty.any():  # what lies there may be NaN, and 0 * NaN is NaN
        values = values.masked_fill(empty[:, None, :, None], 0.0)
    groups = h // kv_heads
    queries = q.float().view(b, t, kv_heads, groups, d).permute(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    scores = queries.flatten(2, 3) @ keys.transpose(-1, -2) * scale
    scores = scores.view(b, kv_heads, groups, t, slots)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(kv_heads, groups, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = scores.softmax(-1)[..., :slots].flatten(2, 3)
    out = (probabilities @ values).view(queries.shape)
    return out.permute(0, 3, 1, 2, 4).reshape(b, t, h, d).to(q.dtype)


# Other lengths of caches, steps and windows compile no other kernel, but for a step of one token
@triton.jit(
    do_not_specialize=["R", "key_scales", "value_scales"], do_not_specialize_on_alignment=["T"]
)
def _append_attention_kernel(
    q,  # these three: pointer, strides per row, token and head
    k, v,
    keys,  # these four: pointer, strides per row, head and slot; the scales may be None
    values, key_scales, value_scales, lengths,
    angles,  # that q and k are yet to be rotated by, as `rope` takes them, or None
    sinks,  # [H], or None
    y,  # [B, T, H, D]; of several splits [B, T, H, splits, D] in fp32
    logsums,  # [B, T, H, splits], base 2
    R, window, scale, softcap, T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr,
    MANY: tl.constexpr,  # T is above 1
    CHUNKED: tl.constexpr,  # a query sees its chunk of `window` positions
    HALF: tl.constexpr,  # of the dims that are rotated
    EVEN: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes some queries of one kv head over one share of the tokens that they see.

    The blocks of earlier tokens are divided evenly among programs. The first program also attends
    to the new tokens and stores them, in slots that no program reads any more.

    PACKED caches are int8: `keys` and `values` point to int16, each two adjacent dims, as tensor
    cores want pairs; a tile then holds either the even or the odd dims.
    """
    pdl_wait(PDL, LATE)
    G: tl.constexpr = H // K
    split, splits = tl.program_id(1), tl.num_programs(1)
    row, head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    length = tl.load(lengths + row).to(tl.int32)

    m = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    t, h = m // G, head * G + m % G
    EACH: tl.constexpr = 2 if PACKED else 1
    dims = tl.arange(0, WIDTH // EACH)
    program_tokens = (m < T * G)[:, None] & (dims < D // EACH)[None, :]
    q_heads = q[0] + row * q[1] + t[:, None] * q[2] + h[:, None] * q[3]
    if angles is not None:
        turns = row * angles[2] + t[:, None] * angles[3]
        queries = load_rotated(q_heads, dims, program_tokens, angles, turns, HALF, EVEN)
    else:
        queries = tl.load(q_heads + EACH * dims[None, :], mask=program_tokens, other=0.0)
    queries_high = queries
    if PACKED:
        queries_high = tl.load(q_heads + EACH * dims[None, :] + 1, mask=program_tokens, other=0.0)

    row_keys = keys[0] + row * keys[1] + head.to(tl.int64) * keys[2]
    row_values = values[0] + row * values[1] + head.to(tl.int64) * values[2]
    if PACKED:
        row_k_scales = key_scales[0] + row * key_scales[1] + head.to(tl.int64) * key_scales[2]
        row_v_scales = value_scales[0] + row * value_scales[1] + head.to(tl.int64) * value_scales[2]

    if window is not None:  # the first position that each query sees
        least = (length + t) // window * window if CHUNKED else length + t - window + 1
    pair = queries, queries_high
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if sinks is not None:  # one more score of the first program; in others its weight is 2^-inf
        sink = tl.load(sinks + h, mask=m < T * G, other=0.0).to(tl.float32) * 1.4426950408889634
        best = tl.where(split == 0, sink, best)
        total += 1.0
    out = tl.zeros((QUERIES, WIDTH // EACH), tl.float32)
    out_high = out

    if split == 0:
        new = tl.arange(0, TOKENS)
        in_range = (new < T)[:, None] & (dims < D // EACH)[None, :]
        k_heads = k[0] + row * k[1] + head * k[3] + new[:, None] * k[2]
        v_at = v[0] + row * v[1] + head * v[3] + new[:, None] * v[2] + EACH * dims[None, :]
        if PACKED:
            k_new, k_scale = load_packed(k_heads + EACH * dims[None, :], in_range)
            v_new, v_scale = load_packed(v_at, in_range)
        else:
            if angles is not None:
                k_turns = row * angles[2] + new[:, None] * angles[3]
                k_new = load_rotated(k_heads, dims, in_range, angles, k_turns, HALF, EVEN)
            else:
                k_new = tl.load(k_heads + dims[None, :], mask=in_range, other=0.0)
            v_new = tl.load(v_at, mask=in_range, other=0.0)
            k_scale, v_scale = None, None
        seen = new[None, :] <= t[:, None]
        if window is not None:
            seen = seen & ((length + new)[None, :] >= least[:, None])
        tile, state = (k_new, v_new, k_scale, v_scale), (best, total, out, out_high)
        best, total, out, out_high = accumulate_tile(
            pair, tile, seen, state, scale, softcap, PACKED
        )
        if tl.program_id(2) == 0:
            slots = ((length + new) % R).to(tl.int64)
            k_to = row_keys + slots[:, None] * keys[3] + dims[None, :]
            v_to = row_values + slots[:, None] * values[3] + dims[None, :]
            tl.store(k_to, k_new, mask=in_range)
            tl.store(v_to, v_new, mask=in_range)
            if PACKED:
                tl.store(row_k_scales + slots * key_scales[3], k_scale, mask=new < T)
                tl.store(row_v_scales + slots * value_scales[3], v_scale, mask=new < T)

    first = tl.maximum(length + T - R, 0)  # 0, or in a ring a position that no query sees
    if window is not None:
        first = tl.maximum(first, length // window * window if CHUNKED else length - window + 1)
    old = length - first
    blocks = (old + BLOCK - 1) // BLOCK
    start = split * blocks // splits * BLOCK
    end = tl.minimum((split + 1) * blocks // splits * BLOCK, old)
    first_slot = first % R
    for block in tl.range(start, end, BLOCK, num_stages=STAGES):
        i = block + tl.arange(0, BLOCK)
        slots = first_slot + i
        slots = tl.where(slots < R, slots, slots - R).to(tl.int64)
        in_range = (i < end)[:, None] & (dims < D // EACH)[None, :]
        k_tile = tl.load(
            row_keys + slots[:, None] * keys[3] + dims[None, :], mask=in_range, other=0
        )
        v_from = row_values + slots[:, None] * values[3] + dims[None, :]
        v_tile = tl.load(v_from, mask=in_range, other=0)
        if PACKED:
            k_scale = tl.load(row_k_scales + slots * key_scales[3], mask=i < end, other=0.0)
            v_scale = tl.load(row_v_scales + slots * value_scales[3], mask=i < end, other=0.0)
        else:
            k_scale, v_scale = None, None
        seen = (i < end)[None, :]
        if window is not None and MANY:
            seen = seen & ((first + i)[None, :] >= least[:, None])
        tile, state = (k_tile, v_tile, k_scale, v_scale), (best, total, out, out_high)
        best, total, out, out_high = accumulate_tile(
            pair, tile, seen, state, scale, softcap, PACKED
        )

    at = (row * T + t) * H + h
    total = tl.maximum(total, 1.0)  # as it is, unless a query saw nothing: 0 of weight 2^-inf
    if not WHOLE:
        at = at * splits + split
        tl.store(logsums + at, tl.log2(total) + best, mask=m < T * G)
    y += at[:, None] * D + EACH * dims[None, :]
    tl.store(y, (out / total[:, None]).to(y.dtype.element_ty), mask=program_tokens)
    if PACKED:
        tl.store(y + 1, (out_high / total[:, None]).to(y.dtype.element_ty), mask=program_tokens)


class DecodeLaunch(NamedTuple):
    """The tokens of a tile, tiles in flight, and programs per multiprocessor; tuned on an H200."""

    block: int
    stages: int
    resident: int


def _select_launch(dtype: torch.dtype, stored: torch.dtype, width: int) -> DecodeLaunch:
    """Chooses the launch for queries and cached keys of these types."""
    if INTERPRETED:
        return DecodeLaunch(16, stages=1, resident=1)
    if width > 512 and stored != torch.int8:  # as much as shared memory holds
        return DecodeLaunch(16, stages=1 if dtype == torch.float32 else 3, resident=1)
    if dtype == torch.float32:  # products without tensor cores
        return DecodeLaunch(max(16, min(64, 4096 // width)), stages=3, resident=2)
    if stored == torch.int8:
        return DecodeLaunch(min(128, 16384 // width), stages=3, resident=2)
    if width <= 64:
        return DecodeLaunch(64, stages=3, resident=2)
    return DecodeLaunch(32, stages=4, resident=2 if width == 128 else 1)


def _launch_within(
    room: int, dtype: torch.dtype, stored: torch.dtype, width: int, queries: int
) -> DecodeLaunch:
    """Returns `_select_launch` with smaller tiles and fewer in flight, as `room` bytes hold."""
    launch = _select_launch(dtype, stored, width)
    block, token = launch.block, _token_bytes(stored, width)
    room -= queries * (width + block) * dtype.itemsize + 512  # queries, weights, sums
    while block > 16 and block * token > room:
        block //= 2
    return launch._replace(block=block, stages=num_stages(block * token, launch.stages, room))


def _width(D: int) -> int:
    """Returns how many numbers of a head a tile has."""
    return max(32, next_power_of_2(D))


def _token_bytes(stored: torch.dtype, width: int) -> int:
    """Returns how many bytes a cached token of a head has in a tile of keys and one of values."""
    return 2 * width * stored.itemsize


def _num_splits(groups: int, blocks: int, resident_programs: int) -> int:
    """Returns how many programs share the tokens of each group, of `resident_programs` at once."""
    once = resident_programs // groups
    return min(blocks, once if once >= 4 else -(-2 * resident_programs // groups))


def _with_strides(x: Tensor | None) -> tuple[Tensor, int, int, int] | None:
    """Returns a tensor with its first three strides, as the kernel takes it, or None."""
    return None if x is None else (x, *x.stride()[:3])  # type: ignore[return-value]


@operator("append_attention", lambda q, *_: q.new_empty(q.shape), mutates=KVBuffers._fields)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    lengths: Tensor,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Appends k and v to the buffers and returns attention of q to all cached tokens."""
    (b, t, h, d), (kv_heads, slots) = q.shape, keys.shape[1:3]
    half, width = 0 if cos is None else cos.shape[-1], _width(d)
    y = q.new_empty(q.shape)
    wide = width > 512 or q.dtype == torch.float32
    most_queries = 16 if wide else 32 if width > 128 else 64  # by registers
    queries = min(triton.next_power_of_2(max(16, t * h // kv_heads)), most_queries)
    launch = _launch_within(shared_memory(q), q.dtype, keys.dtype, width, queries)
    if key_scales is not None:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    query_blocks = triton.cdiv(t * h // kv_heads, queries)
    groups = b * kv_heads * query_blocks
    resident_programs = launch.resident * num_sms(q)
    blocks = triton.cdiv(slots if window is None else min(slots, window), launch.block)
    splits = _num_splits(groups, blocks, resident_programs)
    # Whether there is room for the next kernels' programs
    late = 4 * groups * splits <= 3 * resident_programs
    unsplit = splits == 1
    parts = y if unsplit else q.new_empty(b, t, h, splits, d, dtype=torch.float32)
    logsums = None if unsplit else q.new_empty(b, t, h, splits, dtype=torch.float32)
    _append_attention_kernel[(b * kv_heads, splits, query_blocks)](
        *(_with_strides(with_contiguous_dim(x)) for x in (q, k, v)),
        *(_with_strides(x) for x in (keys, values, key_scales, value_scales)), lengths.contiguous(),
        None if cos is None or sin is None else strided_angles(cos, sin),
        None if sinks is None else sinks.contiguous(), parts, logsums, slots,
        window, scale * LOG2E if softcap is None else scale / softcap,
        None if softcap is None else softcap * LOG2E, t,
        H=h, K=kv_heads, D=d, WIDTH=width, QUERIES=queries, TOKENS=MAX_QUERY_TOKENS,
        BLOCK=launch.block, STAGES=launch.stages, PACKED=key_scales is not None, WHOLE=unsplit,
        MANY=t > 1, CHUNKED=chunked, HALF=half, EVEN=math.gcd(half, 16), LATE=late,
        num_warps=4, **pdl_options(q),
    )  # fmt: skip
    if logsums is not None:
        rows = triton.next_power_of_2(splits)
        columns = min(width, max(32, 2048 // rows))
        combine_kernel[(b * t * h, triton.cdiv(d, columns))](
            parts, logsums, y, splits, d, rows, columns, num_warps=2, **pdl_options(q)
        )
    return y


def append_attention(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, T, K, D]
    v: Tensor,  # [B, T, K, D]
    buffers: KVBuffers,
    lengths: Tensor,  # [B] int32
    *,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    angles: tuple[Tensor, Tensor] | None = None,  # cos and sin [B or 1, T, R/2]
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Appends T tokens to every row of the cache and attends causally; returns [B, T, H, D].

    Row r has lengths[r] tokens, so its new token j has position lengths[r] + j; `lengths` is not
    changed. A window of W sees W tokens, including the query's own; if it is `chunked`, those of
    the query's W positions from a multiple of W on. `scale` defaults to D ** -0.5.
    With `angles`, q and k are rotated first, as by `rope`. `sinks` are as in `attention`. Full
    buffers are a ring of the last R tokens, which loses nothing if R is at least lengths[r] + T or,
    with a window, W + T - 1. Slots without a token are never read. int8 buffers store the new
    tokens rounded, and this call sees them so.

    The host never waits for the device and launches depend on shapes alone, so a CUDA graph can
    capture the call. The tokens of a row are shared among programs, whose sums a second kernel adds
    in a fixed order (Flash-Decoding, Dao et al. 2023). More than 16 tokens go in parts of 16.

    Raises ValueError for shapes or dtypes that do not match, RuntimeError if a gradient is
    required: the buffers are overwritten.
    """
    _check_inputs(q, k, v, buffers, lengths, sinks)
    if not q.numel():
        return torch.empty_like(q)
    odd = buffers.key_scales is not None and q.shape[-1] % 2 == 1  # int8 is read in pairs
    bf16 = q.dtype == torch.bfloat16 and q.device.type != "cuda"  # the interpreter has no products
    served = not odd and not bf16 and runs_triton(q) and holds_tile(q, buffers.keys)
    if angles is not None and not (served and fuses_rope(q.shape[1], buffers)):
        (q, k), angles = rope(q, k, *angles), None
    if not served:
        kind: dict[str, Any] = {"window": window, "chunked": chunked, "softcap": softcap}
        return append_attention_ref(q, k, v, buffers, lengths, scale=scale, sinks=sinks, **kind)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    cos, sin = (None, None) if angles is None else angles
    if angles is not None:
        check_angles(*angles, q.shape[0], q.shape[1], q.shape[3])
    options = window, chunked, softcap, scale, cos, sin, sinks
    if q.shape[1] <= MAX_QUERY_TOKENS:
        return _forward(q, k, v, *buffers, lengths, *options)
    parts = zip(*(x.split(MAX_QUERY_TOKENS, 1) for x in (q, k, v)), strict=True)
    calls = ((*p, *buffers, lengths + i * MAX_QUERY_TOKENS) for i, p in enumerate(parts))
    return torch.cat([_forward(*call, *options) for call in calls], 1)


def fuses_rope(tokens: int, buffers: KVBuffers) -> bool:
    """Whether the kernel can rotate, too: not pairs of int8, nor more than MAX_QUERY_TOKENS."""
    return buffers.key_scales is None and tokens <= MAX_QUERY_TOKENS


def holds_tile(q: Tensor, keys: Tensor) -> bool:
    """Whether shared memory holds the smallest tile of cached tokens, which are 16."""
    return 16 * _token_bytes(keys.dtype, _width(q.shape[-1])) <= shared_memory(q)


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, buffers: KVBuffers, lengths: Tensor, sinks: Tensor | None
) -> None:
    """Raises ValueError unless q, k, v, the buffers, the lengths and sinks fit each other, and
    RuntimeError if a gradient is required."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "append_attention has no gradient: call it inside torch.no_grad(), or use a KVCache"
        )
    if q.dim() != 4:
        raise ValueError(f"q {tuple(q.shape)} is not [B, T, H, D]")
    b, kv_heads, slots, d = check_buffers(k, buffers)
    t, h = q.shape[1:3]
    new = b, t, kv_heads, d
    for name, x, shape in ("q", q, (b, t, h, d)), ("k", k, new), ("v", v, new):
        if x.shape != shape:
            raise ValueError(f"{name} {tuple(x.shape)} is not {shape}, as q and the cache say")
        if x.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype}, {name} is {x.dtype}: all must be the same")
    if lengths.shape != (b,) or lengths.is_floating_point():
        raise ValueError(f"lengths {tuple(lengths.shape)} {lengths.dtype} are not {b} integers")
    if h % kv_heads:
        raise ValueError(f"{h} query heads cannot share {kv_heads} key/value heads")
    if sinks is not None and sinks.shape != (h,):
        raise ValueError(f"sinks {tuple(sinks.shape)} are not one for each of {h} query heads")
    if t > slots:
        raise ValueError(f"{t} new tokens do not fit into {slots} slots")
    check_devices(q=q, k=k, v=v, lengths=lengths, sinks=sinks, **buffers._asdict())
