"""FSDP2 of a model: which modules form a group, and are gathered together."""

from collections.abc import Set

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.kernels.runtime import disable_pdl
from tigon.layers import Experts
from tigon.models import CausalLM, hooks_of_fsdp


def reduction_dtype(
    compute: torch.dtype, weights: Set[torch.dtype], ranks: int, *, one_backward: bool
) -> torch.dtype:
    """In which gradients are summed over `ranks`: float32, for trained weights of these dtypes.

    Gradients of two ranks and one backward pass are summed in `compute`, half the bytes, if the
    weights have that dtype too: the result is rounded to it in any case, and a sum of two is the
    same bits.
    """
    exact = one_backward and ranks <= 2 and weights <= {compute}
    return compute if exact else torch.float32


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
    weights are cast to, with gradients reduced in what `reduction_dtype` says; None: no mixed
    precision. `one_backward`: a step has one backward pass, so gradients are not added up over
    several.
    """
    disable_pdl(model)
    # Imported now: it takes a second and 25 MB, and models of one process need none of it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    weights = {p.dtype for p in model.parameters() if p.requires_grad}

    def policy(ranks: DeviceMesh) -> MixedPrecisionPolicy:
        if compute is None:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        sums = reduction_dtype(compute, weights, ranks.size(), one_backward=one_backward)
        return MixedPrecisionPolicy(compute, sums, cast_forward_inputs=False)

    ends: list[nn.Module] = [model.model.embed_tokens, model.model.norm, model.lm_head]
    with hooks_of_fsdp(model):
        for block in model.model.layers:
            for module in block.modules():
                if experts is not None and isinstance(module, Experts) and module.shard is not None:
                    fully_shard(module, mesh=experts, mp_policy=policy(experts))
            fully_shard(block, mesh=mesh, mp_policy=policy(mesh))
        fully_shard(ends, mesh=mesh, mp_policy=policy(mesh), reshard_after_forward=not keeps_ends)
        fully_shard(model, mesh=mesh, mp_policy=policy(mesh))
