"""The first call of a model that ranks share: whether they have read the same files, and are given
the same rows.

Hosts may have other files of one name, and a DistributedSampler gives each rank other rows; the
results would be meaningless.
"""

from typing import Any

from tigon.generation.alike import check_alike
from tigon.layers import Experts
from tigon.models import CausalLM

CALL = "the first call of the model"
ROWS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens", "labels")


def check_first_call(model: CausalLM) -> None:
    """Compare `model.files` and the rows in its first call, by two small messages. Calls raise
    ValueError, on all ranks alike, until both are the same."""
    # Before FSDP's, which gathers
    model.unchecked = model.register_forward_pre_hook(_check, with_kwargs=True, prepend=True)


# No closure, so that a model can be copied and pickled before its first call
def _check(model: CausalLM, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    known = {"files of the model": model.files, "dtype": model.dtype}
    known["expert_parallel"] = any(isinstance(m, Experts) and m.shard for m in model.modules())
    check_alike(model.together, CALL, known, model.device)
    given = named | dict(zip(("input_ids",), arguments, strict=False))
    rows = {name: given.get(name) for name in ROWS}
    ranks = [] if model.tensor_ranks is None else [model.tensor_ranks]
    check_alike(ranks, CALL, rows, model.device)
    assert model.unchecked is not None
    model.unchecked.remove()
    model.unchecked = None
