"""Triton kernels of `causal_conv`: they walk over tokens with the last inputs in registers.

# B batch, T tokens, C channels, W taps (up to 4), K key heads, L tokens of a chunk

A program has the channels of one head, and several chunks of tokens that it walks over side by
side. Every input is read once, but for the three tokens around a chunk's ends: 4 bytes per element
in bf16 forward, 6 backward, where the results are computed again.
"""

from tigon.kernels.runtime import pdl_wait, tl, triton

L2_EPS = tl.constexpr(1e-6)  # of the norm of queries and keys


@triton.jit
def _load_taps(weight, channels, inside, W):
    """Loads the weights of a token and of the three before it; 0 for those that are too many."""
    at = weight + channels * W + W - 1
    w0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(at - 1, mask=inside & (W > 1), other=0.0).to(tl.float32)
    w2 = tl.load(at - 2, mask=inside & (W > 2), other=0.0).to(tl.float32)
    w3 = tl.load(at - 3, mask=inside & (W > 3), other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _convolve(x0, x1, x2, x3, taps, dtype):
    """Sums the products of four tokens and their weights, rounded to dtype."""
    h = x0 * taps[0] + x1 * taps[1] + x2 * taps[2] + x3 * taps[3]
    return h.to(dtype).to(tl.float32)


@triton.jit
def _silu_and_slope(x):
    """Returns silu of fp32 numbers, and its derivative; exp2 takes half the instructions of exp."""
    s = 1.0 / (1.0 + tl.math.exp2(-1.4426950408889634 * x))
    y = x * s
    return y, s + y * (1.0 - s)


@triton.jit
def _place(chunks, T, L, width, C, BLOCK, ROWS):
    """Returns group and block of chunks of a program; of each chunk: batch row, first token and
    whether it exists; columns of the group, their channels, and which of them exist."""
    groups = tl.cdiv(C, width)
    block = tl.program_id(0) // groups  # neighboring programs read neighboring channels
    group = tl.program_id(0) - block * groups
    chunk = block * ROWS + tl.arange(0, ROWS)[:, None]
    per_row = tl.cdiv(T, L)
    b = chunk // per_row
    t0 = (chunk - b * per_row) * L
    columns = tl.arange(0, BLOCK)[None, :]
    channels = group * width + columns
    inside = channels < C
    if width != BLOCK:
        inside &= columns < width
    return group, block, b.to(tl.int64), t0, chunk < chunks, columns, channels, inside


@triton.jit
def _part_of(q, k, v, group, width, K):
    """Returns where a group's first column is in q, k or v, and the step from row to row."""
    at = v[0] + (group - 2 * K) * width
    row = v[1]
    if K > 0 and group < K:
        at = q[0] + group * width
        row = q[1]
    elif K > 0 and group < 2 * K:
        at = k[0] + (group - K) * width
        row = k[1]
    return at, row


@triton.jit
def _load_begins(starts, b, t, T, live):
    """Loads whether a sequence begins at token t of each chunk; false outside of the rows."""
    return tl.load(starts + b * T + t, mask=live & (t >= 0) & (t < T), other=0) != 0


@triton.jit
def _load_inputs(x, state, b, t, T, C, live, channels, inside, W):
    """Loads the inputs at t, before the first token those of the state."""
    mask = live & inside
    at = x[0] + (b * T + t) * x[1] + channels
    tile = tl.load(at, mask=mask & (t >= 0) & (t < T), other=0.0)
    if state is not None:
        at = state + (b * (W - 1) + t + W - 1) * C + channels
        tile += tl.load(at, mask=mask & (t < 0) & (t >= 1 - W), other=0.0)  # one of both is 0
    return tile.to(tl.float32)


@triton.jit
def _load_tokens(at, row, t, T, mask, STEP):
    """Loads STEP tokens from `at` on, 1 or 4, so that their loads are in flight together."""
    a = tl.load(at, mask=mask & (t < T), other=0.0)
    b = a
    c = a
    d = a
    if STEP > 1:
        b = tl.load(at + row, mask=mask & (t + 1 < T), other=0.0)
        c = tl.load(at + 2 * row, mask=mask & (t + 2 < T), other=0.0)
        d = tl.load(at + 3 * row, mask=mask & (t + 3 < T), other=0.0)
    return a, b, c, d


@triton.jit
def _load_history(x, state, starts, b, t0, T, C, live, channels, inside, W):
    """Loads the inputs at t0 - 1, t0 - 2 and t0 - 3, 0 in place of another sequence's."""
    x1 = _load_inputs(x, state, b, t0 - 1, T, C, live, channels, inside, W)
    x2 = _load_inputs(x, state, b, t0 - 2, T, C, live, channels, inside, W)
    x3 = _load_inputs(x, state, b, t0 - 3, T, C, live, channels, inside, W)
    if starts is not None:
        cut1 = _load_begins(starts, b, t0 - 1, T, live)
        cut2 = cut1 | _load_begins(starts, b, t0 - 2, T, live)
        x2 = tl.where(cut1, 0.0, x2)
        x3 = tl.where(cut2, 0.0, x3)
    return x1, x2, x3


@triton.jit
def _walk(
    x, state, starts, y, y_row, taps, b, t0, live, columns, channels, inside, T, L, C, scale,
    W, SILU, NORM, STEP,
):  # fmt: skip
    """Writes the results of L tokens of each chunk."""
    dtype: tl.constexpr = y.dtype.element_ty
    x1, x2, x3 = _load_history(x, state, starts, b, t0, T, C, live, channels, inside, W)
    for first in range(0, L, STEP):
        t = t0 + first
        at = x[0] + (b * T + t) * x[1] + channels
        tiles = _load_tokens(at, x[1], t, T, live & inside, STEP)
        at = y + (b * T + t) * y_row + columns
        for i in tl.static_range(STEP):
            x0 = tiles[i].to(tl.float32)
            if starts is not None:
                cut = _load_begins(starts, b, t, T, live)
                x1 = tl.where(cut, 0.0, x1)
                x2 = tl.where(cut, 0.0, x2)
                x3 = tl.where(cut, 0.0, x3)
            h = _convolve(x0, x1, x2, x3, taps, dtype)
            if SILU:
                h, _ = _silu_and_slope(h)
            if NORM:
                h = h.to(dtype).to(tl.float32)
                h *= tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) + L2_EPS) * scale
            tl.store(at, h.to(dtype), mask=live & inside & (t < T))
            at += y_row
            t += 1
            x3 = x2
            x2 = x1
            x1 = x0


