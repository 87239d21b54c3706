"""Ranks that cannot all open shared memory: none of them waits for the others, and NCCL sums."""

import pytest
import torch

from tests.train.ranks import Ranks as Processes
from tigon.distributed import all_reduce
from tigon.distributed.collectives import Ranks


def without_memory(fails: str) -> None:
    """On rank 1 the allocation or the rendezvous fails."""
    torch.distributed.init_process_group("gloo")
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
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fails", ["empty", "rendezvous"])
def test_one_rank_without_memory(fails):
    Processes(2, without_memory, fails).finish(60)
