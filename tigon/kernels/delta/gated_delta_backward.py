"""Gradients of the gated delta rule: states again, their gradients backwards, then all chunks.

# B batch, T tokens, N = B T tokens, S sequences, M chunks, C tokens of a chunk, K key heads,
# H value heads, Dk and Dv head dims

In the terms of gated_delta_forward.py, with d for a gradient and dstate for that of the state after
a chunk, the scan from the last chunk to the first computes

    derrors = mix^T do + exp(G_last - G) beta (k dstate)
    dv      = solve^T derrors
    dstate  = exp(G_last) dstate + (exp(G) q)^T do - (exp(G) k)^T dv

The matrix of which `solve` is the inverse then has the gradient -dv errors^T, that of `mix` is
do errors^T, and all else follows chunk by chunk: first from these two, then from the states. What
the forward pass computed is computed again: only its inputs are saved.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.delta.gated_delta_forward import (
    Prepared,
    load_state,
    plan_scan,
    prepare,
    scan_chunks,
    scan_tensors,
)
from tigon.kernels.delta.gated_delta_tiles import (
    CHUNK,
    Chunks,
    DeltaLaunch,
    block_of,
    load_gate,
    load_matrix,
    load_rows,
    make_chunks,
    matrix_boxes,
    precision_of,
    row_boxes,
    store_matrix,
    store_rows,
    takes_boxes,
)
from tigon.kernels.runtime import device_fact, operator, tl, triton

SCANS = DeltaLaunch(64, 4, 3)
MIX = DeltaLaunch(0, 4, 2)
STATES = DeltaLaunch(64, 4, 2)  # columns of keys, and heads in flight: Triton 3.6 miscompiles one


@triton.jit
def _reverse_chunks(
    program,
    q, k,  # [N, K, Dk]
    do,  # [N, H, Dv]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 4, C]
    keep,  # [M, H]
    bounds, offsets,  # [S + 1]
    dfinal,  # [S, H, Dk, Dv], or None: zeros
    dv, dv_boxes,  # [N, H, Dv]
    dstates,  # [M, H, Dv, Dk]: of those after the chunks
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Takes the chunks of a sequence from the last to the first, for BV columns of the state."""
    tile, head = program % tl.cdiv(Dv, BV), program // tl.cdiv(Dv, BV)
    first, h, n = tile * BV, head % H, head // H
    key_head = h // (H // K)
    dS = load_state(dfinal, n * H + h, Dk, Dv, first, BK, BV)
    start, end = tl.load(bounds + n), tl.load(bounds + n + 1)
    begin, stop = tl.load(offsets + n), tl.load(offsets + n + 1)
    whole = begin + (end - start) // C
    for WHOLE in tl.static_range(1 + BOXES):  # what is left, then boxes of whole chunks
        low = whole if BOXES and not WHOLE else begin
        high = whole if WHOLE else stop
        for step in tl.range(0, high - low, num_stages=STAGES):
            m = high - 1 - step
            token, at = start + (m - begin) * C, m * H + h
            left = end - token
            kc = load_rows(k, token, left, key_head, K, Dk, 0, C, BK, BOXES, not WHOLE)
            qc = load_rows(q, token, left, key_head, K, Dk, 0, C, BK, BOXES, not WHOLE)
            doc = load_rows(do, token, left, h, H, Dv, first, C, BV, BOXES, not WHOLE)
            solved = load_matrix(solve, at, C, C, 0, 0, C, C, BOXES)
            mixed = load_matrix(mix, at, C, C, 0, 0, C, C, BOXES)
            reach = load_gate(gates, at, 1, C, BOXES)[None, :]
            weight = load_gate(gates, at, 2, C, BOXES)[None, :]
            after = dS.to(kc.dtype)
            store_matrix(dstates, after, at, Dv, Dk, first, 0, BV, BK, BOXES)
            derror = weight * tl.dot(after, tl.trans(kc), input_precision=PRECISION)
            doc = tl.trans(doc)
            derror = tl.dot(doc, mixed, derror, input_precision=PRECISION)
            dvc = tl.dot(derror.to(kc.dtype), solved, input_precision=PRECISION)
            stored = tl.trans(dvc.to(kc.dtype))
            if WHOLE:
                store_rows(dv_boxes, stored, token, left, h, H, Dv, first, C, BV, True)
            else:
                store_rows(dv, stored, token, left, h, H, Dv, first, C, BV, False)
            dS *= tl.load(keep + at)
            dS = tl.dot((reach * doc).to(kc.dtype), qc, dS, input_precision=PRECISION)
            dS = tl.dot((-reach * dvc).to(kc.dtype), kc, dS, input_precision=PRECISION)


