"""Rows of tokens copied to their places and added up from there, some places absent."""

import pytest
import torch
from torch import Tensor

from tigon.kernels.mlp.permute import combine_rows, spread_rows

N, K, C = 5, 3, 7


def places(absent: float) -> tuple[Tensor, int]:
    """[N K], in any order, and how many there are."""
    there = torch.rand(N * K) >= absent
    found = torch.full((N * K,), N * K)
    count = int(there.sum())
    found[there] = torch.randperm(count)
    return found, count


@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("more", [0, 2], ids=["exact", "room"])
def test_rows_go_to_their_places_and_back(absent: float, more: int) -> None:
    at, count = places(absent)
    x, weights = torch.randn(N, C), torch.rand(N, K)
    size = min(count + more, N * K)
    rows = spread_rows(x, at, K, size)
    assert rows.shape == (size, C)
    for slot, place in enumerate(at.tolist()):
        if place < count:
            assert torch.equal(rows[place], x[slot // K])
    rows = torch.full((N * K + 1, C), float("nan"))[:count].normal_()  # nothing is behind them
    for given in (weights, None):
        expected = torch.zeros(N, C, dtype=torch.float64)
        for slot, place in enumerate(at.tolist()):
            if place < count:
                weight = 1.0 if given is None else given.flatten()[slot].double()
                expected[slot // K] += weight * rows[place].double()
        y = combine_rows(rows, at, given, K)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


def test_no_tokens() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert spread_rows(torch.empty(0, C), none, K, 0).shape == (0, C)
    assert combine_rows(torch.empty(0, C), none, None, K).shape == (0, C)
