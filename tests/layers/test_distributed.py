"""Communication between ranks: experts, shared memory, and heads divided over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.ranks import run_on_ranks
from tests.support.saved import saved_storages
from tigon.distributed import all_reduce, collectives
from tigon.distributed.collectives import Ranks
from tigon.distributed.context_attention import StackHeads, UnstackHeads
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.kernels import runtime, use
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


def with_kernels() -> list[tuple[list[Tensor], int]]:
    """Results and the bytes that are saved, with gate_up kept and computed again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, parts = tensors("even", ranks)
    own = Experts(C, I, each := E // ranks, "silu")
    own.shard = ExpertShard(collectives.Ranks.of(dist.group.WORLD), E)
    x, chosen, weights = (t.detach() for t in parts[rank])
    found = []
    for recompute in (False, True):
        own.recompute_gate_up = recompute
        with torch.no_grad():
            for mine, all_of in zip(own.parameters(), whole.parameters(), strict=True):
                mine.copy_(all_of[rank * each : (rank + 1) * each])
                mine.grad = None
        given = x.float().requires_grad_(), chosen, weights.float().requires_grad_()
        with use("triton"), saved_storages() as saved:
            y = own(*given)
        with use("triton"):
            grads = results(y, given[0], given[2])
        grads += [p.grad for p in own.parameters() if p.grad is not None]
        found.append((grads, sum(storage.nbytes() for storage in saved.values())))
    return found


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the interpreter is not on")
@pytest.mark.kernel
def test_rows_of_other_ranks_are_not_kept_as_gate_up() -> None:
    """As of one rank, with the same bits; there are rows for all choices of all ranks' tokens."""
    saved = 0
    for (kept, before), (again, after) in run_on_ranks(2, with_kernels):
        assert len(kept) == 5
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
        saved += before - after
    assert saved == 4 * sum(TOKENS[:2]) * K * 2 * I


def without_memory(fails: str) -> None:
    """On rank 1 the allocation or the rendezvous fails."""
    ranks = Ranks.of(torch.distributed.group.WORLD)
    x, met = torch.zeros(4), []

    def step(name: str):
        def run(*_, **__):
            if name == "rendezvous":
                met.append(name)
            if name == fails and ranks.rank == 1:
                raise RuntimeError("out of memory")
            return torch.zeros(1)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduce, "runs_triton", lambda x: True)
        patch.setattr(all_reduce, "_can_access_peers", lambda *_: True)
        for name in ("empty", "rendezvous"):
            patch.setattr(all_reduce.symmetric, name, step(name))
        if ranks.rank == 1:
            with pytest.warns(UserWarning, match="NCCL sums: out of memory"):
                assert all_reduce._open_buffers(ranks, x) is None
        else:
            assert all_reduce._open_buffers(ranks, x) is None
    assert met == ["rendezvous"] * (fails == "rendezvous")


@pytest.mark.parametrize("fails", ["empty", "rendezvous"])
def test_one_rank_without_memory(fails):
    run_on_ranks(2, without_memory, fails)


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
    ours, theirs = StackHeads.apply(2, *own), reference(others, 2)
    assert ours.is_contiguous() and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    grad = torch.randn(*ours.shape, 2, dtype=dtype)[..., 0]  # strided
    ours.backward(grad)
    theirs.backward(grad)
    for x, y in zip(own, others, strict=True):
        assert torch.equal(x.grad, y.grad)
    x = torch.randn(2, batch, 3, 2, dim, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours, theirs = UnstackHeads.apply(x), y.permute(1, 2, 0, 3, 4).flatten(2, 3)
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
    UnstackHeads.apply(StackHeads.apply(2, q, kv))
    assert found == [torch.complex128] * 3
