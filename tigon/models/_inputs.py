"""Positions, sequence boundaries and the attention mask of a batch.

# B batch, T new tokens, S all tokens (cached ones first)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.kernels.attention import AttentionMask
from tigon.layers import Cache
from tigon.layers._check import check, on_host


@dataclass
class Inputs:
    position_ids: Tensor  # [B or 1, T]
    segment_ids: Tensor | None  # [B, T], numbered over the whole batch; None: a row is a sequence
    mask: AttentionMask


def resolve_inputs(
    batch: int,
    tokens: int,
    device: torch.device,
    *,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    longest: int | None = None,
    causal: bool = True,
    attention: str = "auto",
) -> Inputs:
    """What attention, RoPE and the loss need to know about a batch.

    Boundaries of packed sequences come from `cu_seq_lens`, whose `longest` sequence the host may
    know, or from `position_ids` that do not increase. With a cache to fill, the host may wait
    for the device to learn whether there are any. `attention` names a backend.
    """
    look, bounds = cache is not None, None
    if position_ids is not None:
        position_ids = _positions(position_ids, batch, tokens).to(device)
    if cu_seq_lens is not None:
        bounds, longest = _bounds(cu_seq_lens, longest, batch * tokens, device)
    past: int | Tensor = 0
    if cache is not None:
        past = cache.begin(batch, tokens, attention_mask=attention_mask, cu_seq_lens=cu_seq_lens)
    if isinstance(past, Tensor):  # the device knows, and the cache will mask
        if position_ids is None:
            position_ids = past[:, None] + torch.arange(tokens, device=device)
        return Inputs(position_ids, None, AttentionMask(tokens, backend=attention))
    key_mask = _key_mask(attention_mask, batch, past + tokens, device)
    starts = None
    if past == 0:
        if bounds is not None:
            starts = _starts_of(bounds, batch, tokens)
            if key_mask is not None:
                _check_padding(key_mask, starts)
        elif position_ids is not None and tokens > 1:
            starts = _restarts(position_ids, key_mask, batch)
    if starts is not None and (look or on_host(starts)) and not starts[:, 1:].any():
        starts = bounds = None
    segment_ids = None if starts is None else starts.flatten().cumsum(0).view(batch, tokens) - 1
    if position_ids is None:
        position_ids = torch.arange(past, past + tokens, device=device)[None]
        if starts is not None:
            first = torch.where(starts, position_ids, 0).cummax(1).values
            position_ids = position_ids - first
    mask = AttentionMask(
        tokens,
        past=past,
        segment_ids=segment_ids,
        key_mask=key_mask,
        causal=causal,
        cu_seq_lens=bounds,
        longest=longest,
        backend=attention,
    )
    return Inputs(position_ids, segment_ids, mask)


def _key_mask(mask: Tensor | None, batch: int, total: int, device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} is not [batch, cached + new tokens] = "
            f"[{batch}, {total}]"
        )
    if on_host(mask) and mask.all():
        return None
    return mask.to(device=device, dtype=torch.bool)


def _positions(position_ids: Tensor, batch: int, tokens: int) -> Tensor:
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    if position_ids.shape not in ((1, tokens), (batch, tokens)):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} is not [1 or {batch}, {tokens}]"
        )
    return position_ids


def _bounds(
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


def _starts_of(cu: Tensor, batch: int, tokens: int) -> Tensor:
    """First tokens of the sequences that `cu` bounds in the flattened batch: [B, T]."""
    # Repeated ends (padding of cu_seq_lens itself) fall on the extra last slot
    starts = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long(), True)[:-1].view(batch, tokens)
    values = f": {cu.tolist()}" if on_host(cu) else ""
    rows = f"two rows of {_told(tokens, 'T')}{values}"
    check(starts[:, 0].all(), f"cu_seq_lens has a sequence that spans {rows}")
    return starts


def _check_padding(key_mask: Tensor, starts: Tensor) -> None:
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


def _restarts(position_ids: Tensor, key_mask: Tensor | None, batch: int) -> Tensor:
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
