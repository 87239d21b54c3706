"""What an evaluation measures of each held-out data set that has a name, in its one pass over all.

# B lines, T tokens of a line, n sequences, S named data sets
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tigon.data import Entry, MicroBatch, Mixture
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.train.build import Run
from tigon.train.distributed import World
from tigon.train.hooks import View


class NamedSets:
    """Loss and accuracy of each, with the weights and the reduction of the whole.

    A packed row may hold sequences of several; each position counts for its own.
    """

    def __init__(self, names: Sequence[str], of_part: Tensor, *, by_sequence: bool):
        """`of_part` int64: which of the names each part of the corpus has, -1 for none.
        `by_sequence`: each sequence weighs the same in the loss, not each token."""
        self.names, self.of_part, self.by_sequence = names, of_part, by_sequence
        # [S, 4]: the loss, what it is divided by, right predictions, targets
        self.sums = torch.zeros(len(names), 4, dtype=torch.double, device=of_part.device)

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """Of the run's held-out data; None if no entry of it has a name."""
        entries = [e for e in run.config.eval_data if isinstance(e, Entry)]
        names = [e.name for e in entries if e.name is not None]
        if not names or run.eval_data is None:
            return None
        assert isinstance(run.eval_data.windows, Mixture)
        of_entry = [
            names.index(e.name) if isinstance(e, Entry) and e.name is not None else -1
            for e in run.config.eval_data
        ]
        of_part = torch.tensor([of_entry[i] for i in run.eval_data.windows.entry_of_part])
        by_sequence = run.config.loss_reduction == "sequence"
        return cls(names, of_part.to(run.world.device), by_sequence=by_sequence)

    def add(self, view: View, micro_batch: MicroBatch) -> None:
        """This rank's next micro-batch."""
        if not len(micro_batch.spans):
            return  # nothing but padding
        assert view.losses is not None
        labels, starts = view.labels.flatten(), micro_batch.spans[:, 0].contiguous()
        positions = torch.arange(len(labels), device=labels.device)
        sequence = torch.searchsorted(starts, positions, right=True) - 1  # [B T]
        targets = labels != IGNORE_INDEX
        right = targets & (view.predictions.flatten() == labels)
        sets = self.of_part[micro_batch.parts]  # [n]
        counts = torch.zeros_like(sets).index_add(0, sequence, targets.long())
        numbers = torch.arange(len(self.names), device=labels.device)[:, None]
        mine = sets[sequence] == numbers  # [S, B T]
        of_each = [
            torch.where(mine, view.losses.flatten(), 0).sum(1, dtype=torch.double),
            (mine & targets).sum(1),
            (mine & right).sum(1),
            (mine & targets).sum(1),
        ]
        if self.by_sequence:
            of_each[1] = ((sets == numbers) & (counts > 0)).sum(1)
        self.sums += torch.stack([x.double() for x in of_each], 1)

    def logged(self, world: World) -> dict[str, Tensor]:
        """loss/NAME and accuracy/NAME of the micro-batches of all ranks."""
        loss, items, right, targets = world.all_reduce_sum(self.sums).unbind(1)
        found = {"loss": loss / items, "accuracy": right / targets}
        return {
            f"{key}/{name}": values[i]
            for i, name in enumerate(self.names)
            for key, values in found.items()
        }
