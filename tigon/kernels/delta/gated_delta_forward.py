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
one after another, with the state in registers. All of the scan is transposed, with columns of the
state as rows: what a product rounds is then the first factor of the next one, which is read from
registers. An entry of `solve` is at most beta, so that it may be rounded. Bytes per token in bf16
(K=16, H=32, D=128): 8 KB for q and k, 8 KB each for v and the outputs, and `solve` and `mix` of
4 KB each, once written and once read.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.delta.gated_delta_tiles import (
    CHUNK,
    Chunks,
    DeltaLaunch,
    block_of,
    fit_stages,
    is_wide,
    load_gate,
    load_matrix,
    load_rows,
    make_chunks,
    matrix_boxes,
    matrix_tile,
    precision_of,
    row_boxes,
    store_matrix,
    store_rows,
    takes_boxes,
)
from tigon.kernels.runtime import num_sms, operator, tl, triton

PREPARE: dict[str, int] = {"num_warps": 4}
# For so many programs that they take turns, and for fewer, which wait for memory alone; two stages
# at least, as Triton 3.6 miscompiles one on Hopper
SCAN, SCAN_FEW = DeltaLaunch(64, 4, 2), DeltaLaunch(64, 4, 3)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Multiplies what will be rounded to bf16 in fp16, which has as many digits as tf32."""
    if PRECISION == "tf32":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _merge(solved, mixed, i, j, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """Merges the inverses of diagonal blocks of 2^LEVEL in pairs; all else is 0."""
    lower = (i >> (LEVEL + 1) == j >> (LEVEL + 1)) & (i >> LEVEL > j >> LEVEL)
    below = _product(solved, tl.where(lower, mixed, 0.0), PRECISION)
    return solved - _product(below, solved, PRECISION)


@triton.jit
def _invert(mixed, C: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (1 + mixed)^-1 of a strictly lower triangular matrix.

    Inverses of diagonal blocks are merged in pairs, from blocks of 2 on, and up to 16 side by side.
    Powers of `mixed` would grow to 1e17 where all keys are equal.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    diagonal = i // 16 == j // 16
    blocks = tl.sum(tl.reshape(tl.where(diagonal, mixed, 0.0), [C // 16, 16, C // 16, 16]), 2)
    a, b = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(a == b, 1.0, tl.where((a // 2 == b // 2) & (a > b), -blocks, 0.0))
    for level in tl.static_range(1, 4):
        x = _merge(x, blocks, a, b, level, PRECISION)
    x = tl.broadcast_to(x[:, :, None, :], [C // 16, 16, C // 16, 16])
    solved = tl.where(diagonal, tl.reshape(x, [C, C]), 0.0)
    for level in tl.static_range(4, 6):
        solved = _merge(solved, mixed, i, j, level, PRECISION)
    return solved


@triton.jit(do_not_specialize=["M"])
def _prepare_kernel(
    q, k,  # [N, K, Dk]
    g, beta,  # [N, H]
    table,  # [2, M]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 4, C]: G, exp(G), exp(G_last - G) beta, beta
    keep,  # [M, H]: exp(G_last)
    M,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what a chunk of a value head mixes."""
    m, h = tl.program_id(0) // H, tl.program_id(0) % H  # a chunk's heads share its rows
    i = tl.arange(0, C)
    token, left = tl.load(table + m), tl.load(table + M + m)
    key_head = h // (H // K)
    kc = load_rows(k, token, left, key_head, K, Dk, 0, C, BK, False, True)
    qc = load_rows(q, token, left, key_head, K, Dk, 0, C, BK, False, True)
    at = (token + i).to(tl.int64) * H + h
    inside = i < left
    G = tl.cumsum(tl.load(g + at, mask=inside, other=0.0), 0)
    b = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
    # Never the product of two exponentials: G may fall to -1000 within a chunk
    later = i[:, None] >= i[None, :]
    shared = tl.exp(tl.where(later, G[:, None] - G[None, :], float("-inf"))) * b[None, :]
    mixed = tl.dot(qc, tl.trans(kc), input_precision=PRECISION) * shared
    at, _ = matrix_tile(mix, m * H + h, C, C, 0, 0, C, C)
    tl.store(at, mixed.to(mix.dtype.element_ty))
    mixed = tl.dot(kc, tl.trans(kc), input_precision=PRECISION) * shared
    solved = _invert(tl.where(i[:, None] > i[None, :], mixed, 0.0), C, PRECISION)
    at, _ = matrix_tile(solve, m * H + h, C, C, 0, 0, C, C)
    tl.store(at, solved.to(solve.dtype.element_ty))
    last = tl.sum(tl.where(i == C - 1, G, 0.0), 0)
    gates += (m * H + h).to(tl.int64) * 4 * C + i
    tl.store(gates, G)
    tl.store(gates + C, tl.exp(G))
    tl.store(gates + 2 * C, tl.exp(last - G) * b)
    tl.store(gates + 3 * C, b)
    tl.store(keep + m * H + h, tl.exp(last))


