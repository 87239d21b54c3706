"""Gradients of the gated delta rule: states again, their gradients backwards, then all chunks.

# B batch, T tokens, N = B T tokens, S sequences, M chunks, C tokens of a chunk, K key heads,
# H value heads, Dk and Dv head dims

In the terms of gated_delta_forward.py, with d for a gradient and dstate for that of the state after
a chunk, the scan from the last chunk to the first computes

    derrors = mix^T do + exp(G_last - G) beta (k dstate)
    dv      = solve^T derrors
    dstate  = exp(G_last) dstate + (exp(G) q)^T do - (exp(G) k)^T dv

The matrix of which `solve` is the inverse then has the gradient -dv errors^T, and all else follows
chunk by chunk. What the forward pass computed is computed again: only its inputs are saved.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.delta.gated_delta_forward import (
    CHUNK,
    Chunks,
    Prepared,
    ScanLaunch,
    block_of,
    chunk_decay,
    launch_scan,
    load_tile,
    make_chunks,
    precision_of,
    prepare,
    scan,
    square,
    state_tile,
    store_tile,
)
from tigon.kernels.runtime import operator, tl, triton

BACKWARD, BACKWARD_FEW = ScanLaunch(32, 4, 2), ScanLaunch(32, 4, 3)
GRADIENTS = ScanLaunch(64, 4, 1)  # columns of keys, and heads in flight


@triton.jit
def _reverse_scan_kernel(
    q, k,  # [N, K, Dk]
    solve, mix,  # [M, H, C, C]
    gates,  # [M, H, 3, C]
    bounds, offsets,  # [S + 1]
    do,  # [N, H, Dv]
    dfinal,  # [S, H, Dk, Dv], or None: zeros
    dv,  # [N, H, Dv]
    dstates,  # [M, H, Dk, Dv]: of those after the chunks
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the chunks of a sequence from the last to the first, for BV columns of the state."""
    tile, head = tl.program_id(0) % tl.cdiv(Dv, BV), tl.program_id(0) // tl.cdiv(Dv, BV)
    first, h, n = tile * BV, head % H, head // H
    key_head = h // (H // K)
    dtype: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, C)
    dS = tl.zeros([BK, BV], tl.float32)
    if dfinal is not None:
        at, exists = state_tile(dfinal, n * H + h, Dk, Dv, 0, first, BK, BV)
        dS = tl.load(at, mask=exists, other=0.0)
    start, end = tl.load(bounds + n), tl.load(bounds + n + 1)
    begin = tl.load(offsets + n)
    count = tl.load(offsets + n + 1) - begin
    for step in tl.range(0, count, num_stages=STAGES):
        m = begin + count - 1 - step
        token = start + (m - begin) * C
        left = end - token
        kc = load_tile(k, token, left, key_head, K, Dk, 0, C, BK)
        qc = load_tile(q, token, left, key_head, K, Dk, 0, C, BK)
        doc = load_tile(do, token, left, h, H, Dv, first, C, BV)
        row = gates + (m * H + h).to(tl.int64) * 3 * C
        reach, weight = tl.exp(tl.load(row + i)), tl.load(row + C + i)
        after = dS.to(dtype)
        kept, mask = state_tile(dstates, m * H + h, Dk, Dv, 0, first, BK, BV)
        tl.store(kept, after, mask=mask)
        derror = weight[:, None] * tl.dot(kc, after, input_precision=PRECISION)
        mixed = tl.load(square(mix, m * H + h, C))
        derror = tl.dot(tl.trans(mixed), doc, derror, input_precision=PRECISION)
        solved = tl.load(square(solve, m * H + h, C))
        dvc = tl.dot(tl.trans(solved), derror.to(dtype), input_precision=PRECISION)
        store_tile(dv, dvc, token, left, h, H, Dv, first, C, BV)
        dS *= tl.exp(tl.load(row + C - 1))
        dS = tl.dot(tl.trans(qc), (reach[:, None] * doc).to(dtype), dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(kc), (-reach[:, None] * dvc).to(dtype), dS, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "M"])
