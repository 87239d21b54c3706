"""One rank's part of a model, where no other rank is."""

from tigon.layers.collectives import Ranks
from tigon.models import CausalLM
from tigon.parallel.context import check_context
from tigon.parallel.expert import divide_experts
from tigon.parallel.mesh import MeshSizes
from tigon.parallel.plan import cut_parts


def take_part(model: CausalLM, sizes: MeshSizes) -> None:
    """Leave to a model on the meta device what the first of so many ranks computes with, before
    FSDP. What it receives from the others has a size and no numbers; experts are chosen evenly.

    ValueError for a model that cannot be divided so.
    """
    if sizes.expert > 1:
        divide_experts(model, Ranks("", 0, sizes.expert))
    if sizes.tensor > 1:
        cut_parts(model, Ranks("", 0, sizes.tensor))
    if sizes.context > 1:
        check_context(model, sizes.context)
        model.context = Ranks("", 0, sizes.context)
