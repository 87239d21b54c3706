"""How many rows of logits a pass over a head holds at a time.

# N rows (tokens), m rows that are computed, n rows of a chunk, C model dim, V vocab
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels._triton import runs_triton

# Upper bound of the logits, and on the CPU their fp32 copies, that exist at one time
LOGITS_BYTES = 2**30
# A chunk that nobody bounds has this many rows, or as many as these bytes hold if they are more,
# and at most LOGITS_BYTES. For each chunk the weight's gradient in fp32 is read and written: on an
# H200 with 1B's head, 16384 rows take 50 ms in chunks of 1024, 44.5 of 2048, 42.7 of 4096, and 41.8
# at once.
CHUNK_ROWS, CHUNK_BYTES = 4096, 2**29
# What is held beside a chunk's logits, a teacher's logits for one, is of so many of its rows at a
# time, shared by one more than there are such tensors: enough for a fast product
PIECE_ROWS = 1024


class Sizes(NamedTuple):
    """How much there is of a pass at one time."""

    rows: int  # of a chunk: logits
    piece: int  # of them, for what is held beside the logits
    beside: int  # tensors of a piece


def sizes(
    hidden: Tensor,
    weight: Tensor | None,
    vocab: int,  # V, of one rank if several share it
    beside: int,
    logits_bytes: int,  # 0: as many as the shapes suggest
    needs: Sequence[bool],  # gradients of hidden, weight, bias, low and up
    count: int,  # m
) -> Sizes:
    """All that is held of a chunk shares the budget."""
    budget = logits_bytes or LOGITS_BYTES
    if weight is None:
        rows = chunk_rows(vocab, hidden, budget // beside) if beside else max(1, hidden.shape[0])
        return Sizes(rows, rows, beside)
    free = runs_triton(hidden) and not logits_bytes
    if beside:
        row = _row_bytes(vocab, hidden)
        if free:  # half of all logits
            budget = min(budget, max(CHUNK_BYTES, count * row // 2))
        piece = chunk_rows(vocab, hidden, min(budget, PIECE_ROWS * row) // (1 + beside))
        rows = chunk_rows(vocab, hidden, budget - beside * piece * row)
    else:
        rows = chunk_rows(vocab, hidden, budget)
        if free and any(needs):
            rows = min(rows, max(CHUNK_ROWS, chunk_rows(vocab, hidden, CHUNK_BYTES)))
        piece = rows
    # All rows at once need 2 V (m + C) bytes, chunks of n 2 V (n + 2 C)
    sums = free and needs[1] and hidden.dtype == torch.bfloat16
    if sums and count - rows <= hidden.shape[1]:
        rows = max(1, count)
        piece = piece if beside else rows
    return Sizes(rows, piece, beside)


def chunk_rows(vocab: int, hidden: Tensor, logits_bytes: int) -> int:
    """Rows whose logits fit the budget; in place on a GPU, with fp32 copies elsewhere.

    A multiple of 1024, or else of 128: matrix products of other sizes are slower, as are smaller.
    """
    rows = max(1, logits_bytes // _row_bytes(vocab, hidden))
    if not runs_triton(hidden):
        return rows
    step = next(step for step in (1024, 128, 1) if rows >= step)
    return rows // step * step


def _row_bytes(vocab: int, hidden: Tensor) -> int:
    return hidden.element_size() * padded(vocab) if runs_triton(hidden) else 16 * vocab


def padded(vocab: int) -> int:
    return -(-vocab // 64) * 64
