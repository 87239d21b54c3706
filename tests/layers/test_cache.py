import pytest
import torch
from torch import Tensor

from tests.support.contract import tiny_llama
from tigon.layers import KVCache
from tigon.layers.kv_state import GrowingKV

B, K, D = 3, 2, 4


def chunks(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values as attention hands them over: views with the tokens before the heads."""
    return [
        (torch.randn(B, t, K, D).transpose(1, 2), torch.randn(B, t, K, D).transpose(1, 2))
        for t in lengths
    ]


@pytest.mark.parametrize(
    "lengths", [(1,) * 9, (5, 1, 1), (300, 1, 700, 1), (1, 2, 254, 1)], ids=str
)
def test_holds_all_tokens(lengths: tuple[int, ...]) -> None:
    state, parts, returned = GrowingKV(K, D), chunks(*lengths), []
    for step in range(len(lengths)):
        k, v = state.update(*(x.clone() for x in parts[step]), sum(lengths[:step]))
        seen = parts[: step + 1]
        returned.append((k, torch.cat([k for k, _ in seen], 2)))
        returned.append((v, torch.cat([v for _, v in seen], 2)))
        for actual, expected in returned:  # also what earlier steps were given
            assert torch.equal(actual, expected)


def test_growth_copies_seldom() -> None:
    state, buffers = GrowingKV(K, D), set()
    for past in range(2000):
        k, _ = state.update(torch.ones(B, K, 1, D), torch.ones(B, K, 1, D), past)
        buffers.add(k.untyped_storage().data_ptr())
    assert len(buffers) <= 6


def test_the_callers_tensors_are_not_written_to() -> None:
    (k, v), (k2, v2) = chunks(3, 1)
    given = [x.clone() for x in (k, v, k2, v2)]
    state = GrowingKV(K, D)
    state.update(k, v, 0)
    state.update(k2, v2, 3)
    for x, before in zip((k, v, k2, v2), given, strict=True):
        assert torch.equal(x, before)
        assert x._version == 0


def test_select_keeps_and_reorders_rows() -> None:
    cache = KVCache()
    cache.states = [GrowingKV(K, D)]
    first, second, third = chunks(2, 1, 1)
    cache.states[0].update(*first, 0)
    cache.states[0].update(*second, 2)
    rows = torch.tensor([2, 0, 2])
    cache.select(rows)
    k, v = cache.states[0].update(*third, 3)
    for actual, i in ((k, 0), (v, 1)):
        expected = torch.cat((first[i][rows], second[i][rows], third[i]), 2)
        assert torch.equal(actual, expected)


def test_gradients_reach_every_chunk() -> None:
    state, parts = GrowingKV(K, D), chunks(2, 1, 3)
    leaves = [(k.clone().requires_grad_(), v.clone().requires_grad_()) for k, v in parts]
    total = torch.zeros(())
    weights = [torch.randn(B, K, n, D) for n in (2, 3, 6)]
    for leaf, past, w in zip(leaves, (0, 2, 3), weights, strict=True):
        k, v = state.update(*leaf, past)
        total = total + (k.square() * w).sum() + (v.square() * w).sum()
    total.backward()
    for i, start in enumerate((0, 2, 3)):
        for leaf in leaves[i]:
            n = leaf.shape[2]
            weight = sum(w[:, :, start : start + n] for w in weights[i:])
            torch.testing.assert_close(leaf.grad, 2 * leaf.detach() * weight)


def test_another_number_of_rows() -> None:
    model, ids = tiny_llama(), torch.arange(12).view(3, 4)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 3 rows, this batch has 2"):
        model(ids[:2], past_key_values=cache)
    cache.select(torch.tensor([2, 0]))
    assert model(ids[:2], past_key_values=cache).past_key_values.length == 8