class Prepared(NamedTuple):
    """What the chunks mix."""

    solve: Tensor  # [M, H, C, C]
    mix: Tensor  # [M, H, C, C]
    gates: Tensor  # fp32 [M, H, 4, C]
    keep: Tensor  # fp32 [M, H]


def prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Prepared:
    """Computes what each chunk mixes, from contiguous q and k [B, T, K, Dk] and gates [B, T, H]."""
    (K, Dk), H, M = q.shape[2:], g.shape[2], chunks.slots
    solve, mix = (q.new_empty(M, H, CHUNK, CHUNK) for _ in range(2))
    gates = torch.empty(M, H, 4, CHUNK, dtype=torch.float32, device=q.device)
    keep = gates.new_empty(M, H)
    _prepare_kernel[(M * H,)](
        *(q, k, g, beta, chunks.table, solve, mix, gates, keep, M, H, K),
        *(Dk, CHUNK, block_of(Dk), precision_of(q)),
        **PREPARE,
    )
    return Prepared(solve, mix, gates, keep)


@triton.jit
def load_state(
    x, at, Dk: tl.constexpr, Dv: tl.constexpr, first, BK: tl.constexpr, BV: tl.constexpr
):
    """Loads columns of the state `at` of x [..., Dk, Dv] as [BV, BK]; without x they are 0."""
    if x is None:
        return tl.zeros([BV, BK], tl.float32)
    else:
        pointers, exists = matrix_tile(x, at, Dk, Dv, 0, first, BK, BV)
        return tl.trans(tl.load(pointers, mask=exists, other=0.0))


