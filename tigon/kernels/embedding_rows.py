"""Vocabulary-parallel embedding lookup for decoding: this rank's rows, zeros for other tokens.

torch needs ten kernels for it, each of which takes longer to start than to run.

# ... any leading dimensions, N tokens, C columns
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import operator, pdl_options, pdl_wait, runs_triton, tl, triton
from tigon.kernels._vocabulary import VocabularyShard

BLOCK = 1024


def embedding_rows_ref(
    ids: Tensor, weight: Tensor, shard: VocabularyShard, padding_idx: int | None = None
) -> Tensor:
    """As `embedding_rows`; `padding_idx`, of the whole table, gets no gradient."""
    own = ids - shard.first
    here = (own >= 0) & (own < shard.rows)
    padding = None if padding_idx is None else padding_idx - shard.first
    if padding is not None and not 0 <= padding < shard.rows:
        padding = None
    outside = (ids < 0) | (ids >= shard.size)  # an error on every rank, as of a whole weight
    x = F.embedding(own.where(here | outside, 0), weight, padding)
    return x.masked_fill(~here[..., None], 0)


@triton.jit(debug=True)  # or the assertion would not be compiled
def _embedding_rows_kernel(
    ids, weight, y, first, rows, size, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(ids + token).to(tl.int64)
    tl.device_assert((number >= 0) & (number < size), "a token is not in the vocabulary")
    own = number - first + tl.zeros([BLOCK], tl.int64)
    here = (own >= 0) & (own < rows) & (columns < C)
    row = tl.load(weight + own * C + columns, mask=here, other=0.0)
    tl.store(y + token * C + columns, row, mask=columns < C)


def _output(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@operator("embedding_rows", lambda ids, weight, first, rows, size: _output(ids, weight))
def _embedding_rows(ids: Tensor, weight: Tensor, first: int, rows: int, size: int) -> Tensor:
    y, C = _output(ids, weight), weight.shape[1]
    grid = ids.numel(), triton.cdiv(C, BLOCK)
    options = {"C": C, "BLOCK": BLOCK, "num_warps": 4} | pdl_options(y)
    _embedding_rows_kernel[grid](ids, weight, y, first, rows, size, **options)
    return y


def embedding_rows(
    ids: Tensor, weight: Tensor, shard: VocabularyShard, padding_idx: int | None = None
) -> Tensor:
    """ids [...] -> [..., C]: of the rank's rows of the table; zeros for other ranks' tokens. One
    outside of the vocabulary is an error on every rank."""
    plain = weight.is_contiguous() and type(weight) in (Tensor, torch.nn.Parameter)
    if torch.is_grad_enabled() or not (plain and ids.numel() and runs_triton(weight)):
        return embedding_rows_ref(ids, weight, shard, padding_idx)
    return _embedding_rows(ids.contiguous(), weight, shard.first, shard.rows, shard.size)
