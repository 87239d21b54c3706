"""The column of the largest score against torch's argmax."""

import pytest
import torch
from torch import Tensor

from tigon.kernels.loss.argmax import BLOCK, NOT_FINITE, argmax, argmax_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = pytest.mark.kernel


def scores(columns: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(columns)
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
def test_columns(columns: int, dtype: torch.dtype) -> None:
    x = scores(columns, dtype)
    found = argmax(x)
    assert found.dtype == torch.int64 and torch.equal(found, argmax_ref(x))
    assert found[0, :4].tolist() == [0, NOT_FINITE, NOT_FINITE, NOT_FINITE]
    # Of a batch whose rows are not next to each other
    assert torch.equal(argmax(x[:, -1]), found[:, -1])


def test_no_rows() -> None:
    assert argmax(torch.zeros(0, 5)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocabulary(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 128256, dtype=dtype)  # many of which are equal in 16 bits
    assert torch.equal(argmax(x), argmax_ref(x))
