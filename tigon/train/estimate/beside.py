"""What a frozen model takes that runs beside the trained one: a teacher, or a live reference."""

from dataclasses import replace
from typing import Any

import torch

from tigon.models import CausalLM
from tigon.parallel import MeshSizes, take_part
from tigon.train.config import Config
from tigon.train.estimate.gathering import Gathering, held, ranks_of, whole
from tigon.train.estimate.meter import Ledger, Meter, tensors_of
from tigon.train.model import has_experts, is_sharded


class OneKind(Ledger):
    """Adds to another ledger, all as of one kind."""

    def __init__(self, ledger: Ledger, kind: str) -> None:
        super().__init__()
        self.ledger, self.kind = ledger, kind

    def add(self, kind: str, size: int) -> None:
        self.ledger.add(self.kind, size)

    def remove(self, kind: str, size: int) -> None:
        self.ledger.remove(self.kind, size)


def count_in(
    other: CausalLM, meter: Meter, config: Config, sizes: MeshSizes, compute: torch.dtype
) -> None:
    """Its weights on the first rank, from now on, and what its passes make and leave.

    One that the settings name is as `load_frozen` has it; else it is made as the trained one is.
    """
    kind = "teacher" if config.teacher else "reference"
    ledger = OneKind(meter.ledger, kind)
    take_part(other, sizes if has_experts(other) else replace(sizes, expert=1))
    other.use_attention(config.attention)
    other.requires_grad_(False).eval()
    shares, dtype = ranks_of(other, sizes.shards), other.dtype
    named = bool(config.teacher or config.reference)
    sharded = sizes.dividing > 1 if named else is_sharded(config, sizes.dividing, compute)
    if zero := sharded and not named and config.sharding == "gradients":
        ledger.add(kind, whole(other, sizes.shards, compute))
    if not zero or compute != dtype:
        ledger.add(kind, sum(held(p, n, dtype) for p, n in shares.items()))
    other.to("meta", compute)
    meter.ignore(tensors_of(other))

    def enter(*_: Any) -> None:
        meter.phase = kind

    def leave(*_: Any) -> None:
        meter.phase = "activations"

    other.register_forward_pre_hook(enter)
    other.register_forward_hook(leave)
    if sharded and not zero:
        Gathering(other, meter, shares, compute, dtype).ledger = ledger
