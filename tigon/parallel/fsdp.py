"""FSDP2 of a model: which modules form a group, and are gathered together."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.kernels._triton import no_early_start
from tigon.layers import Experts
from tigon.models import CausalLM


def shard_blocks(
    model: CausalLM,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None = None,
    experts: DeviceMesh | None = None,
    keeps_ends: bool,
    one_backward: bool = False,
) -> None:
    """One FSDP group per block, and one of embedding, last norm and head, since embedding and head
    share a weight in some models. `experts`: with expert parallelism, the ranks with the same
    experts, which are a group of their own in each block. `keeps_ends`: the group of embedding and
    head is not resharded after forward, as backward begins with it. `compute`: the dtype that
    weights are cast to, with gradients reduced in float32; None: no mixed precision.

    `one_backward`: a step has one backward pass, so gradients are not added up over several. Those
    of two ranks are then reduced in `compute`, half the bytes, if the weights have that dtype too:
    the result is rounded to it in any case, and a sum of two is the same bits.
    """
    no_early_start()
    # Imported now: it takes a second and 25 MB, and models of one process need none of it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    exact = one_backward and all(p.dtype == compute for p in model.parameters() if p.requires_grad)

    def policy(ranks: DeviceMesh) -> MixedPrecisionPolicy:
        sums = compute if exact and ranks.size() <= 2 else torch.float32
        return MixedPrecisionPolicy(
            compute, None if compute is None else sums, cast_forward_inputs=False
        )

    for block in model.model.layers:
        for module in block.modules():
            if experts is not None and isinstance(module, Experts) and module.shard is not None:
                fully_shard(module, mesh=experts, mp_policy=policy(experts))
        fully_shard(block, mesh=mesh, mp_policy=policy(mesh))
    ends: list[nn.Module] = [model.model.embed_tokens, model.model.norm, model.lm_head]
    fully_shard(ends, mesh=mesh, mp_policy=policy(mesh), reshard_after_forward=not keeps_ends)
    fully_shard(model, mesh=mesh, mp_policy=policy(mesh))
