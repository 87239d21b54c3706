"""The gated delta rule over chunks: first what each chunk mixes, then states and outputs in order.

# B batch, T tokens, N = B T tokens, S sequences, M chunks, C tokens of a chunk, K key heads,
# H value heads, Dk and Dv head dims

With G the sum of g within a chunk up to a token, and for tokens i >= j of a chunk

    decay_ij = exp(G_i - G_j)
    solve    = (1 + strictly lower(k_i k_j decay_ij beta_j))^-1
    mix      = lower(q_i k_j decay_ij beta_j)
    errors   = solve (v - exp(G) k^T state)
    outputs  = exp(G) q^T state + mix errors
    state    = exp(G_last) state + k^T (exp(G_last - G) beta errors)

`solve` and `mix` of all chunks are computed at once; a scan then takes the chunks of a sequence
one after another, with the state in registers. An entry of `solve` is at most beta, so that it may
be rounded. Bytes per token in bf16 (K=16, H=32, D=128): 8 KB for q and k, 8 KB each for v and the
outputs, and `solve` and `mix` of 4 KB each, once written and once read.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import (
    next_power_of_2,
    num_sms,
    num_stages,
    operator,
    shared_memory,
    tl,
    triton,
)

CHUNK = 64
MAX_DIM = 128  # of heads: a state of [Dk, a part of Dv] stays in registers


class ScanLaunch(NamedTuple):
    """Launch parameters of a scan; tuned on an H200."""

    block: int  # columns of the state
    warps: int
    stages: int  # chunks in flight: at least two, as Triton 3.6 miscompiles one on Hopper


PREPARE: dict[str, int] = {"num_warps": 4}
# For so many programs that they take turns, and for fewer, which wait for memory alone
FORWARD, FORWARD_FEW = ScanLaunch(32, 4, 2), ScanLaunch(32, 4, 3)


def precision_of(x: Tensor) -> str:
    """Returns the precision of products of fp32 where x is what it is.

    Three products of tf32 are as exact as one of fp32. For bf16 one suffices: its error in the
    inverse of a chunk is about that of rounding it, whatever the keys.
    """
    return "tf32" if x.dtype == torch.bfloat16 else "tf32x3"


def _stages(x: Tensor, most: int) -> int:
    """Returns how many chunks of a scan to have in flight, up to `most`, for keys x [..., Dk]."""
    columns = 2 * block_of(x.shape[-1]) + FORWARD.block + 2 * CHUNK  # q, k; v; solve, mix
    step = CHUNK * columns * x.element_size()
    return num_stages(step, most, shared_memory(x) - (12 << 10))  # the rest is for products


def fits(x: Tensor) -> bool:
    """Whether two chunks of x [..., Dk] fit into shared memory: wide fp32 does not everywhere."""
    return _stages(x, 2) == 2


class Chunks(NamedTuple):
    """Where the chunks of sequences are: int32 on the device, so that nothing waits for it."""

    table: Tensor  # [2, M]: first token and number of tokens; 0 beyond the last chunk
    offsets: Tensor  # [S + 1]: the first chunk of each sequence
    bounds: Tensor  # [S + 1]: the first token of each sequence

    @property
    def slots(self) -> int:
        """How many chunks there are at most."""
        return self.table.shape[1]


@triton.jit(do_not_specialize=["S", "M"])
def _chunks_kernel(bounds, table, offsets, S, M, C: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the chunks of a sequence; the last program empties those that nobody needs."""
    n = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = at < n
    lengths = tl.load(bounds + at + 1, mask=before, other=0) - tl.load(
        bounds + at, mask=before, other=0
    )
    first = tl.sum((lengths + C - 1) // C, 0)
    start = tl.load(bounds + n)
    end = tl.load(bounds + tl.minimum(n + 1, S))
    count = tl.where(n < S, (end - start + C - 1) // C, M - first)
    tl.store(offsets + n, first)
    for at_chunk in range(0, count, 64):
        chunk = at_chunk + tl.arange(0, 64)
        token = tl.where(n < S, start + chunk * C, 0)
        left = tl.where(n < S, end - token, 0)
        tl.store(table + first + chunk, token, mask=chunk < count)
        tl.store(table + M + first + chunk, tl.minimum(left, C), mask=chunk < count)


def make_chunks(q: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """Cuts the rows of q [B, T, ...], or the packed sequences of its single row, into chunks."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
    else:
        bounds = cu_seqlens.int().contiguous()
    S = len(bounds) - 1
    M = B * T // CHUNK + S
    made = Chunks(bounds.new_empty(2, M), bounds.new_empty(S + 1), bounds)
    _chunks_kernel[(S + 1,)](bounds, made.table, made.offsets, S, M, CHUNK, next_power_of_2(S))
    return made


@triton.jit
def chunk_tile(
    x, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns pointers to columns of one head of x [N, heads, D], for the C tokens from `token` on
    of which `left` exist; and which exist."""
    rows, columns = tl.arange(0, C)[:, None], first + tl.arange(0, BLOCK)[None, :]
    x += (token.to(tl.int64) * heads + head) * D
    return x + rows * (heads * D) + columns, (rows < left) & (columns < D)


@triton.jit
def load_tile(
    x, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads a tile [C, BLOCK], 0 where nothing exists."""
    at, exists = chunk_tile(x, token, left, head, heads, D, first, C, BLOCK)
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def store_tile(
    x, value, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores what `load_tile` loads."""
    at, exists = chunk_tile(x, token, left, head, heads, D, first, C, BLOCK)
    tl.store(at, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def square(x, at, C: tl.constexpr):
    """Returns pointers to the matrix `at` of x [..., C, C]."""
    i = tl.arange(0, C)
    return x + at.to(tl.int64) * C * C + i[:, None] * C + i[None, :]


@triton.jit
def state_tile(
    x, at, Dk: tl.constexpr, Dv: tl.constexpr, row, column, BK: tl.constexpr, BV: tl.constexpr
):
    """Returns pointers to a tile of the state `at` of x [..., Dk, Dv], and which exist."""
    rows, columns = row + tl.arange(0, BK)[:, None], column + tl.arange(0, BV)[None, :]
    return x + at.to(tl.int64) * Dk * Dv + rows * Dv + columns, (rows < Dk) & (columns < Dv)


@triton.jit
def chunk_decay(G, C: tl.constexpr):
    """Returns exp(G_i - G_j) for i >= j, else 0: never a product of two exponentials."""
    i = tl.arange(0, C)
    return tl.exp(tl.where(i[:, None] >= i[None, :], G[:, None] - G[None, :], float("-inf")))


@triton.jit
def _invert(mixed, C: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (1 + mixed)^-1 of a strictly lower triangular matrix.

    By substitution in diagonal blocks of 16, which are then merged into larger ones. Powers of
    `mixed` would grow to 1e17 where all keys are equal.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    diagonal = i // 16 == j // 16
    blocks = tl.reshape(tl.where(diagonal, mixed, 0.0), [C // 16, 16, C // 16, 16])
    x = -tl.sum(blocks, 2)
    rows = tl.arange(0, 16)[None, :, None]
    for n in range(2, 16):
        row = tl.sum(tl.where(rows == n, x, 0.0), 1)
        row += tl.sum(row[:, :, None] * x, 1)  # of the rows above, which are solved
        x = tl.where(rows == n, row[:, None, :], x)
    blocks = tl.broadcast_to(x[:, :, None, :], [C // 16, 16, C // 16, 16])
    solved = tl.where(diagonal, tl.reshape(blocks, [C, C]), 0.0) + tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(2):  # blocks of 16, then of 32
        lower = (i // (32 << level) == j // (32 << level)) & (
            i // (16 << level) > j // (16 << level)
        )
        below = tl.dot(solved, tl.where(lower, mixed, 0.0), input_precision=PRECISION)
        solved -= tl.dot(below, solved, input_precision=PRECISION)
    return solved


@triton.jit(do_not_specialize=["M"])
def _prepare_kernel(
    q, k,  # [N, K, Dk]
    g, beta,  # [N, H]
    table,  # [2, M]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 3, C]: G, exp(G_last - G) beta, beta
    M,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what a chunk of a value head mixes."""
    m, h = tl.program_id(0) // H, tl.program_id(0) % H  # a chunk's heads share its rows
    i = tl.arange(0, C)
    token, left = tl.load(table + m), tl.load(table + M + m)
    key_head = h // (H // K)
    kc = load_tile(k, token, left, key_head, K, Dk, 0, C, BK)
    qc = load_tile(q, token, left, key_head, K, Dk, 0, C, BK)
    at = (token + i).to(tl.int64) * H + h
    inside = i < left
    G = tl.cumsum(tl.load(g + at, mask=inside, other=0.0), 0)
    b = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
    shared = chunk_decay(G, C) * b[None, :]
    mixed = tl.dot(qc, tl.trans(kc), input_precision=PRECISION) * shared
    tl.store(square(mix, m * H + h, C), mixed.to(mix.dtype.element_ty))
    mixed = tl.dot(kc, tl.trans(kc), input_precision=PRECISION) * shared
    solved = _invert(tl.where(i[:, None] > i[None, :], mixed, 0.0), C, PRECISION)
    tl.store(square(solve, m * H + h, C), solved.to(solve.dtype.element_ty))
    last = tl.sum(tl.where(i == C - 1, G, 0.0), 0)
    gates += (m * H + h).to(tl.int64) * 3 * C
    tl.store(gates + i, G)
    tl.store(gates + C + i, tl.exp(last - G) * b)
    tl.store(gates + 2 * C + i, b)


class Prepared(NamedTuple):
    """What the chunks mix."""

    solve: Tensor  # [M, H, C, C]
    mix: Tensor  # [M, H, C, C]
    gates: Tensor  # fp32 [M, H, 3, C]


def prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Prepared:
    """Computes what each chunk mixes, from contiguous q and k [B, T, K, Dk] and gates [B, T, H]."""
    (K, Dk), H, M = q.shape[2:], g.shape[2], chunks.slots
    solve, mix = (q.new_empty(M, H, CHUNK, CHUNK) for _ in range(2))
    gates = torch.empty(M, H, 3, CHUNK, dtype=torch.float32, device=q.device)
    _prepare_kernel[(M * H,)](
        *(q, k, g, beta, chunks.table, solve, mix, gates, M, H, K),
        *(Dk, CHUNK, block_of(Dk), precision_of(q)),
        **PREPARE,
    )
    return Prepared(solve, mix, gates)


def block_of(dim: int) -> int:
    """Returns the width of a tile that holds `dim` columns, at least what tl.dot takes."""
    return max(16, next_power_of_2(dim))


@triton.jit
def _scan_kernel(
    q,  # None: no outputs
    k,  # [N, K, Dk]
    v,  # [N, H, Dv]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 3, C]
    bounds, offsets,  # [S + 1]
    state,  # [S, H, Dk, Dv], or None: zeros
    o, errors,  # [N, H, Dv], the one or the other
    states,  # [M, H, Dk, Dv]: those before the chunks
    final,  # [S, H, Dk, Dv]
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the chunks of a sequence in order, for BV columns of the state of a value head."""
    tile, head = tl.program_id(0) % tl.cdiv(Dv, BV), tl.program_id(0) // tl.cdiv(Dv, BV)
    first, h, n = tile * BV, head % H, head // H
    key_head = h // (H // K)
    dtype: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, C)
    S = tl.zeros([BK, BV], tl.float32)
    if state is not None:
        at, exists = state_tile(state, n * H + h, Dk, Dv, 0, first, BK, BV)
        S = tl.load(at, mask=exists, other=0.0)
    start, end = tl.load(bounds + n), tl.load(bounds + n + 1)
    begin = tl.load(offsets + n)
    for m in tl.range(begin, tl.load(offsets + n + 1), num_stages=STAGES):
        token = start + (m - begin) * C
        left = end - token
        kc = load_tile(k, token, left, key_head, K, Dk, 0, C, BK)
        vc = load_tile(v, token, left, h, H, Dv, first, C, BV)
        row = gates + (m * H + h).to(tl.int64) * 3 * C
        reach, weight = tl.exp(tl.load(row + i)), tl.load(row + C + i)
        before = S.to(dtype)
        if states is not None:
            kept, mask = state_tile(states, m * H + h, Dk, Dv, 0, first, BK, BV)
            tl.store(kept, before, mask=mask)
        missed = vc - reach[:, None] * tl.dot(kc, before, input_precision=PRECISION)
        solved = tl.load(square(solve, m * H + h, C))
        error = tl.dot(solved, missed.to(dtype), input_precision=PRECISION)
        if errors is not None:
            store_tile(errors, error, token, left, h, H, Dv, first, C, BV)
        if o is not None:
            qc = load_tile(q, token, left, key_head, K, Dk, 0, C, BK)
            mixed = tl.load(square(mix, m * H + h, C))
            out = reach[:, None] * tl.dot(qc, before, input_precision=PRECISION)
            out = tl.dot(mixed, error.to(dtype), out, input_precision=PRECISION)
            store_tile(o, out, token, left, h, H, Dv, first, C, BV)
        S *= tl.exp(tl.load(row + C - 1))
        change = (weight[:, None] * error).to(dtype)
        S = tl.dot(tl.trans(kc), change, S, input_precision=PRECISION)
    if final is not None:
        at, exists = state_tile(final, n * H + h, Dk, Dv, 0, first, BK, BV)
        tl.store(at, S, mask=exists)


def launch_scan(
    many: ScanLaunch, few: ScanLaunch, k: Tensor, v: Tensor, chunks: Chunks
) -> tuple[ScanLaunch, tuple[int, ...], int]:
    """Chooses the launch of a scan; returns it, its grid and how many columns a program takes."""
    H, Dv = v.shape[2:]

    def programs(launch: ScanLaunch) -> int:
        return -(-Dv // launch.block) * H * (len(chunks.bounds) - 1)

    launch = few if programs(few) <= num_sms(v) and v.element_size() == 2 else many
    launch = launch._replace(stages=_stages(k, launch.stages))
    return launch, (programs(launch),), min(launch.block, block_of(Dv))


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    chunks: Chunks,
    state: Tensor | None,
    *,
    o: Tensor | None = None,
    errors: Tensor | None = None,
    states: Tensor | None = None,
    final: Tensor | None = None,
) -> None:
    """Runs `_scan_kernel`, which fills the outputs that are given."""
    (K, Dk), (H, Dv) = k.shape[2:], v.shape[2:]
    launch, grid, block = launch_scan(FORWARD, FORWARD_FEW, k, v, chunks)
    _scan_kernel[grid](
        *(q, k, v, *prepared, chunks.bounds, chunks.offsets, state, o, errors, states, final),
        *(H, K, Dk, Dv, CHUNK, block_of(Dk), block, launch.stages, precision_of(k)),
        num_warps=launch.warps,
    )


def _outputs(
    q: Tensor, k: Any, v: Tensor, g: Any, beta: Any, cu_seqlens: Tensor | None, *_: Any
) -> list[Tensor]:
    """Allocates the outputs and the states after the last tokens."""
    rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (rows, v.shape[2], q.shape[3], v.shape[3])
    final = torch.empty(shape, dtype=torch.float32, device=q.device)
    return [torch.empty_like(v, memory_format=torch.contiguous_format), final]


@operator("gated_delta_rule", _outputs)
def gated_delta_forward(
    q: Tensor,  # [B, T, K, Dk]
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # fp32 [B, T, H]
    beta: Tensor,  # [B, T, H]
    cu_seqlens: Tensor | None,  # [S + 1]
    state: Tensor | None,  # fp32 [B or S, H, Dk, Dv]
) -> list[Tensor]:
    """Returns the outputs [B, T, H, Dv] and the states after the last tokens."""
    o, final = _outputs(q, k, v, g, beta, cu_seqlens)
    if v.numel() == 0 or final.numel() == 0:
        return [o, final.zero_() if state is None else final.copy_(state)]
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    state = None if state is None else state.contiguous()
    chunks = make_chunks(q, cu_seqlens)
    prepared = prepare(q, k, g, beta, chunks)
    scan(q, k, v, prepared, chunks, state, o=o, final=final)
    return [o, final]
