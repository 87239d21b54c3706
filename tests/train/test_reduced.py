"""The dtype in which FSDP2 reduces gradients: that of the weights if the bits are the same."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import tigon
from tests.support import interpreter
from tests.support.recompute import recompute_above
from tests.support.small import LLAMA
from tests.train.ranks import Ranks
from tigon import models
from tigon.kernels import runtime, use
from tigon.kernels.linear import linear
from tigon.parallel import fsdp
from tigon.train import main
from tigon.train.distributed import local, shard, start


def run(settings: list[str], in_float32: bool) -> None:
    """A run that prints the dtypes of what ranks reduce-scatter."""
    found, known = set(), _fsdp_collectives.foreach_reduce_scatter_copy_in

    def copy_in(gradients: Any, buffer: torch.Tensor, *rest: Any) -> Any:
        found.add(str(buffer.dtype))
        return known(gradients, buffer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_collectives, "foreach_reduce_scatter_copy_in", copy_in)
        if in_float32:
            shard = fsdp.shard_blocks
            patch.setattr(
                "tigon.train.distributed.shard_blocks",
                lambda *a, **k: shard(*a, **(k | {"one_backward": False})),
            )
        main(settings)
    print("reduced in", *sorted(found), flush=True)


BFLOAT16 = {"dtype": "bfloat16", "param_dtype": "bfloat16", "steps": 2, "export": "true"}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("ranks", "changes", "dtype"),
    [
        (2, {"micro_batch_size": 4}, "bfloat16"),
        (2, {"micro_batch_size": 8, "parallel.context": 2}, "bfloat16"),
        (4, {"micro_batch_size": 4, "parallel.tensor": 2}, "bfloat16"),
        (2, {"micro_batch_size": 2}, "float32"),  # gradients of two backward passes add up
        (2, {"micro_batch_size": 4, "param_dtype": "float32"}, "float32"),
        (4, {"micro_batch_size": 2}, "float32"),
    ],
)
def test_two_ranks_reduce_bfloat16(workspace, tmp_path, ranks, changes, dtype):
    settings = BFLOAT16 | {"batch_size": 8} | changes
    for name in ("own", "in float32") if dtype == "bfloat16" else ("own",):
        own = workspace.settings("", **settings, run_dir=tmp_path / name)
        said = Ranks(ranks, run, own, name == "in float32").finish()
        expected = dtype if name == "own" else "float32"
        assert said.count(f"reduced in torch.{expected}\n") == ranks, said
    if dtype == "bfloat16":
        ours, theirs = (load_file(x / "hf/model.safetensors") for x in sorted(tmp_path.iterdir()))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_gradients_are_plain_sums_on_every_device():
    """Over NCCL, torch's product with a factor of 1.0 makes zeros of bfloat16 gradients."""
    with start("cpu") as world:
        model = models.Llama.from_config(LLAMA)
        shard(model, replace(world, device=torch.device("cuda")), torch.bfloat16)
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        groups = {s._fsdp_param_group for s in states if s._fsdp_param_group is not None}
        assert len(groups) == 3  # two blocks, embedding and head
        assert all(group.force_sum_reduction_for_comms for group in groups)


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
