"""Expert parallelism: the ranks of a group divide the experts of each layer, and have all else."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.layers import Experts
from tigon.layers.collectives import Ranks
from tigon.layers.expert_shard import ExpertShard
from tigon.models import CausalLM
from tigon.weights import Copy, Cut, Rows


def share_experts(model: CausalLM, mesh: DeviceMesh) -> None:
    """Leave to each rank of the mesh its experts: rank r of N has those from r E / N on.

    On the meta device, before the weights are read, or of a model that is the same on all ranks.
    From then on all ranks make as many passes, each over rows of its own; an expert's gradient is
    the sum over the rows of all of them. `mesh` has one dimension. ValueError for a model that
    cannot be divided so.
    """
    divide_experts(model, Ranks.of(mesh.get_group()))


def divide_experts(model: CausalLM, ranks: Ranks) -> None:
    """As `share_experts`."""
    check_experts(model, ranks.size)
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        experts = len(module.down_proj)
        own = experts // ranks.size
        for name, whole in list(module.named_parameters(recurse=False)):
            cut = Cut(tuple(whole.shape), 0, ((Rows(ranks.rank * own, 0, own), Copy()),))
            model.cuts[f"{path}.{name}"] = cut
            setattr(module, name, nn.Parameter(cut.take(whole.detach()), whole.requires_grad))
        module.shard = ExpertShard(ranks, experts)


def check_experts(model: CausalLM, ranks: int) -> None:
    """Raises ValueError unless so many ranks can share the model's experts."""
    if ranks == 1:
        return
    counts = [len(m.down_proj) for m in model.modules() if isinstance(m, Experts)]
    if not counts:
        raise ValueError(
            f"parallel.expert={ranks}, but {model.config.architecture} has no experts: give "
            "parallel.expert=1"
        )
    for experts in counts:
        if experts % ranks:
            raise ValueError(
                f"parallel.expert={ranks} does not divide the {experts} experts of a layer of "
                f"{model.config.architecture}"
            )
    if model.adapters:
        raise ValueError(f"parallel.expert={ranks} is not there for adapters")