@triton.jit(do_not_specialize=["chunks", "T"], do_not_specialize_on_alignment=["L"])
def conv_forward_kernel(
    x,  # these four: pointer and step from row to row
    q, k, v, weight,
    starts,  # [B, T]
    state,  # [B, W - 1, C]
    chunks, T, L, scale,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    UPDATE: tl.constexpr,  # the state, after rows that are one chunk each
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Walks over ROWS chunks of tokens at once, each with the channels of one group."""
    pdl_wait(PDL)
    group, _, b, t0, live, columns, channels, inside = _place(chunks, T, L, WIDTH, C, BLOCK, ROWS)
    y, y_row = _part_of(q, k, v, group, WIDTH, K)
    taps = _load_taps(weight, channels, inside, W)
    if UPDATE:
        last = _load_history(x, state, None, b, t0 + T, T, C, live, channels, inside, W)
    if K > 0 and group < 2 * K:
        _walk(
            x, state, starts, y, y_row, taps, b, t0, live, columns, channels, inside, T, L, C,
            tl.where(group < K, scale, 1.0), W, SILU, True, STEP,
        )  # fmt: skip
    else:
        _walk(
            x, state, starts, y, y_row, taps, b, t0, live, columns, channels, inside, T, L, C,
            scale, W, SILU, False, STEP,
        )  # fmt: skip
    if UPDATE:
        tl.debug_barrier()  # until the old state was read
        at = state + (b + 1) * (W - 1) * C + channels
        for back in tl.static_range(1, 4):
            mask = live & inside & (back < W)
            tl.store(at - back * C, last[back - 1].to(state.dtype.element_ty), mask=mask)


@triton.jit
def _gradients_of(
    x0, x1, x2, x3, d, taps, dtype, scale, SILU, NORM
):  # fmt: skip
    """Returns the gradient of the convolution's sums from the gradient d of the results."""
    h = _convolve(x0, x1, x2, x3, taps, dtype)
    if SILU:
        h, slope = _silu_and_slope(h)
    if NORM:
        h = h.to(dtype).to(tl.float32)
        r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) + L2_EPS)
        h *= r
        d *= scale
        d = r * (d - h * tl.sum(d * h, 1, keep_dims=True))
    if SILU:
        d *= slope
    return d


