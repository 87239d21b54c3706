"""Bounds of packed sequences in few sizes, for CUDA graphs, in which sizes cannot change.

# n sequences
"""

from collections.abc import Iterable

import torch

from tigon.kernels._attention_backends import FEW, SHORT
from tigon.kernels._attention_mask import AttentionMask
from tigon.kernels._triton import power_of_2

LEAST = 8  # sequences that there is room for


def with_room(mask: AttentionMask, total: int, windows: Iterable[int]) -> AttentionMask:
    """The mask of the same sequences, with room for more and longer ones; `total` tokens in all.

    Empty sequences at the end fill the bounds up, and `longest` is rounded up, never past what
    decides on a backend or on a window of `windows`: attention has the same bits. Sequences of one
    length, which are computed as rows, stay as they are.
    """
    cu, longest = mask.cu_seq_lens, mask.longest
    if cu is None or longest is None or (len(cu) - 1) * longest == total:
        return mask
    missing = room(len(cu) - 1) + 1 - len(cu)
    return AttentionMask(
        mask.tokens,
        segment_ids=mask.segment_ids,
        key_mask=mask.key_mask,
        causal=mask.causal,
        cu_seq_lens=torch.cat([cu, cu.new_full((missing,), total)]) if missing else cu,
        longest=rounded(longest, mask.tokens, windows),
        backend=mask.backend,
    )


def room(sequences: int) -> int:
    """For how many there is room."""
    # FlashAttention-2 divides the sum of dQ by their number where it is to be deterministic
    if torch.are_deterministic_algorithms_enabled():
        return sequences
    return power_of_2(max(sequences, LEAST))


def rounded(longest: int, tokens: int, windows: Iterable[int]) -> int:
    """The next power of two; or what comes before it of the lengths up to which another backend or
    another window is taken, and of the `tokens` of a row."""
    edges = (SHORT - 1, FEW, tokens, *windows)
    return min(power_of_2(max(longest, SHORT)), *(edge for edge in edges if edge >= longest))
