"""Batches as a pure function of the step: no iterator, and no state to save but the step.

# B lines, T tokens of a line, n sequences
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tigon.data.examples import Examples
from tigon.data.packing import Rows, targets


@dataclass(frozen=True)
class MicroBatch:
    """Rows as tensors: what the model reads, where the sequences are, and their columns.

    Padding, behind the sequences of a line, has token 0 and columns of 0.
    """

    input_ids: Tensor  # int64 [B, T]
    position_ids: Tensor  # int64 [B, T]; they restart with each sequence, and with the padding
    attention_mask: Tensor | None  # bool [B, T], False on padding; None: there is none
    cu_seq_lens: Tensor  # int32, over the flattened batch; a line's padding is a sequence too
    longest: int  # tokens of the longest of these; attention kernels need it on the host
    spans: Tensor  # int64 [n, 2], where each sequence starts and stops in the flattened batch
    per_token: Mapping[str, Tensor]  # [B, T, ...] each
    per_example: Mapping[str, Tensor]  # [n, ...] each: those of each sequence's example
    origins: tuple[str, ...]  # n times "file:line"

    def to(self, device: torch.device) -> Self:
        def move(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: move(column) for name, column in value.items()}
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        return replace(self, **{f.name: move(getattr(self, f.name)) for f in fields(self)})

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "cu_seq_lens": self.cu_seq_lens,
            "max_length_q": self.longest,
        }


class Loader:
    """The micro-batches of any step, for any rank of any world.

    Step s is batch b of epoch e, `e, b = divmod(s, steps_per_epoch)`, and takes the rows
    [b * batch_size, (b + 1) * batch_size) of that epoch's order; an epoch's last batch may be
    smaller. Micro-batch i of rank r holds the same rows as micro-batch i * world + r of one rank,
    so a run is the same on any number of ranks.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Rows,
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        """`batch_size` counts rows over all ranks and micro-batches; seed None keeps their order.

        Packed rows are lines of seq_len tokens. Otherwise every sequence is a line, padded on the
        right to the longest of its micro-batch.
        """
        if batch_size % (micro_batch_size * world):
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of micro_batch_size "
                f"{micro_batch_size} x {world} ranks"
            )
        self.examples, self.rows, self.seed = examples, rows, seed
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.rank, self.world = rank, world
        self.steps_per_epoch = -(-len(rows) // batch_size)
        starts, stops = rows.spans[:, 0], rows.spans[:, 1]
        self.row_tokens = np.add.reduceat(stops - starts, rows.offsets[:-1])
        self.row_targets = np.add.reduceat(targets(examples, starts, stops), rows.offsets[:-1])
        self._order = lru_cache(maxsize=1)(self._epoch_order)

    def row_indices(self, step: int) -> np.ndarray:
        """The rows of the global batch of this step, in order."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's part of the global batch.

        Every rank gets the same number: one that has run out of rows gets a line of padding.
        """
        rows, size = self.row_indices(step), self.micro_batch_size
        count = -(-len(rows) // (size * self.world))
        starts = (np.arange(count) * self.world + self.rank) * size
        return [self._collate(rows[start : start + size]) for start in starts]

    def counts(self, step: int) -> tuple[int, int]:
        """Tokens and predicted tokens of the global batch."""
        rows = self.row_indices(step)
        return int(self.row_tokens[rows].sum()), int(self.row_targets[rows].sum())

    def where(self, step: int) -> list[str]:
        """The "file:line" of each example in the global batch."""
        return [
            self.examples.where(start)
            for row in self.row_indices(step)
            for start, _ in self.rows[row]
        ]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(len(self.rows))
        # Raw bits and a stable sort: numpy promises these streams, not those of permutation().
        bits = np.random.PCG64([self.seed, epoch]).random_raw(len(self.rows))
        return np.argsort(bits, kind="stable")

    def _collate(self, rows: np.ndarray) -> MicroBatch:
        lines = [self.rows[row] for row in rows]
        if self.rows.packing:
            return collate(self.examples, lines, self.rows.seq_len)
        return collate(self.examples, [span[None] for line in lines for span in line])


def collate(
    examples: Examples, lines: Sequence[np.ndarray], length: int | None = None
) -> MicroBatch:
    """One line of tensors for the spans [k, 2] of each; without lines, a line of padding.

    They are `length` tokens long, or as long as the longest needs.
    """
    lines = lines or [np.zeros((0, 2), dtype=np.int64)]
    spans = np.concatenate(lines)
    sizes = np.diff(spans)[:, 0]
    line = np.repeat(np.arange(len(lines)), [len(some) for some in lines])
    used = np.bincount(line, weights=sizes, minlength=len(lines)).astype(np.int64)
    length = max(1, int(used.max())) if length is None else length
    shape, begins = (len(lines), length), np.arange(len(lines)) * length
    stops = np.cumsum(sizes) + (begins - np.cumsum(used) + used)[line]
    cu = np.unique(np.concatenate([begins, stops - sizes, begins + used, [len(lines) * length]]))
    lengths = np.diff(cu)
    positions = np.arange(len(lines) * length) - np.repeat(cu[:-1], lengths)
    real = np.arange(length) < used[:, None]
    # Sequences follow each other in both, so that the k-th real token is the k-th of the source
    source = np.concatenate([np.arange(start, stop) for start, stop in spans] or [line])

    def place(column: np.ndarray) -> np.ndarray:
        placed = np.zeros((*shape, *column.shape[1:]), column.dtype)
        placed[real] = column[source]
        return placed

    of = examples.index(spans[:, 0])
    per_token = {name: place(column) for name, column in examples.per_token.items()}
    per_example = {name: column[of] for name, column in examples.per_example.items()}
    return MicroBatch(
        torch.from_numpy(place(examples.tokens).astype(np.int64)),
        torch.from_numpy(positions.reshape(shape)),
        None if real.all() else torch.from_numpy(real),
        torch.from_numpy(cu.astype(np.int32)),
        int(lengths.max()),
        torch.from_numpy(np.stack([stops - sizes, stops], axis=1)),
        {name: torch.from_numpy(column) for name, column in per_token.items()},
        {name: torch.from_numpy(column) for name, column in per_example.items()},
        tuple(map(examples.where, spans[:, 0])),
    )