@triton.jit(do_not_specialize=["PROGRAMS"])
def _scans_kernel(
    q, k, v, do, solve, mix, gates, keep, bounds, offsets, state, dfinal,
    errors, states, dv, dv_boxes, dstates, PROGRAMS,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Takes chunks in order for states, and backwards for their gradients, side by side: each has
    fewer programs for one long sequence than a GPU has multiprocessors."""
    if tl.program_id(0) < PROGRAMS:
        scan_chunks(
            tl.program_id(0), None, k, v, solve, mix, gates, keep, bounds, offsets, state,
            None, None, errors, states, None, H, K, Dk, Dv, C, BK, BV, STAGES, PRECISION, BOXES,
        )  # fmt: skip
    else:
        _reverse_chunks(
            tl.program_id(0) - PROGRAMS, q, k, do, solve, mix, gates, keep, bounds, offsets,
            dfinal, dv, dv_boxes, dstates, H, K, Dk, Dv, C, BK, BV, STAGES, PRECISION, BOXES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "M"])
def _mix_kernel(
    q, k,  # [N, K, Dk]
    table,  # [2, M]
    gates,  # [M, H, 4, C]
    errors,  # [M, H, Dv, C]
    do, dv,  # [N, H, Dv]
    given, taken,  # [M, K, C, C]: times keys they are parts of dq and dk, transposed others of dk
    dgates,  # [2, N, H]: what is added to dg and dbeta
    N, M,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of what a chunk's tokens mix: the products of queries and keys and of
    keys, summed over the value heads of a key head, and their part of those of the gates."""
    m, key_head = tl.program_id(0) // K, tl.program_id(0) % K
    i = tl.arange(0, C)
    token, left = tl.load(table + m), tl.load(table + M + m)
    inside = i < left
    kc = load_rows(k, token, left, key_head, K, Dk, 0, C, BK, False, True)
    qc = load_rows(q, token, left, key_head, K, Dk, 0, C, BK, False, True)
    later = (i[:, None] >= i[None, :]) & inside[:, None]  # boxes have rows of the next sequence
    qk = tl.dot(qc, tl.trans(kc), input_precision=PRECISION)
    kk = tl.dot(kc, tl.trans(kc), input_precision=PRECISION)
    kk = tl.where(i[:, None] > i[None, :], kk, 0.0)
    gave, took = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for h in tl.range(key_head * (H // K), (key_head + 1) * (H // K), num_stages=STAGES):
        doc = load_rows(do, token, left, h, H, Dv, 0, C, BV, BOXES, False)
        dvc = load_rows(dv, token, left, h, H, Dv, 0, C, BV, BOXES, False)
        error = load_matrix(errors, m * H + h, Dv, C, 0, 0, BV, C, BOXES)
        gate = gates + (m * H + h).to(tl.int64) * 4 * C + i
        G, b = tl.load(gate), tl.load(gate + 3 * C)[None, :]
        decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))  # finite above the diagonal too
        gives = tl.dot(doc, error, input_precision=PRECISION) * decay
        gives = tl.where(later, gives, 0.0)
        takes = tl.dot(dvc, error, input_precision=PRECISION) * decay
        takes = tl.where(later, takes, 0.0)
        both = gives * qk - takes * kk
        db = tl.sum(both, 0)
        dG = tl.sum(both * b, 1) - tl.load(gate + 3 * C) * db
        gave += gives * b
        took -= takes * b
        at = dgates + (token + i).to(tl.int64) * H + h
        tl.store(at, tl.cumsum(dG, 0, reverse=True), mask=inside)
        tl.store(at + N.to(tl.int64) * H, db, mask=inside)
    took = tl.where(i[:, None] > i[None, :], took, 0.0)
    store_matrix(given, gave, m * K + key_head, C, C, 0, 0, C, C, False)
    store_matrix(taken, took, m * K + key_head, C, C, 0, 0, C, C, False)


@triton.jit(do_not_specialize=["N", "M"])
def _states_kernel(
    q, k, q_boxes, k_boxes,  # [N, K, Dk]
    table,  # [2, M]
    gates,  # [M, H, 4, C]
    do, dv,  # [N, H, Dv]
    errors,  # [M, H, Dv, C]
    states, dstates,  # [M, H, Dv, Dk]: before the chunks, and the gradients of those after
    given, taken,  # [M, K, C, C]
    dq, dk,  # [N, K, Dk]
    dgates,  # [tiles of Dk, 2, N, H]: what a tile adds to dg and dbeta
    N, M,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of BK columns of a key head's chunk, summed over its value heads: what
    the states give and take, then what the tokens mix."""
    # Tiles and heads of a chunk run side by side, since they share its rows
    tile, head = tl.program_id(0) % tl.cdiv(Dk, BK), tl.program_id(0) // tl.cdiv(Dk, BK)
    m, key_head, first = head // K, head % K, tile * BK
    i = tl.arange(0, C)
    token, left = tl.load(table + m), tl.load(table + M + m)
    inside = i < left
    dqc, dkc = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dgates += tile.to(tl.int64) * 2 * N * H
    for h in tl.range(key_head * (H // K), (key_head + 1) * (H // K), num_stages=STAGES):
        # Of rows that do not exist boxes have the next sequence's, and so have results
        kc = load_rows(k_boxes, token, left, key_head, K, Dk, first, C, BK, BOXES, False)
        qc = load_rows(q_boxes, token, left, key_head, K, Dk, first, C, BK, BOXES, False)
        doc = load_rows(do, token, left, h, H, Dv, 0, C, BV, BOXES, False)
        dvc = load_rows(dv, token, left, h, H, Dv, 0, C, BV, BOXES, False)
        error = load_matrix(errors, m * H + h, Dv, C, 0, 0, BV, C, BOXES)
        before = load_matrix(states, m * H + h, Dv, Dk, 0, first, BV, BK, BOXES)
        after = load_matrix(dstates, m * H + h, Dv, Dk, 0, first, BV, BK, BOXES)
        gate = gates + (m * H + h).to(tl.int64) * 4 * C
        G, b, last = tl.load(gate + i), tl.load(gate + 3 * C + i), tl.load(gate + C - 1)
        reach, weight = tl.exp(G)[:, None], tl.exp(last - G)[:, None]

        # What the state before the chunk gives to outputs, and predicts
        read = reach * tl.dot(doc, before, input_precision=PRECISION)
        dG = tl.sum(read * qc, 1)
        dqc += read
        read = reach * tl.dot(dvc, before, input_precision=PRECISION)
        dG -= tl.sum(read * kc, 1)
        dkc -= read

        # What errors add to the state after it
        kept = tl.sum(tl.sum(before.to(tl.float32) * after.to(tl.float32), 1), 0)
        write = weight * tl.dot(tl.trans(error), after, input_precision=PRECISION)
        db = tl.where(inside, tl.sum(write * kc, 1), 0.0)
        dkc += b[:, None] * write
        kept = tl.exp(last) * kept + tl.sum(b * db, 0)
        dG = tl.where(inside, dG - b * db, 0.0) + tl.where(i == C - 1, kept, 0.0)

        at = dgates + (token + i).to(tl.int64) * H + h
        tl.store(at, tl.cumsum(dG, 0, reverse=True), mask=inside)
        tl.store(at + N.to(tl.int64) * H, db, mask=inside)
    # By pointers, which do not wait for one another
    kc = load_rows(k, token, left, key_head, K, Dk, first, C, BK, False, True)
    qc = load_rows(q, token, left, key_head, K, Dk, first, C, BK, False, True)
    gave = load_matrix(given, m * K + key_head, C, C, 0, 0, C, C, False)
    took = load_matrix(taken, m * K + key_head, C, C, 0, 0, C, C, False)
    dqc = tl.dot(gave, kc, dqc, input_precision=PRECISION)
    dkc = tl.dot(tl.trans(gave), qc, dkc, input_precision=PRECISION)
    dkc = tl.dot(took, kc, dkc, input_precision=PRECISION)
    dkc = tl.dot(tl.trans(took), kc, dkc, input_precision=PRECISION)
    store_rows(dq, dqc, token, left, key_head, K, Dk, first, C, BK, False)
    store_rows(dk, dkc, token, left, key_head, K, Dk, first, C, BK, False)


@device_fact
def _compiles(device: int) -> bool:
    old = [int(part) for part in triton.__version__.split(".")[:2]] < [3, 9]
    return not (old and torch.cuda.get_device_capability(device)[0] == 10)


def gradients_compile(x: Tensor) -> bool:
    """Whether Triton compiles the gradients for the GPU of x.

    For sm_100, 3.6 fails at a layout of `_states_kernel`, and 3.9 does not.
    """
    return x.device.type != "cuda" or _compiles(x.device.index)


def run_scans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    prepared: Prepared,
    chunks: Chunks,
    state: Tensor | None,
    dfinal: Tensor | None,
    dv: Tensor,
    boxes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills dv; returns the errors [M, H, Dv, C], the states before chunks, and the gradients of
    those after them [M, H, Dv, Dk]."""
    (K, Dk), (H, Dv), M = k.shape[2:], v.shape[2:], chunks.slots
    errors = q.new_empty(M, H, Dv, CHUNK)
    states, dstates = (q.new_empty(M, H, Dv, Dk) for _ in range(2))
    scan = plan_scan(SCANS, SCANS, k, v, chunks, boxes)
    made: list[Any] = [errors, states, dv, None, dstates]
    if boxes:
        kept = (matrix_boxes(x, scan.block, block_of(Dk)) for x in (states, dstates))
        made[0], made[3] = matrix_boxes(errors, scan.block, CHUNK), row_boxes(dv, scan.block)
        made[1], made[4] = kept
    q_, k_, do_, *_ = scan_tensors(q, k, do, prepared, scan)
    _, _, v_, *rest = scan_tensors(None, k, v, prepared, scan)
    _scans_kernel[(2 * scan.programs,)](
        q_, k_, v_, do_, *rest, chunks.bounds, chunks.offsets, state, dfinal, *made, scan.programs,
        H, K, Dk, Dv, CHUNK, block_of(Dk), scan.block, scan.launch.stages, precision_of(k),
        boxes, num_warps=scan.launch.warps,
    )  # fmt: skip
    return errors, states, dstates


def run_mix(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    gates: Tensor,
    chunks: Chunks,
    errors: Tensor,  # [M, H, Dv, C]
    dv: Tensor,
    dgates: Tensor,  # [2, B, T, H]
    boxes: bool,
) -> tuple[Tensor, Tensor]:
    """Fills dgates; returns the gradients of what the tokens of chunks mix, [M, K, C, C] each."""
    (B, T, K, Dk), (H, Dv), M = q.shape, do.shape[2:], chunks.slots
    BV = block_of(Dv)
    given, taken = (q.new_empty(M, K, CHUNK, CHUNK) for _ in range(2))
    if boxes:
        do, dv, errors = row_boxes(do, BV), row_boxes(dv, BV), matrix_boxes(errors, BV, CHUNK)
    _mix_kernel[(M * K,)](
        q, k, chunks.table, gates, errors, do, dv, given, taken, dgates, B * T, M,
        H, K, Dk, Dv, CHUNK, block_of(Dk), BV, MIX.stages, precision_of(q), boxes,
        num_warps=MIX.warps,
    )  # fmt: skip
    return given, taken


def key_block(q: Tensor) -> int:
    """Returns how many columns of q [..., Dk] a program of `run_states` takes."""
    return min(STATES.block * 2 // q.element_size(), block_of(q.shape[-1]))


def run_states(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    gates: Tensor,
    chunks: Chunks,
    scanned: tuple[Tensor, Tensor, Tensor],  # what `run_scans` returns
    mixed: tuple[Tensor, Tensor],  # what `run_mix` returns
    dv: Tensor,
    dq: Tensor,
    dk: Tensor,
    dgates: Tensor,  # [blocks of columns, 2, B, T, H]
    boxes: bool,
) -> None:
    """Fills dq and dk, and dgates with parts whose sum is added to dg and dbeta."""
    (B, T, K, Dk), (H, Dv), M = q.shape, do.shape[2:], chunks.slots
    block, BV = key_block(q), block_of(Dv)
    keys, rows, matrices = [q, k], [do, dv], list(scanned)
    if boxes:
        keys, rows = [row_boxes(x, block) for x in keys], [row_boxes(x, BV) for x in rows]
        widths = CHUNK, block, block
        matrices = [matrix_boxes(x, BV, n) for x, n in zip(matrices, widths, strict=True)]
    _states_kernel[(M * K * len(dgates),)](
        q, k, *keys, chunks.table, gates, *rows, *matrices, *mixed, dq, dk, dgates, B * T, M,
        H, K, Dk, Dv, CHUNK, block, BV, STATES.stages, precision_of(q), boxes,
        num_warps=STATES.warps,
    )  # fmt: skip


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> list[Tensor]:
    """Allocates the gradients of the five."""
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta)]


@operator("gated_delta_rule_backward", _gradients)
def gated_delta_backward(
    q: Tensor,  # [B, T, K, Dk]
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # fp32 [B, T, H]
    beta: Tensor,  # [B, T, H]
    cu_seqlens: Tensor | None,  # [S + 1]
    state: Tensor | None,  # fp32 [B or S, H, Dk, Dv]
    do: Tensor,  # [B, T, H, Dv]
    dfinal: Tensor | None,  # fp32 [B or S, H, Dk, Dv]
) -> list[Tensor]:
    """Returns the gradients of q, k, v, g and beta."""
    dq, dk, dv, dg, dbeta = gradients = _gradients(q, k, v, g, beta)
    if v.numel() == 0 or q.numel() == 0:
        return [x.zero_() for x in gradients]
    q, k, v, g, beta, do = (x.contiguous() for x in (q, k, v, g, beta, do))
    state, dfinal = (None if x is None else x.contiguous() for x in (state, dfinal))
    chunks, boxes = make_chunks(q, cu_seqlens), takes_boxes(q, k, v, do)
    prepared = prepare(q, k, g, beta, chunks)
    scanned = run_scans(q, k, v, do, prepared, chunks, state, dfinal, dv, boxes)
    gates = prepared.gates
    del prepared  # whose memory the products may take
    dgates = q.new_empty(1 + -(-q.shape[3] // key_block(q)), 2, *g.shape, dtype=torch.float32)
    mixed = run_mix(q, k, do, gates, chunks, scanned[0], dv, dgates[0], boxes)
    run_states(q, k, do, gates, chunks, scanned, mixed, dv, dq, dk, dgates[1:], boxes)
    torch.sum(dgates[:, 0], 0, out=dg)
    dbeta.copy_(dgates[:, 1].sum(0))
    return gradients
