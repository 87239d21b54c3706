"""Batches as a pure function of the step: no iterator, no state to save but the step itself."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tigon.data.examples import Examples
from tigon.data.packing import Rows, targets

IGNORE = -100


class Loader:
    """The micro-batches of any step, for any rank of any world.

    Step s is batch b of epoch e, `e, b = divmod(s, steps_per_epoch)`, and takes the rows
    [b * batch_size, (b + 1) * batch_size) of that epoch's order; an epoch's last batch may be
    smaller. Micro-batch i of rank r holds the same rows as micro-batch i * world + r of one rank,
    so a run means the same on any number of ranks.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Rows,
        *,
        batch_size: int,
        micro_batch_size: int,
        packing: bool = True,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        """`batch_size` counts rows over all ranks and micro-batches; seed None keeps their order.

        Packed rows are seq_len long and carry position_ids that restart; unpacked ones are padded
        on the right to the longest of their micro-batch. Both carry cu_seq_lens, in which a row's
        padding is a sequence of its own, and an attention_mask where there is padding: attention
        goes by the bounds, but a router must know which tokens are real.
        """
        if batch_size % (micro_batch_size * world):
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of micro_batch_size "
                f"{micro_batch_size} x {world} ranks"
            )
        self.examples, self.rows, self.packing, self.seed = examples, rows, packing, seed
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

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's part of the global batch, as keyword arguments of the model.

        Every rank gets the same number: one that has run out of rows gets a row without labels.
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

    def _collate(self, rows: np.ndarray) -> dict[str, Tensor]:
        spans = [self.rows[row] for row in rows] or [np.zeros((1, 2), dtype=np.int64)]
        length = self.rows.seq_len
        if not self.packing:
            length = max(1, max(int(stop - start) for row in spans for start, stop in row))
        input_ids = np.zeros((len(spans), length), dtype=np.int64)  # padding is 0: nothing sees it
        labels = np.full_like(input_ids, IGNORE)
        position_ids = np.zeros_like(input_ids)
        attention_mask = np.zeros_like(input_ids, dtype=bool)
        bounds = {len(spans) * length}
        for r, row in enumerate(spans):
            end = 0
            bounds.add(r * length)
            for start, stop in row:
                begin, end = end, end + stop - start
                tokens = self.examples.tokens[start:stop]
                input_ids[r, begin:end] = tokens
                labels[r, begin:end] = np.where(
                    self.examples.supervised[start:stop], tokens, IGNORE
                )
                position_ids[r, begin:end] = np.arange(stop - start)
                bounds.add(r * length + begin)
            position_ids[r, end:] = np.arange(length - end)  # the padding is a sequence of its own
            attention_mask[r, :end] = True
            bounds.add(r * length + end)
        cu_seq_lens = np.array(sorted(bounds), dtype=np.int32)
        batch = {"input_ids": input_ids, "labels": labels, "cu_seq_lens": cu_seq_lens}
        if self.packing:
            batch["position_ids"] = position_ids
        if not attention_mask.all():
            batch["attention_mask"] = attention_mask
        return {name: torch.from_numpy(value) for name, value in batch.items()}