def _chunk_gradients_kernel(
    q, k,  # [N, K, Dk]
    table,  # [2, M]
    gates,  # [M, H, 3, C]
    errors, do, dv,  # [N, H, Dv]
    states, dstates,  # [M, H, Dk, Dv]: before the chunks, and the gradients of those after
    dq, dk,  # [N, K, Dk]
    dgates,  # [tiles of Dk, 2, N, H]: what a tile adds to dg and dbeta
    N, M,
    H: tl.constexpr, K: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of BK columns of a key head's chunk, summed over its value heads.

    No product is transposed once it is rounded, which Triton 3.4 to 3.7.0 miscompile on Hopper:
    where a matrix and its transpose are needed, both are multiplied out.
    """
    # Tiles and heads of a chunk run side by side, since they share its rows
    tile, head = tl.program_id(0) % tl.cdiv(Dk, BK), tl.program_id(0) // tl.cdiv(Dk, BK)
    m, key_head, first = head // K, head % K, tile * BK
    dtype: tl.constexpr = k.dtype.element_ty
    i = tl.arange(0, C)
    row, column, rows = i[:, None], i[None, :], tl.arange(0, BK)[:, None]
    token, left = tl.load(table + m), tl.load(table + M + m)
    dqc, dkc = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dgates += tile.to(tl.int64) * 2 * N * H
    for h in tl.range(key_head * (H // K), (key_head + 1) * (H // K), num_stages=STAGES):
        # All that is read, for each head anew: the keys would take up registers meanwhile
        kc = load_tile(k, token, left, key_head, K, Dk, first, C, BK)
        qc = load_tile(q, token, left, key_head, K, Dk, first, C, BK)
        doc = load_tile(do, token, left, h, H, Dv, 0, C, BV)
        dvc = load_tile(dv, token, left, h, H, Dv, 0, C, BV)
        error = load_tile(errors, token, left, h, H, Dv, 0, C, BV)
        pointers, exists = state_tile(states, m * H + h, Dk, Dv, first, 0, BK, BV)
        before = tl.load(pointers, mask=exists, other=0.0)
        pointers, _ = state_tile(dstates, m * H + h, Dk, Dv, first, 0, BK, BV)
        after = tl.load(pointers, mask=exists, other=0.0)
        gate = gates + (m * H + h).to(tl.int64) * 3 * C
        G, b, last = tl.load(gate + i), tl.load(gate + 2 * C + i), tl.load(gate + C - 1)
        reach, weight = tl.exp(G)[:, None], tl.exp(last - G)[:, None]

        # What the state before the chunk gives to outputs, and predicts
        given = reach * tl.dot(doc, tl.trans(before), input_precision=PRECISION)
        dG = tl.sum(given * qc, 1)
        dqc += given
        given = reach * tl.dot(dvc, tl.trans(before), input_precision=PRECISION)
        dG -= tl.sum(given * kc, 1)
        dkc -= given

        # What errors add to the state after it
        kept = tl.dot(before, tl.trans(after), input_precision=PRECISION)  # its trace is needed
        kept = tl.exp(last) * tl.sum(tl.sum(tl.where(rows == rows.T, kept, 0.0), 1), 0)
        given = weight * tl.dot(error, tl.trans(after), input_precision=PRECISION)
        db = tl.sum(given * kc, 1)
        dkc += b[:, None] * given
        kept += tl.sum(b * db, 0)
        dG += tl.where(i == C - 1, kept, 0.0)

        # What errors give to later outputs, and take from later errors: [later, earlier]
        decay = chunk_decay(G, C)
        shared = tl.dot(doc, tl.trans(error), input_precision=PRECISION) * decay * b[None, :]
        dqc = tl.dot(shared.to(dtype), kc, dqc, input_precision=PRECISION)
        dG += tl.sum(shared * tl.dot(qc, tl.trans(kc), input_precision=PRECISION), 1)
        shared = -tl.dot(dvc, tl.trans(error), input_precision=PRECISION) * decay * b[None, :]
        shared = tl.where(row > column, shared, 0.0)
        dkc = tl.dot(shared.to(dtype), kc, dkc, input_precision=PRECISION)
        dG += tl.sum(shared * tl.dot(kc, tl.trans(kc), input_precision=PRECISION), 1)

        # The same as [earlier, later]: sums over rows would be as many exchanges between warps
        decay = tl.exp(tl.where(row <= column, G[None, :] - G[:, None], float("-inf")))
        shared = tl.dot(error, tl.trans(doc), input_precision=PRECISION) * decay
        db += tl.sum(shared * tl.dot(kc, tl.trans(qc), input_precision=PRECISION), 1)
        dkc = tl.dot((shared * b[:, None]).to(dtype), qc, dkc, input_precision=PRECISION)
        shared = -tl.dot(error, tl.trans(dvc), input_precision=PRECISION) * decay
        shared = tl.where(row < column, shared, 0.0)
        db += tl.sum(shared * tl.dot(kc, tl.trans(kc), input_precision=PRECISION), 1)
        dkc = tl.dot((shared * b[:, None]).to(dtype), kc, dkc, input_precision=PRECISION)

        at = dgates + (token + i).to(tl.int64) * H + h
        tl.store(at, tl.cumsum(dG - b * db, 0, reverse=True), mask=i < left)
        tl.store(at + N.to(tl.int64) * H, db, mask=i < left)
    store_tile(dq, dqc, token, left, key_head, K, Dk, first, C, BK)
    store_tile(dk, dkc, token, left, key_head, K, Dk, first, C, BK)


@functools.cache
def _compiles(device: int) -> bool:
    old = [int(part) for part in triton.__version__.split(".")[:2]] < [3, 9]
    return not (old and torch.cuda.get_device_capability(device)[0] == 10)


# As torch.compiler.assume_constant_result does, which takes a second to import Dynamo
_compiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def gradients_compile(x: Tensor) -> bool:
    """Whether Triton compiles the gradients for the GPU of x.

    For sm_100, 3.6 fails at a layout of `_chunk_gradients_kernel`, and 3.9 does not.
    """
    return x.device.type != "cuda" or _compiles(x.device.index)


def _reverse_scan(
    q: Tensor,
    k: Tensor,
    prepared: Prepared,
    chunks: Chunks,
    do: Tensor,
    dfinal: Tensor | None,
    dv: Tensor,
    dstates: Tensor,
) -> None:
    """Runs `_reverse_scan_kernel`."""
    (K, Dk), (H, Dv) = k.shape[2:], do.shape[2:]
    launch, grid, block = launch_scan(BACKWARD, BACKWARD_FEW, k, do, chunks)
    _reverse_scan_kernel[grid](
        *(q, k, *prepared, chunks.bounds, chunks.offsets, do, dfinal, dv, dstates),
        *(H, K, Dk, Dv, CHUNK, block_of(Dk), block, launch.stages, precision_of(k)),
        num_warps=launch.warps,
    )


def _chunk_gradients(
    q: Tensor,
    k: Tensor,
    prepared: Prepared,
    chunks: Chunks,
    errors: Tensor,
    do: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    dq: Tensor,
    dk: Tensor,
) -> Tensor:
    """Fills dq and dk; returns what each tile of Dk adds to dg and dbeta: [tiles, 2, B, T, H]."""
    (B, T, K, Dk), (H, Dv), M = q.shape, do.shape[2:], chunks.slots
    block = min(GRADIENTS.block * 2 // q.element_size(), block_of(Dk))
    dgates = q.new_empty(-(-Dk // block), 2, B, T, H, dtype=torch.float32)
    _chunk_gradients_kernel[(M * K * len(dgates),)](
        *(q, k, chunks.table, prepared.gates, errors, do, dv, states, dstates),
        *(
            dq,
            dk,
            dgates,
            B * T,
            M,
            H,
            K,
            Dk,
            Dv,
            CHUNK,
            block,
            block_of(Dv),
            GRADIENTS.stages,
            precision_of(q),
        ),
        num_warps=GRADIENTS.warps,
    )
    return dgates


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> list[Tensor]:
    """Allocates the gradients of the five."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]


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
    chunks = make_chunks(q, cu_seqlens)
    prepared = prepare(q, k, g, beta, chunks)
    shape = chunks.slots, v.shape[2], q.shape[3], v.shape[3]
    states, dstates = (q.new_empty(shape) for _ in range(2))
    errors = torch.empty_like(v)
    scan(None, k, v, prepared, chunks, state, errors=errors, states=states)
    _reverse_scan(q, k, prepared, chunks, do, dfinal, dv, dstates)
    dgates = _chunk_gradients(q, k, prepared, chunks, errors, do, dv, states, dstates, dq, dk)
    torch.sum(dgates[:, 0], 0, out=dg)
    dbeta.copy_(dgates[:, 1].sum(0))
    return gradients
