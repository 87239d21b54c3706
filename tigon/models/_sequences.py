"""Packed sequences: their bounds and restarting positions, held against each other.

# B batch, T tokens
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tigon.kernels._check import check, on_host

BOUNDS = ("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")


def same_bounds(arguments: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """What is given of `cu_seq_lens` and its two other names; ValueError where they differ."""
    given = [(name, arguments[name]) for name in BOUNDS if arguments.get(name) is not None]
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


def check_bounds(
    cu_seq_lens: Tensor, longest: int | None, total: int, device: torch.device
) -> tuple[Tensor, int | None]:
    """`cu_seq_lens` as int32 on the device, and the longest sequence if knowing it is free."""
    if cu_seq_lens.dim() != 1 or cu_seq_lens.is_floating_point() or len(cu_seq_lens) < 2:
        raise ValueError(
            f"cu_seq_lens must be integers [sequences + 1], not {cu_seq_lens.dtype} "
            f"{tuple(cu_seq_lens.shape)}"
        )
    given = on_host(cu_seq_lens)
    values = f": {cu_seq_lens.tolist()}" if given else ""
    cu = cu_seq_lens.to(device=device, dtype=torch.int32, non_blocking=True)
    lengths = cu_seq_lens.diff() if given else cu.diff()
    check((lengths >= 0).all(), f"cu_seq_lens is not sorted{values}")
    check(
        (cu[0] == 0) & (cu[-1] == total),
        f"cu_seq_lens must run from 0 to {_told(total, 'N')}, the number of tokens{values}",
    )
    if longest is not None:
        said = f"max_length_q={_told(longest, 'n')}"
        check(
            lengths.max() <= longest,
            f"{said} is less than the longest sequence of cu_seq_lens{values}",
        )
    elif given:
        longest = int(lengths.max())
    return cu, longest


def _told(number: int, letter: str) -> str:
    """A number for a message; a letter for it in a compiled graph, which serves any."""
    return letter if torch.compiler.is_compiling() else str(number)


def check_prefixes(prefixes: Tensor | None, cu: Tensor | None, tokens: int) -> Tensor | None:
    """`prefixes` as int64 [n, 2] on the host; None where no sequence has one."""
    if prefixes is None:
        return None
    if prefixes.device.type == "cpu" and not on_host(prefixes):
        raise ValueError(
            "prefixes inside torch.compile, where nobody can look at them: make the batch with "
            "Batch.of outside of it, and give model(batch=batch)"
        )
    count = None if cu is None else len(cu) - 1
    if cu is None or not on_host(prefixes) or prefixes.shape != (count, 2):
        raise ValueError(
            f"prefixes {tuple(prefixes.shape)} on {prefixes.device} must be [{count}, 2] on the "
            "CPU, for the sequences of cu_seq_lens, which are needed"
        )
    if prefixes.is_floating_point() or prefixes.dtype == torch.bool:
        raise TypeError(f"prefixes is {prefixes.dtype}: places of tokens are integers")
    given = prefixes.long()
    first, end = given.unbind(1)
    message = (
        "each of prefixes must be [first, end) of tokens in the row of its sequence and before it, "
        f"or (i, i): {given.tolist()}"
    )
    if (first > end).any():
        raise ValueError(message)
    if (first == end).all():
        return None
    first, end = (x.to(cu.device, non_blocking=True) for x in (first, end))
    own = cu[:-1].long()
    fits = (end <= own) & (first >= own // tokens * tokens)
    check((fits | (first == end)).all(), message)
    return given


def starts_of(cu: Tensor, batch: int, tokens: int) -> Tensor:
    """First tokens of the sequences that `cu` bounds in the flattened batch: [B, T]."""
    # Repeated ends (padding of cu_seq_lens itself) fall on the extra last slot
    starts = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long(), True)[:-1].view(batch, tokens)
    values = f": {cu.tolist()}" if on_host(cu) else ""
    rows = f"two rows of {_told(tokens, 'T')}{values}"
    check(starts[:, 0].all(), f"cu_seq_lens has a sequence that spans {rows}")
    return starts


def check_padding(key_mask: Tensor, starts: Tensor) -> None:
    """Each sequence of `cu_seq_lens` is all padding or all real: otherwise which would hold?"""
    torn = (key_mask[:, 1:] != key_mask[:, :-1]) & ~starts[:, 1:]
    where = ""
    if on_host(torn) and torn.any():
        row, column = torn.nonzero()[0].tolist()
        where = f": row {row} changes at token {column + 1}"
    check(
        ~torn.any(),
        "attention_mask begins or ends padding inside a sequence of cu_seq_lens"
        f"{where}; make padding a sequence of its own, or give one of the two",
    )


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


def restarts(position_ids: Tensor, key_mask: Tensor | None, batch: int) -> Tensor:
    """True on the first token of every row and wherever the position does not increase."""
    position_ids = position_ids.expand(batch, -1)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    if key_mask is None:
        starts[:, 1:] = after <= before
    else:  # positions of padding mean nothing: the last real token counts
        at = torch.arange(position_ids.shape[1], device=position_ids.device)
        last = torch.where(key_mask, at, -1).cummax(1).values[:, :-1]
        before = torch.where(last < 0, -1, before.gather(1, last.clamp(min=0)))
        starts[:, 1:] = (after <= before) & key_mask[:, 1:]
    return starts
