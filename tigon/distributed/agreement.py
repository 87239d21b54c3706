"""Checks that ranks which share a model make the same calls."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.distributed.collectives import Ranks


def check_same_on_all_ranks(
    groups: Sequence[Ranks], call: str, arguments: Mapping[str, Any], device: torch.device
) -> None:
    """Raises ValueError on all ranks if they passed different arguments to `call`.

    They would otherwise wait for each other without end, or compute a mix of both. `groups`: this
    rank's; each gets one message, of tensors on `device`. Arguments are tensors, or have a repr
    that shows all of them.
    """
    if not groups:
        return
    digests = torch.tensor([[_digest(value) for value in arguments.values()]], device=device)
    for ranks in groups:
        digests = ranks.gather(digests)  # [ranks, arguments], at last those of all groups
    differs = (digests != digests[:1]).any(0).tolist()
    if any(differs):
        names = ", ".join(name for name, differ in zip(arguments, differs, strict=True) if differ)
        raise ValueError(
            f"{call}: the {len(digests)} ranks that share the model were given different {names}. "
            "All of them compute the same: give each the same"
        )


def _digest(value: Any) -> int:
    """Returns a 64-bit hash."""
    if isinstance(value, Tensor):
        data_bytes = value.detach().cpu().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        data = repr(tuple(value.shape)).encode() + data_bytes.numpy().tobytes()
    else:
        data = repr(value).encode()
    hashed = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)
