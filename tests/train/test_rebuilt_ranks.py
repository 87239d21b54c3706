"""FSDP2 on two ranks: inputs of products that are computed again change no bit."""

import math
from typing import Any

import pytest
import torch

import tigon
from tests import interpreter
from tests.small import LLAMA
from tests.train.ranks import Ranks
from tigon.kernels import runtime, use
from tigon.kernels.linear import linear
from tigon.kernels.recompute import recompute_above
from tigon.train.distributed import local, shard, start


def step_on_a_rank() -> None:
    """The gradients of its shards: without rebuilding, with it, of recomputed blocks."""
    interpreter.install()
    rebuilt = []
    compute_again = linear.run_recompute

    def counted(*given: Any) -> Any:
        rebuilt.append(given)
        return compute_again(*given)

    linear.run_recompute = counted
    with start("cpu") as world:
        torch.manual_seed(0)
        model = tigon.Llama.from_config(LLAMA | {"intermediate_size": 40}).train()
        shard(model, world, torch.float32)
        ids = torch.arange(3)[None] + 7 * world.rank
        found = []
        for least, recompute in ((math.inf, 0), (0, 0), (0, True)):
            assert bool(rebuilt) == (len(found) > 1)
            model.activation_checkpointing = recompute
            with use("triton"), recompute_above(least):
                loss = model(ids).logits.square().mean()
                loss.backward()
            gradients = [local(p.grad).clone() for p in model.parameters()]
            model.zero_grad()
            found.append([loss.detach(), *gradients])
        rebuilt.clear()
        assert all(float(g.abs().sum()) > 0 for g in found[0] if g.numel())
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
        print("same")


@pytest.mark.kernel
@pytest.mark.skipif(not runtime.INTERPRETED, reason="the interpreter is not on")
def test_two_ranks() -> None:
    assert Ranks(2, step_on_a_rank).finish().split() == ["same", "same"]
