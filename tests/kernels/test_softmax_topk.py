"""The choice of experts: which, in what order, and in what dtypes."""

import math

import pytest
import torch
from torch import Tensor

from tigon.kernels import softmax_topk, softmax_topk_ref

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_choices_and_rounded_weights_are_those_of_the_definition(dtype: torch.dtype | None) -> None:
    logits = torch.randn(70, 40)
    found = softmax_topk(logits, 3, normalize=True, dtype=dtype)
    expected = softmax_topk_ref(logits, 3, normalize=True, dtype=dtype)
    assert found.experts.dtype == torch.int64 and torch.equal(found.experts, expected.experts)
    assert found.weights.dtype == (dtype or torch.float32)
    torch.testing.assert_close(found.weights, expected.weights)


@pytest.mark.parametrize(
    ("row", "experts"),
    [
        ([1.0, 2.0, 2.0, 2.0, 0.0], [1, 2, 3]),
        ([0.0] * 5, [0, 1, 2]),
        ([-INF, -INF, 3.0, -INF, 3.0], [2, 4, 0]),
        ([NAN] * 5, [0, 1, 2]),
        ([1.0, NAN, 3.0, 2.0, 0.0], [0, 1, 2]),  # all probabilities are NaN
    ],
    ids=str,
)
def test_of_equal_experts_the_first_is_taken(
    row: list[float], experts: list[int], kernels_only: None
) -> None:
    found = softmax_topk(torch.tensor([row, [0.0, 1.0, 2.0, 3.0, 4.0]]), 3, normalize=True)
    assert found.experts.tolist() == [experts, [4, 3, 2]]
    assert found.weights[0].isnan().all() == math.isnan(sum(row) if INF not in row else 0.0)


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)], ids=str)
def test_sums_that_are_always_1_have_no_gradient(used: tuple[int, ...]) -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    found: tuple[Tensor, ...] = softmax_topk(logits, 2, normalize=True)
    (grad,) = torch.autograd.grad(sum(found[i].sum() for i in used), logits)
    torch.testing.assert_close(grad, torch.zeros(6, 5), rtol=0, atol=1e-6)
