"""How evenly experts are used; the layer itself is held to transformers in tests/models."""

import pytest
import torch

from tigon.layers import MoEOutput, SparseMoE, balance, count_routing

N, E, K = 3000, 8, 2  # more tokens than bf16 can count


def routed(experts: torch.Tensor, probs: torch.Tensor) -> MoEOutput:
    return MoEOutput(torch.empty(0), probs, experts)


def test_extremes() -> None:
    even = torch.arange(N * K).view(N, K) % E
    same = torch.tensor([3, 5]).expand(N, K)
    tallies = [
        count_routing(routed(even, torch.full((N, E), 1 / E)), None),
        count_routing(routed(same, torch.zeros(N, E).index_fill(1, same[0], 0.5)), None),
    ]
    counts = [int(t[0].sum()) for t in tallies]
    assert counts == [N * K] * 2
    alone = [balance([t], K) for t in tallies]
    assert alone[0].aux_loss.item() == pytest.approx(K, rel=1e-6)
    assert alone[1].aux_loss.item() == pytest.approx(E, rel=1e-6)
    assert alone[0].load.tolist() == [[1 / E] * E]
    assert alone[1].load.tolist() == [[0, 0, 0, 0.5, 0, 0.5, 0, 0]]
    both = balance(tallies, K)
    assert torch.equal(both.load, torch.cat([b.load for b in alone]))
    # Layers are one population: what is uneven in one of them is half as uneven in both
    share = torch.tensor([1 / E] * E) * K / 2
    share[[3, 5]] += 0.5
    prob = torch.tensor([1 / E] * E) / 2
    prob[[3, 5]] += 0.25
    assert both.aux_loss.item() == pytest.approx(E * (share * prob).sum().item(), rel=1e-6)


def test_padding_does_not_count() -> None:
    probs, real = torch.rand(N, E).softmax(-1), torch.arange(N) % 7 != 0
    experts = probs.topk(K).indices
    expected = count_routing(routed(experts[real], probs[real]), None)
    torch.testing.assert_close(count_routing(routed(experts, probs), real), expected)
    torch.testing.assert_close(count_routing(routed(experts, probs), real.long()), expected)
    nothing = balance([count_routing(routed(experts, probs), torch.zeros(N))], K)
    assert nothing.aux_loss == 0 and not nothing.load.any()


def test_no_value_is_looked_at() -> None:
    """What the host would have to wait for raises on meta tensors."""
    probs, experts = torch.empty(7, E, device="meta"), torch.empty(7, K, device="meta").long()
    real = torch.empty(7, device="meta")
    found = balance([count_routing(routed(experts, probs), real)] * 2, K)
    assert found.load.shape == (2, E) and found.aux_loss.shape == ()


@pytest.mark.parametrize("shape", [(2, 5, 12), (1, 1, 12), (0, 3, 12)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    moe = SparseMoE(12, 20, E, K, "silu", normalize=True, shared=16)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(shape, requires_grad=True)
    out = moe(x)
    assert out.x.shape == shape
    assert out.probs.shape == (shape[0] * shape[1], E) and out.experts.shape[1] == K
    rows = [moe(x[i : i + 1, j : j + 1]).x for i in range(shape[0]) for j in range(shape[1])]
    if rows:
        torch.testing.assert_close(out.x, torch.cat(rows).view(shape))
    out.x.sum().backward()
    assert all(p.grad is not None for p in moe.parameters())
