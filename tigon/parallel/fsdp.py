"""FSDP2 of a model: which modules are gathered together."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.layers import Experts
from tigon.models import CausalLM


def shard_blocks(
    model: CausalLM,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    experts: DeviceMesh | None = None,
    keeps_ends: bool,
) -> None:
    """A group for each block, and one for embedding, last norm and head, since embedding and head
    share a weight in some models. `experts`: the ranks that have the same experts, where ranks have
    whole ones; these have a group of their own in each block. `keeps_ends`: that last group stays
    after forward, as backward begins with it. `compute`: what weights are cast to, with gradients
    summed in float32; None: all as it is.
    """
    # Imported now: it takes a second and 25 MB, and models of one process need none of it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sums = None if compute is None else torch.float32
    policy = MixedPrecisionPolicy(compute, sums, cast_forward_inputs=False)
    for block in model.model.layers:
        for module in block.modules():
            if experts is not None and isinstance(module, Experts) and module.shard is not None:
                fully_shard(module, mesh=experts, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    ends: list[nn.Module] = [model.model.embed_tokens, model.model.norm, model.lm_head]
    fully_shard(ends, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_ends)
    fully_shard(model, mesh=mesh, mp_policy=policy)
