"""Expert parallelism: each rank of a group has some whole experts of each layer."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.distributed.collectives import Ranks
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.layers import Experts, LowRankExperts
from tigon.models import CausalLM
from tigon.weights import Copy, Cut, Rows


def share_experts(model: CausalLM, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts: rank r of N has E / N of them, from expert r E / N on.

    Call it on the meta device, before the weights are read, or with identical weights on all ranks.
    From then on all ranks make the same number of passes, each over its own rows; an expert's
    gradient is the sum over the rows of all ranks. `mesh` has one dimension. ValueError for a model
    whose experts the ranks do not divide.
    """
    divide_experts(model, Ranks.of(mesh.get_group()))


def divide_experts(model: CausalLM, ranks: Ranks) -> None:
    """As `share_experts`, without a mesh."""
    check_experts(model, ranks.size)
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        module.shard = shard = ExpertShard(ranks, len(module.down_proj))
        for at, inner in module.named_modules(prefix=path):
            for name, whole in list(inner.named_parameters(recurse=False)):
                if isinstance(inner, LowRankExperts):
                    dim, pieces = _of_adapter(inner, name, shard)
                else:
                    dim, pieces = 0, [_own(shard)]
                cut = Cut(tuple(whole.shape), dim, tuple((rows, Copy()) for rows in pieces))
                model.cuts[f"{at}.{name}"] = cut
                setattr(inner, name, nn.Parameter(cut.take(whole.detach()), whole.requires_grad))
            if isinstance(inner, LowRankExperts):
                inner.experts = shard.experts_per_rank


def _own(shard: ExpertShard, unit: int = 1, before: int = 0) -> Rows:
    """This rank's experts, `unit` rows each, in block `before` of several blocks of all experts."""
    first = before * shard.experts + shard.ranks.rank * shard.experts_per_rank
    return Rows(first * unit, before * shard.experts_per_rank * unit, shard.experts_per_rank * unit)


def _of_adapter(low: LowRankExperts, name: str, shard: ExpertShard) -> tuple[int, list[Rows]]:
    """The dimension of A or B that is split by experts, and this rank's rows of it."""
    (part,) = (part for part in low.parts if name.endswith(f"_{part.name}"))
    if name == low.name_of_a(part):
        return 0, [_own(shard, part.rank)]
    return 1, [_own(shard, before=r) for r in range(part.rank)]


def check_experts(model: CausalLM, ranks: int) -> None:
    """Raises ValueError if the model has no experts, or so many ranks do not divide them."""
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
