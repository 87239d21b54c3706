"""FSDP2: the groups of modules whose weights are gathered at once."""

from collections.abc import Set

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.kernels.runtime import disable_pdl
from tigon.layers import Experts, Float32Module
from tigon.models import CausalLM


def reduction_dtype(
    compute: torch.dtype, weights: Set[torch.dtype], ranks: int, *, one_backward: bool
) -> torch.dtype:
    """The dtype in which gradients of weights of these dtypes are summed over `ranks`.

    It is float32, but `compute`, half the bytes, for one backward pass on two ranks if the weights
    have that dtype too: the result is rounded to it anyway, and a sum of two has the same bits.
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
    """Shards each block as an FSDP group, and embedding, last norm and head as another.

    Embedding and head are one group since they may share a weight; what else runs before the blocks
    is a group for each module. `experts`: with expert parallelism, the mesh of ranks with the same
    experts, which are a separate group in each block. `keeps_ends`: do not reshard embedding and
    head after forward, as backward begins with the head. `compute`: the dtype of mixed precision,
    with gradients reduced in `reduction_dtype`; None: no mixed precision. `one_backward`: whether a
    step has a single backward pass.
    """
    disable_pdl(model)
    model.compute_dtype = compute
    # Imported now: it takes a second and 25 MB, and models of one process need none of it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    weights = {p.dtype for p in model.parameters() if p.requires_grad}

    def policy(ranks: DeviceMesh) -> MixedPrecisionPolicy:
        if compute is None:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        sums = reduction_dtype(compute, weights, ranks.size(), one_backward=one_backward)
        return MixedPrecisionPolicy(compute, sums, cast_forward_inputs=False)

    embedding, *others = model.model.embeddings
    ends: list[nn.Module] = [embedding, *model.model.last_modules, model.lm_head]
    for block in model.model.layers:
        for module in block.modules():
            if experts is not None and isinstance(module, Experts) and module.shard is not None:
                fully_shard(module, mesh=experts, mp_policy=policy(experts))
            if isinstance(module, Float32Module):  # a group has one dtype
                exact = MixedPrecisionPolicy(
                    torch.float32, torch.float32, cast_forward_inputs=False
                )
                fully_shard(module, mesh=mesh, mp_policy=exact)
        fully_shard(block, mesh=mesh, mp_policy=policy(mesh))
    for module in (*others, *model.model.first_modules):
        fully_shard(module, mesh=mesh, mp_policy=policy(mesh))
    fully_shard(ends, mesh=mesh, mp_policy=policy(mesh), reshard_after_forward=not keeps_ends)
    fully_shard(model, mesh=mesh, mp_policy=policy(mesh))
