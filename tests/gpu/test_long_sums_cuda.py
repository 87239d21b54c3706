"""Gradients of small weights on a GPU have all rows, whatever their number."""

import pytest
import torch
from torch import nn

from bench.long_sums import FEW, OURS, lengths, long_lengths, wrong
from tigon.kernels.linear.linear import chunked_matmul, linear
from tigon.kernels.linear.lora import LoRATerm, lora_linear

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(16, 4096), (64, 2048), (576, 576), (1152, 1024), (4096, 64)])
def test_no_summand_is_left_out(shape: tuple[int, int]) -> None:
    given = lengths(2049, 13000)
    if shape[0] * shape[1] <= FEW:
        given += long_lengths()[::4]
    assert wrong({OURS: chunked_matmul}, *shape, given, "cuda") == {OURS: []}


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Few integers: their sums in float32 are exact."""
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=draw, device="cuda").bfloat16()


@pytest.mark.parametrize("rows", [2561, 2689, 6338, 8961, 16129, 4096])
@pytest.mark.parametrize("shape", [(64, 2048), (576, 576)])
def test_layers_learn_from_all_rows(rows: int, shape: tuple[int, int]) -> None:
    k, c = shape
    x, dy, weight = whole(rows, c, seed=1), whole(rows, k, seed=2), whole(k, c, seed=3)
    learned = nn.Parameter(weight)
    (found,) = torch.autograd.grad(linear(x, learned), learned, dy)
    assert torch.equal(found, (dy.float().t() @ x.float()).bfloat16())
    for rank in (16, 64):
        a, b = nn.Parameter(whole(rank, c, seed=4)), nn.Parameter(whole(k, rank, seed=5))
        frozen = nn.Parameter(weight, requires_grad=False)
        y = lora_linear(x, frozen, None, a, [LoRATerm(0, b, 1.0)])
        da, db = torch.autograd.grad(y, (a, b), dy)
        du, u = (dy.float() @ b.float()).bfloat16(), (x.float() @ a.float().t()).bfloat16()
        assert torch.equal(da, (du.float().t() @ x.float()).bfloat16())
        assert torch.equal(db, (dy.float().t() @ u.float()).bfloat16())
