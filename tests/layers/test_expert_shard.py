"""Experts divided over ranks beside all experts on one."""

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.ranks import run_on_ranks
from tigon.distributed import collectives
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.layers.moe import Experts

C, I, E, K = 12, 20, 8, 3  # noqa: E741
TOKENS = (7, 0, 11, 4)  # of each rank
CASES = ("even", "one expert gets all", "one rank gets nothing")


def tensors(case: str, ranks: int) -> tuple[Experts, list[tuple[Tensor, Tensor, Tensor]]]:
    """All experts, and what each rank has of x, chosen experts and weights."""
    generator = torch.Generator().manual_seed(3)
    whole = Experts(C, I, E, "silu").double()
    for p in whole.parameters():
        torch.nn.init.normal_(p, generator=generator)
    found = []
    for n in TOKENS[:ranks]:
        x = torch.randn(n, C, generator=generator, dtype=torch.float64, requires_grad=True)
        scores = torch.rand(n, E, generator=generator, dtype=torch.float64)
        if case == "one expert gets all":
            scores[:, 5] = 2.0
        if case == "one rank gets nothing":
            scores[:, : E // ranks] = -1.0
        weights, chosen = scores.topk(K)
        found.append((x, chosen, weights.detach().requires_grad_()))
    return whole, found


def results(y: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
    (y * torch.linspace(-1, 2, C, dtype=torch.float64)).square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def on_rank() -> dict[str, list[Tensor]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each, results_of = E // ranks, {}
    for case in CASES:
        whole, parts = tensors(case, ranks)
        own = Experts(C, I, each, "silu").double()
        with torch.no_grad():
            for mine, all_of in zip(own.parameters(), whole.parameters(), strict=True):
                mine.copy_(all_of[rank * each : (rank + 1) * each])
        own.shard = ExpertShard(collectives.Ranks.of(dist.group.WORLD), E)
        x, chosen, weights = parts[rank]
        found = results(own(x, chosen, weights), x, weights)
        found += [p.grad for p in own.parameters() if p.grad is not None]
        results_of[case] = found
    return results_of


def test_equals_one_rank() -> None:
    ranks = len(TOKENS)
    every = run_on_ranks(ranks, on_rank)
    for case in CASES:
        whole, parts = tensors(case, ranks)
        of_ranks = [found[case] for found in every]
        for found, (x, chosen, weights) in zip(of_ranks, parts, strict=True):
            expected = results(whole(x, chosen, weights), x, weights)
            torch.testing.assert_close(found[:3], expected)
        for i, p in enumerate(whole.parameters()):  # the sum over all tokens, of each expert once
            own = torch.cat([found[3 + i] for found in of_ranks])
            torch.testing.assert_close(own, p.grad)
