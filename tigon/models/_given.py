"""What a caller gives to `forward`, held against the model and against each other.

# B batch, T tokens
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.layers import Cache
from tigon.layers._check import check, on_host

BOUNDS = ("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")


def check_ids(input_ids: Tensor, vocab: int) -> None:
    """Tokens on the host are below `vocab`; for those on a GPU nobody waits."""
    if not on_host(input_ids) or not input_ids.numel():
        return
    least, most = (int(i) for i in input_ids.aminmax())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise ValueError(f"input_ids has token {wrong}, outside of [0, {vocab})")


def check_cache(cache: Cache, model: str, holds: Sequence[str]) -> None:
    """The cache was made for, or filled by, a model of such layers."""
    if cache.holds and cache.holds != holds:
        raise ValueError(
            f"past_key_values has {_layers(cache.holds)}, but this {model} {_layers(holds)}: "
            "give a cache of this model"
        )


def _layers(holds: Sequence[str]) -> str:
    runs = ((len(list(run)), held) for held, run in itertools.groupby(holds))
    return ", ".join(f"{n} layers of {held}" for n, held in runs)


def same_bounds(device: torch.device, *bounds: Tensor | None) -> Tensor | None:
    """What is given of `cu_seq_lens` and its two other names; ValueError where they differ."""
    given = [(n, x) for n, x in zip(BOUNDS, bounds, strict=True) if x is not None]
    for (name, a), (other, b) in itertools.pairwise(given):
        if a is b:
            continue
        values = ""
        if on_host(a) and on_host(b):
            values = f": {a.tolist()} and {b.tolist()}"
        else:
            a, b = (x.to(device, non_blocking=True) for x in (a, b))
        message = f"{name} and {other} differ{values}; queries and keys have the same bounds here"
        if a.shape != b.shape:
            raise ValueError(message)
        check((a == b).all(), message)
    return given[0][1] if given else None


def check_positions(
    position_ids: Tensor,  # [B or 1, T]
    segment_ids: Tensor | None,  # [B, T], of cu_seq_lens
    key_mask: Tensor | None,  # [B, T]
) -> None:
    """Positions never fall inside each sequence of `cu_seq_lens`, except on padding."""
    restarts = position_ids[:, 1:] < position_ids[:, :-1]
    if segment_ids is not None:
        restarts = restarts & (segment_ids[:, 1:] == segment_ids[:, :-1])
    if key_mask is not None:
        restarts = restarts & key_mask[:, 1:]
    where = ""
    if on_host(restarts) and restarts.any():
        row, column = restarts.nonzero()[0].tolist()
        before, after = position_ids.expand(len(restarts), -1)[row, column : column + 2].tolist()
        where = f": token {column + 1} of row {row} has position {after} after {before}"
    check(
        ~restarts.any(),
        f"position_ids restart inside a sequence of cu_seq_lens{where}; give one of the two",
    )
