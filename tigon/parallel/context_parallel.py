"""Context parallelism: the ranks of a group share rows, and each computes a shard of the tokens."""

from torch.distributed.device_mesh import DeviceMesh

from tigon.distributed.collectives import Ranks
from tigon.layers import Attention
from tigon.models import CausalLM


def share_context(model: CausalLM, mesh: DeviceMesh) -> None:
    """Shard the tokens of every later pass without a cache over the mesh, of one dimension.

    All its ranks make the same passes over the same rows, and get losses, log-probabilities and
    logits of all tokens. Gradients are partial and must be summed over the ranks. Raises ValueError
    for a model that does not support it.
    """
    check_context(model, mesh.size())
    model.context_ranks = Ranks.of(mesh.get_group())


def check_context(model: CausalLM, ranks: int) -> None:
    """Raises ValueError if the model does not support this number of context ranks."""
    if ranks == 1:
        return
    for i, block in enumerate(model.model.layers):
        mixer = block.mixer
        if not isinstance(mixer, Attention):
            raise ValueError(
                f"parallel.context={ranks}: layer {i} of {type(model).__name__} is a "
                f"{type(mixer).__name__}, which needs the tokens before on the same rank; only "
                "attention exchanges them: give parallel.context=1"
            )
