"""One rank's part of a model, without process groups."""

from tigon.layers.collectives import Ranks
from tigon.models import CausalLM
from tigon.parallel.context import check_context
from tigon.parallel.expert import divide_experts
from tigon.parallel.mesh import MeshSizes
from tigon.parallel.plan import cut_parts


def take_part(model: CausalLM, sizes: MeshSizes) -> None:
    """Reduce a model on the meta device to the part of rank 0, before FSDP. Collectives return meta
    tensors of the right size; experts get equally many tokens.

    ValueError for a model that the sizes do not divide.
    """
    if sizes.expert > 1:
        divide_experts(model, Ranks("", 0, sizes.expert))
    if sizes.tensor > 1:
        cut_parts(model, Ranks("", 0, sizes.tensor))
    if sizes.context > 1:
        check_context(model, sizes.context)
        model.context = Ranks("", 0, sizes.context)