@triton.jit
def scan_chunks(
    program,
    q,  # None: no outputs
    k,  # [N, K, Dk]
    v,  # [N, H, Dv]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 4, C]
    keep,  # [M, H]
    bounds, offsets,  # [S + 1]
    state,  # [S, H, Dk, Dv], or None: zeros
    o, o_boxes,  # [N, H, Dv]
    errors,  # [M, H, Dv, C], or None with outputs
    states,  # [M, H, Dv, Dk]: those before the chunks
    final,  # [S, H, Dk, Dv]
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Takes the chunks of a sequence in order, for BV columns of the state of a value head."""
    tile, head = program % tl.cdiv(Dv, BV), program // tl.cdiv(Dv, BV)
    first, h, n = tile * BV, head % H, head // H
    key_head = h // (H // K)
    S = load_state(state, n * H + h, Dk, Dv, first, BK, BV)
    start, end = tl.load(bounds + n), tl.load(bounds + n + 1)
    begin, stop = tl.load(offsets + n), tl.load(offsets + n + 1)
    whole = begin + (end - start) // C
    for REST in tl.static_range(1 - BOXES, 2):  # boxes of whole chunks, then what is left
        low = (whole if BOXES else begin) if REST else begin
        for m in tl.range(low, stop if REST else whole, num_stages=STAGES):
            token, at = start + (m - begin) * C, m * H + h
            left = end - token
            kc = load_rows(k, token, left, key_head, K, Dk, 0, C, BK, BOXES, REST)
            vc = load_rows(v, token, left, h, H, Dv, first, C, BV, BOXES, REST)
            solved = load_matrix(solve, at, C, C, 0, 0, C, C, BOXES)
            reach = load_gate(gates, at, 1, C, BOXES)[None, :]
            weight = load_gate(gates, at, 2, C, BOXES)[None, :]
            before = S.to(kc.dtype)
            if states is not None:
                store_matrix(states, before, at, Dv, Dk, first, 0, BV, BK, BOXES)
            missed = tl.trans(vc) - reach * tl.dot(before, tl.trans(kc), input_precision=PRECISION)
            error = tl.dot(missed.to(kc.dtype), tl.trans(solved), input_precision=PRECISION)
            if errors is not None:
                store_matrix(errors, error, at, Dv, C, first, 0, BV, C, BOXES)
            if o is not None:
                qc = load_rows(q, token, left, key_head, K, Dk, 0, C, BK, BOXES, REST)
                mixed = load_matrix(mix, at, C, C, 0, 0, C, C, BOXES)
                out = reach * tl.dot(before, tl.trans(qc), input_precision=PRECISION)
                out = tl.dot(error.to(kc.dtype), tl.trans(mixed), out, input_precision=PRECISION)
                out = tl.trans(out.to(kc.dtype))
                if REST:
                    store_rows(o, out, token, left, h, H, Dv, first, C, BV, False)
                else:
                    store_rows(o_boxes, out, token, left, h, H, Dv, first, C, BV, True)
            S *= tl.load(keep + at)
            S = tl.dot((weight * error).to(kc.dtype), kc, S, input_precision=PRECISION)
    if final is not None:
        pointers, exists = matrix_tile(final, n * H + h, Dk, Dv, 0, first, BK, BV)
        tl.store(pointers, tl.trans(S), mask=exists)


@triton.jit
def _scan_kernel(
    q, k, v, solve, mix, gates, keep, bounds, offsets, state, o, o_boxes, errors, states, final,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Runs `scan_chunks`."""
    scan_chunks(
        tl.program_id(0), q, k, v, solve, mix, gates, keep, bounds, offsets, state,
        o, o_boxes, errors, states, final, H, K, Dk, Dv, C, BK, BV, STAGES, PRECISION, BOXES,
    )  # fmt: skip


class Scan(NamedTuple):
    """How a scan is launched."""

    programs: int
    block: int  # columns of the state that a program takes
    launch: DeltaLaunch
    boxes: bool


def plan_scan(
    many: DeltaLaunch, few: DeltaLaunch, k: Tensor, v: Tensor, chunks: Chunks, boxes: bool
) -> Scan:
    """Chooses the launch for v [B, T, H, Dv] in chunks."""
    H, Dv = v.shape[2:]
    # Also of narrow heads, as Hopper multiplies so many rows; others have no registers for them
    block = many.block if is_wide(v) else many.block // 2
    programs = -(-Dv // block) * H * (len(chunks.bounds) - 1)
    launch = few if programs <= num_sms(v) and v.element_size() == 2 else many
    launch = launch._replace(stages=fit_stages(k, launch.stages, block))
    return Scan(programs, block, launch, boxes)


def scan_tensors(
    q: Tensor | None, k: Tensor, v: Tensor, prepared: Prepared, scan: Scan
) -> tuple[Any, ...]:
    """Returns q, k, v and what was prepared, as boxes where the scan takes them."""
    if not scan.boxes:
        return q, k, v, *prepared
    keys = (x if x is None else row_boxes(x, block_of(k.shape[-1])) for x in (q, k))
    squares = (matrix_boxes(x, CHUNK, CHUNK) for x in prepared[:2])
    gates = matrix_boxes(prepared.gates, 1, CHUNK)
    return *keys, row_boxes(v, scan.block), *squares, gates, prepared.keep


def _outputs(
    q: Tensor, k: Any, v: Tensor, g: Any, beta: Any, cu_seqlens: Tensor | None, *_: Any
) -> list[Tensor]:
    """Allocates the outputs and the states after the last tokens."""
    rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (rows, v.shape[2], q.shape[3], v.shape[3])
    final = torch.empty(shape, dtype=torch.float32, device=q.device)
    return [v.new_empty(v.shape), final]


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
    run_scan(q, k, v, prepared, chunks, state, o, final)
    return [o, final]


def run_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    chunks: Chunks,
    state: Tensor | None,
    o: Tensor,
    final: Tensor,
) -> None:
    """Fills the outputs and the last states."""
    (K, Dk), (H, Dv) = k.shape[2:], v.shape[2:]
    scan = plan_scan(SCAN, SCAN_FEW, k, v, chunks, takes_boxes(q, k, v))
    o_boxes = row_boxes(o, scan.block) if scan.boxes else None
    _scan_kernel[(scan.programs,)](
        *scan_tensors(q, k, v, prepared, scan), chunks.bounds, chunks.offsets, state,
        o, o_boxes, None, None, final, H, K, Dk, Dv, CHUNK, block_of(Dk), scan.block,
        scan.launch.stages, precision_of(k), scan.boxes, num_warps=scan.launch.warps,
    )  # fmt: skip