@triton.jit
def _walk_back(
    carried, first, x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns, channels,
    inside, T, L, C, scale, W, SILU, NORM,
    LEARNS, STEP,
):  # fmt: skip
    """Walks over STEP tokens: writes the gradients of the inputs three tokens before them, and
    returns what the next tokens need: see `conv_backward_kernel`."""
    x1, x2, x3, p1, p2, p3, c1, c2, g0, g1, g2, g3 = carried
    dtype: tl.constexpr = x[0].dtype.element_ty
    mask = live & inside
    t = t0 + first
    row = b * T + t
    inputs = _load_tokens(x[0] + row * x[1] + channels, x[1], t, T, mask, STEP)
    ups = _load_tokens(dy + row * dy_row + columns, dy_row, t, T, mask, STEP)
    for i in tl.static_range(STEP):
        t = t0 + first + i
        x0 = inputs[i].to(tl.float32)
        if starts is not None:
            c0 = _load_begins(starts, b, t, T, live)
            x1 = tl.where(c0, 0.0, x1)
            x2 = tl.where(c0, 0.0, x2)
            x3 = tl.where(c0, 0.0, x3)
        d = ups[i].to(tl.float32)
        d = _gradients_of(x0, x1, x2, x3, d, taps, dtype, scale, SILU, NORM)
        if LEARNS:
            g0 += d * x0
            g1 += d * x1
            g2 += d * x2
            g3 += d * x3
        if dx is not None:
            d1 = d
            d2 = d
            d3 = d
            if starts is not None:
                d1 = tl.where(c0, 0.0, d)
                d2 = tl.where(c0 | c1, 0.0, d)
                d3 = tl.where(c0 | c1 | c2, 0.0, d)
                c2 = c1
                c1 = c0
            p3 += d3 * taps[3]
            t -= 3
            own = (t >= t0) & (t < t0 + L) & (t < T)
            at = dx + (b * T + t) * C + channels
            tl.store(at, p3.to(dtype), mask=mask & own)
            if dstate is not None:
                at = dstate + (b * (W - 1) + t + W - 1) * C + channels
                tl.store(at, p3.to(dtype), mask=mask & (t < 0) & (t >= 1 - W))
            p3 = p2 + d2 * taps[2]
            p2 = p1 + d1 * taps[1]
            p1 = d * taps[0]
        x3 = x2
        x2 = x1
        x1 = x0
    return x1, x2, x3, p1, p2, p3, c1, c2, g0, g1, g2, g3


@triton.jit
def _walk_chunk_back(
    x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns, channels, inside, T, L,
    C, scale, W, SILU, NORM, LEARNS,
    STEP,
):  # fmt: skip
    """Writes the gradients of L inputs of each chunk; returns those of the taps, by chunk."""
    x1, x2, x3 = _load_history(x, state, starts, b, t0, T, C, live, channels, inside, W)
    zero = tl.zeros_like(x1)
    none = t0 < 0
    # Inputs, sums of gradients of the three tokens before, whether sequences began at the two
    # before, and the gradients of the taps
    carried = x1, x2, x3, zero, zero, zero, none, none, zero, zero, zero, zero
    for first in range(0, L, STEP):
        carried = _walk_back(
            carried, first, x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns,
            channels, inside, T, L, C, scale, W, SILU, NORM, LEARNS, STEP,
        )  # fmt: skip
    if dx is not None:  # the last inputs of a chunk are used by the next one's first results
        carried = _walk_back(
            carried, L, x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns,
            channels, inside, T, L, C, scale, W, SILU, NORM, False, STEP,
        )  # fmt: skip
    return carried[8], carried[9], carried[10], carried[11]


@triton.jit(do_not_specialize=["chunks", "T"])
def conv_backward_kernel(
    x,  # these four: pointer and step from row to row
    dq, dk, dv, weight, starts, state, dx, dstate,
    partials,  # [P, C, W]: sums of the weight's gradient
    chunks, T, L, scale,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Walks over ROWS chunks of tokens at once, each with the channels of one group."""
    group, block, b, t0, live, columns, channels, inside = _place(
        chunks, T, L, WIDTH, C, BLOCK, ROWS
    )
    dy, dy_row = _part_of(dq, dk, dv, group, WIDTH, K)
    taps = _load_taps(weight, channels, inside, W)
    if K > 0 and group < 2 * K:
        sums = _walk_chunk_back(
            x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns, channels, inside,
            T, L, C, tl.where(group < K, scale, 1.0), W, SILU, True, partials is not None, STEP,
        )  # fmt: skip
    else:
        sums = _walk_chunk_back(
            x, state, starts, dy, dy_row, dx, dstate, taps, b, t0, live, columns, channels, inside,
            T, L, C, scale, W, SILU, False, partials is not None, STEP,
        )  # fmt: skip
    if partials is not None:
        at = partials + (block.to(tl.int64) * C + channels) * W + W - 1
        for back in tl.static_range(4):
            total = tl.sum(sums[back], 0, keep_dims=True)
            tl.store(at - back, total, mask=inside & (back < W))
