"""Heads divided over ranks, against the reference: a permutation and torch.cat."""

import pytest
import torch
from torch import Tensor

from tigon.distributed import context_attention
from tigon.distributed.context_attention import stack_heads_by_rank, unstack_heads

# B batch, S tokens, n ranks, H heads, D head dim


def reference(xs: list[Tensor], ranks: int) -> Tensor:
    return torch.cat([x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4) for x in xs], 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [16, 12, 5])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_divide_and_join(dtype, dim, contiguous, batch):
    count = (4, 2, 2)
    packed = torch.randn(batch, 3, sum(count) * dim + 1)
    packed[0, 0, 0] = torch.nan
    packed = packed.to(dtype)
    first = 0 if contiguous else 1  # not at a multiple of 16 bytes
    packed = packed[..., first : first + sum(count) * dim]
    xs = [x.unflatten(2, (-1, dim)) for x in packed.split([n * dim for n in count], 2)]
    own = [(x.contiguous() if contiguous else x).detach().requires_grad_() for x in xs]
    others = [x.detach().clone().requires_grad_() for x in xs]
    ours, theirs = stack_heads_by_rank(own, 2), reference(others, 2)
    assert ours.is_contiguous() and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    grad = torch.randn(*ours.shape, 2, dtype=dtype)[..., 0]  # strided
    ours.backward(grad)
    theirs.backward(grad)
    for x, y in zip(own, others, strict=True):
        assert torch.equal(x.grad, y.grad)
    x = torch.randn(2, batch, 3, 2, dim, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours, theirs = unstack_heads(x), y.permute(1, 2, 0, 3, 4).flatten(2, 3)
    assert torch.equal(ours, theirs)
    grad = torch.randn_like(ours)
    ours.backward(grad)
    theirs.backward(grad)
    assert torch.equal(x.grad, y.grad)


def test_sixteen_bytes_at_a_time(monkeypatch):
    """Where head dims are multiples of them, which those of all models are."""
    found, known = [], Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda out, x: found.append(x.dtype) or known(out, x))
    q, kv = torch.randn(1, 3, 4 * 16), torch.randn(1, 3, 2 * 16)
    packed = torch.cat((q, kv), 2).bfloat16()
    q, kv = (x.unflatten(2, (-1, 16)) for x in packed.split([64, 32], 2))
    unstack_heads(context_attention.stack_heads_by_rank((q, kv), 2))
    assert found == [torch.complex128] * 3
