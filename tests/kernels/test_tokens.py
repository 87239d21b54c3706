"""Rows of tokens of which a rank has a part, and the largest score of all, beside torch's."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tigon.kernels.loss.argmax import BLOCK, NOT_FINITE, argmax, argmax_ref
from tigon.kernels.loss.vocab_parallel import VocabularyShard, embedding_rows, embedding_rows_ref

SIZE, SHARES = 101, [(0, 34), (34, 34), (68, 33), (101, 0)]


def numbered(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.arange(SIZE).view(1, SIZE), torch.randn(SIZE, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 1500])
@torch.no_grad()
def test_parts_of_rows_add_up_to_the_whole(columns: int, dtype: torch.dtype) -> None:
    ids, table = numbered(columns, dtype)
    total = torch.zeros(1, SIZE, columns, dtype=dtype)
    for first, rows in SHARES:
        shard = VocabularyShard.build("none", len(SHARES), first, rows, SIZE)
        # A weight may have rows of padding behind its own
        weight = torch.cat((table[first : first + rows], torch.full((1, columns), 7.0).to(dtype)))
        found = embedding_rows(ids, weight, shard)
        assert torch.equal(found, embedding_rows_ref(ids, weight, shard))
        total += found
    assert torch.equal(total[0], table)


OUTSIDE = """
import torch
from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.kernels.loss.vocab_parallel import embedding_rows
shard = VocabularyShard.build("none", 1, 0, 101, 101)
with torch.no_grad():
    embedding_rows(torch.tensor([TOKEN], device="cuda"), torch.ones(101, 8, device="cuda"), shard)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("token", ["-1", "101"])
def test_a_token_outside_of_the_vocabulary(token: str) -> None:
    """In a process of its own, since nothing works on the GPU after it."""
    command = [sys.executable, "-c", OUTSIDE.replace("TOKEN", token)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "a token is not in the vocabulary" in done.stderr


def test_gradients_of_rows_are_torchs() -> None:
    ids, table = numbered(8, torch.float32)
    weight = torch.nn.Parameter(table[:34].clone())
    embedding_rows(ids, weight, VocabularyShard.build("none", 3, 0, 34, SIZE), 3).sum().backward()
    want = torch.ones(34, 8)
    want[3] = 0  # the padding's
    assert weight.grad is not None and torch.equal(weight.grad, want)


# Scores of tokens

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def scores(columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(2, 8, columns)
    last = columns - 1
    x[0, 0], x[0, 0, 0] = 0.0, -0.0
    x[0, 1, columns // 2] = float("nan")
    x[0, 2] = float("-inf")
    x[0, 3, last] = float("inf")
    x[0, 4] = -3.0
    x[0, 5], x[0, 5, last] = float("-inf"), -1e4
    x[0, 6, ::2] = 5.0
    x[0, 7], x[0, 7, last] = -1.0, -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_largest_scores(columns: int, dtype: torch.dtype) -> None:
    x = scores(columns, dtype)
    found = argmax(x)
    assert found.dtype == torch.int64 and torch.equal(found, argmax_ref(x))
    assert found[0, :4].tolist() == [0, NOT_FINITE, NOT_FINITE, NOT_FINITE]
    # Of a batch whose rows are not next to each other
    assert torch.equal(argmax(x[:, -1]), found[:, -1])


def test_no_scores() -> None:
    assert argmax(torch.zeros(0, 5)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 128256, dtype=dtype)  # many of which are equal in 16 bits
    assert torch.equal(argmax(x), argmax_ref(x))
