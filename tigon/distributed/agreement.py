"""Ranks that share a model make the same calls: whether they did."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.distributed.collectives import Ranks


def check_same_on_all_ranks(
    groups: Sequence[Ranks], call: str, given: Mapping[str, Any], device: torch.device
) -> None:
    """ValueError on all ranks where a call was given different arguments: they would wait for each
    other without end, or compute what belongs to none of them. `groups`: of this rank; one message
    in each, of tensors on `device`. Arguments are tensors, or have a repr that says all.
    """
    if not groups:
        return
    every = torch.tensor([[_digest(value) for value in given.values()]], device=device)
    for ranks in groups:
        every = ranks.gather(every)  # [ranks, arguments], at last those of all groups
    differs = (every != every[:1]).any(0).tolist()
    if any(differs):
        names = ", ".join(name for name, differ in zip(given, differs, strict=True) if differ)
        raise ValueError(
            f"{call}: the {len(every)} ranks that share the model were given different {names}. "
            "All of them compute the same: give each the same"
        )


def _digest(value: Any) -> int:
    """64 bits."""
    if isinstance(value, Tensor):
        own = value.detach().cpu().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        data = repr(tuple(value.shape)).encode() + own.numpy().tobytes()
    else:
        data = repr(value).encode()
    found = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)
