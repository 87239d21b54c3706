"""Expert parallelism: each rank of a group has some of each layer's experts."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.distributed.collectives import Ranks
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.layers import Experts, LowRankExperts
from tigon.layers.lora import LORA_A
from tigon.models import CausalLM
from tigon.parallel.mesh import as_ranks
from tigon.weights import ReplicaIndex, RowSpan, ShardSpec


def shard_experts(model: CausalLM, mesh: DeviceMesh | Ranks) -> None:
    """Keep only this rank's experts: rank r of N has E / N of them, from expert r E / N on.

    Call it on the meta device, before weights are read, or with equal weights on all ranks. All
    ranks then make the same number of passes, each over its own rows; an expert's gradient is the
    sum over the rows of all ranks. `mesh` has one dimension. Raises ValueError for a model whose
    experts the ranks do not divide.
    """
    ranks = as_ranks(mesh)
    check_experts(model, ranks.size)
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        module.shard = shard = ExpertShard(ranks, len(module.down_proj))
        for at, inner in module.named_modules(prefix=path):
            for name, whole in list(inner.named_parameters(recurse=False)):
                if isinstance(inner, LowRankExperts):
                    dim, pieces = _adapter_rows(inner, name, shard)
                else:
                    dim, pieces = 0, [_expert_rows(shard)]
                spec = ShardSpec(
                    tuple(whole.shape), dim, tuple((rows, ReplicaIndex()) for rows in pieces)
                )
                model.shard_specs[f"{at}.{name}"] = spec
                setattr(inner, name, nn.Parameter(spec.take(whole.detach()), whole.requires_grad))
            if isinstance(inner, LowRankExperts):
                inner.experts = shard.experts_per_rank


def _expert_rows(shard: ExpertShard, unit: int = 1, block: int = 0) -> RowSpan:
    """This rank's experts, `unit` rows each, in the `block`-th block of all experts' rows."""
    first = block * shard.experts + shard.ranks.rank * shard.experts_per_rank
    return RowSpan(
        first * unit, block * shard.experts_per_rank * unit, shard.experts_per_rank * unit
    )


def _adapter_rows(low: LowRankExperts, name: str, shard: ExpertShard) -> tuple[int, list[RowSpan]]:
    """The dimension of A or B that counts experts, and this rank's rows of it."""
    (part,) = (part for part in low.parts if name.endswith(f"_{part.name}"))
    if name.startswith(LORA_A):
        return 0, [_expert_rows(shard, part.rank)]
    return 1, [_expert_rows(shard, block=r) for r in range(part.rank)]


def check_experts(model: CausalLM, ranks: int) -> None:
    """Raises ValueError if several ranks find no experts, or a number that they do not divide."""
    if ranks == 1:
        return
    counts = [len(m.down_proj) for m in model.modules() if isinstance(m, Experts)]
    if not counts:
        raise ValueError(
            f"{model.config.architecture} has no experts for {ranks} ranks to share "
            "(parallel.expert, expert_parallel)"
        )
    for experts in counts:
        if experts % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share the {experts} experts of a layer of "
                f"{model.config.architecture}: the number of ranks (parallel.expert; --tp or mesh "
                "with expert_parallel) must divide them"
            )
