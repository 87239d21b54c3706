"""Bounds of packed sequences with room for more: attention has the same bits and backends."""

import importlib

import pytest
import torch

from tests.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention
from tigon.kernels.attention.backends import (
    CUDNN_MAX_TOKENS,
    MIN_KERNEL_TOKENS,
    AttentionRequest,
    choose_backend,
)
from tigon.kernels.attention.mask import (
    MIN_SEQUENCES,
    pad_cu_seqlens,
    padded_count,
    round_max_seqlen,
)

__all__ = ["on_hopper", "played"]
implementation = importlib.import_module("tigon.kernels.attention.api")
T, D = 24, 16


@pytest.fixture(autouse=True)
def path() -> None:
    """There are no kernels of ours behind it: one path, on the CPU."""


def packed(*ends: int, backend: str = "auto") -> AttentionMask:
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    segments = torch.arange(len(ends)).repeat_interleave(cu.diff()).view(-1, T)
    longest = int(cu.diff().max())
    return AttentionMask(T, segment_ids=segments, cu_seq_lens=cu, longest=longest, backend=backend)


def results(mask: AttentionMask, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, heads, D, requires_grad=True) for heads in (4, 2, 2))
    out = attention(q, k, v, mask=mask, **options)
    (out * torch.randn_like(out)).sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("backend", ["sdpa", "reference", "flash", "fa4"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_has_the_same_bits(played, backend, window):
    mask = packed(3, 13, 14, T, T + 6, 2 * T, backend=backend)
    wide = pad_cu_seqlens(mask, 2 * T, [5])
    assert len(wide.cu_seq_lens) == MIN_SEQUENCES + 1 and wide.cu_seq_lens.diff()[-2:].sum() == 0
    assert wide.longest == T > mask.longest == 18
    for found, expected in zip(
        results(wide, window=window), results(mask, window=window), strict=True
    ):
        assert torch.equal(found, expected)


def test_sequences_of_one_length_and_rows_stay(played):
    even = packed(12, 24, 36, 48)
    assert pad_cu_seqlens(even, 48, []) is even
    rows = AttentionMask(T)
    assert pad_cu_seqlens(rows, 48, []) is rows
    unknown = AttentionMask(T, segment_ids=even.segment_ids, cu_seq_lens=even.cu_seq_lens)
    assert pad_cu_seqlens(unknown, 48, []) is unknown


def test_room_is_of_few_sizes(monkeypatch):
    assert [padded_count(n) for n in (1, 8, 9, 16, 17, 100)] == [8, 8, 16, 16, 32, 128]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [padded_count(n) for n in (1, 8, 9)] == [1, 8, 9]


def test_rounding_takes_no_other_backend_or_window():
    """Of every length: each rule of the backends says the same of what it is rounded to."""
    tokens, windows = 5000, (100, 512, 1300)
    sizes = set()
    for longest in range(1, tokens + 1):
        size = round_max_seqlen(longest, tokens, windows)
        sizes.add(size)
        assert longest <= size <= tokens
        assert all((window >= longest) == (window >= size) for window in windows)
        if longest % 7 and longest not in (
            MIN_KERNEL_TOKENS - 1,
            MIN_KERNEL_TOKENS,
            CUDNN_MAX_TOKENS,
            CUDNN_MAX_TOKENS + 1,
        ):
            continue
        for head_dim in (64, 256):
            for more in ({}, {"window": True}, {"softcap": True}, {"deterministic": True}):
                request = AttentionRequest(layout="sequences", grad=True, head_dim=head_dim, **more)
                names = [choose_backend(request._replace(longest=n)).name for n in (longest, size)]
                assert names[0] == names[1], (longest, size, request)
    assert sizes == {100, 255, 256, 512, 1024, 1300, 2048, 4096, 5000}
