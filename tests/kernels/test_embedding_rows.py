"""Rows of a table of which a rank has a part against torch's embedding of the whole."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tigon.kernels.loss.vocab_parallel import VocabularyShard, embedding_rows, embedding_rows_ref

pytestmark = pytest.mark.kernel
SIZE, SHARES = 101, [(0, 34), (34, 34), (68, 33), (101, 0)]


def problem(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.arange(SIZE).view(1, SIZE), torch.randn(SIZE, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 1500])
@torch.no_grad()
def test_parts_add_up_to_the_whole(columns: int, dtype: torch.dtype) -> None:
    ids, table = problem(columns, dtype)
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


def test_gradients_are_torchs() -> None:
    ids, table = problem(8, torch.float32)
    weight = torch.nn.Parameter(table[:34].clone())
    embedding_rows(ids, weight, VocabularyShard.build("none", 3, 0, 34, SIZE), 3).sum().backward()
    want = torch.ones(34, 8)
    want[3] = 0  # the padding's
    assert weight.grad is not None and torch.equal(weight.grad, want)
