"""Attention in chunks: masks that see a query's own chunk of its sequence.

# B batch, T query tokens, S key tokens
"""

import pytest
import torch
from torch import Tensor

from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.attention.sequences import Sequences

SIZE, CPU = 4, torch.device("cpu")
REAL = torch.ones(2, 11, dtype=torch.bool)
REAL[0, :3] = REAL[1, 9:] = False
SEGMENTS = torch.tensor([[0] * 6 + [1] * 5, [2] * 1 + [3] * 9 + [4] * 1])
CU = torch.tensor([0, 6, 11, 12, 21, 22], dtype=torch.int32)


@pytest.fixture(autouse=True)
def on_the_host(path: str) -> None:
    """Masks compute alike wherever they are."""
    torch.set_default_device("cpu")


def seen(segments: Tensor, real: Tensor, past: int, first: int = 0) -> Tensor:
    """[B, T, S], token by token."""
    b, s = real.shape
    out = torch.zeros(b, s - past, s, dtype=torch.bool)
    for row in range(b):
        index, counts = [], dict[int, int]()
        for key in range(s):
            segment = int(segments[row, key])
            index.append(first + counts.get(segment, 0))
            counts[segment] = counts.get(segment, 0) + int(real[row, key])
        for query in range(past, s):
            for key in range(query + 1):
                same = segments[row, key] == segments[row, query]
                same &= index[key] // SIZE == index[query] // SIZE
                out[row, query - past, key] = (same & real[row, key]) | (key == query)
    return out


@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize("kind", ["rows", "padded", "packed", "packed, padded", "later"])
def test_dense(kind: str, past: int) -> None:
    segments = SEGMENTS if "packed" in kind else torch.zeros(2, 11).long()
    real = REAL if "padded" in kind else torch.ones_like(REAL)
    options = {"segment_ids": SEGMENTS} if "packed" in kind else {}
    options |= {"key_mask": REAL} if "padded" in kind else {}
    first = 6 if kind == "later" else 0
    mask = AttentionMask(11 - past, past=past, **options)
    found = mask.chunks(SIZE, 2, CPU, first)
    assert torch.equal(found.dense(None, CPU)[:, 0], seen(segments, real, past, first))
    assert mask.chunks(SIZE, 2, CPU, first) is found  # once for all layers


@pytest.mark.parametrize("kind", ["rows", "packed", "packed, padded"])
def test_bounds_without_looking(kind: str) -> None:
    """The host knows how long chunks are at most, and where each begins the device."""
    options = {"segment_ids": SEGMENTS, "cu_seq_lens": CU, "longest": 9} if kind != "rows" else {}
    real = (SEGMENTS % 3 == 0) | ("padded" not in kind)  # padding is three of the sequences
    options |= {} if real.all() else {"key_mask": real}
    mask = AttentionMask(11, **options).chunks(SIZE, 2, CPU)
    assert mask.cu_seq_lens is not None
    sequences = mask.sequences()
    assert isinstance(sequences, Sequences) and sequences.longest == SIZE
    sequence = torch.searchsorted(sequences.cu[1:].contiguous(), torch.arange(22), right=True)
    number = sequence.view(2, 11)
    same = (number[:, :, None] == number[:, None]) & torch.ones(11, 11).bool().tril()
    assert torch.equal(mask.dense(None, CPU)[:, 0][real], same[real])


def test_short_rows_are_one_chunk() -> None:
    mask = AttentionMask(3)
    assert mask.chunks(SIZE, 2, CPU, 9) is mask
    assert mask.chunks(SIZE, 2, CPU, 10) is not mask
    cu = torch.tensor([0, 2, 3])
    shared = {"segment_ids": torch.tensor([[0, 0, 1]]), "cu_seq_lens": cu}
    mask = AttentionMask(3, **shared, longest=2, prefixes=torch.zeros(2, 2).long())
    with pytest.raises(ValueError, match="attention in chunks does not know prefixes"):
        mask.chunks(SIZE, 1, CPU)
