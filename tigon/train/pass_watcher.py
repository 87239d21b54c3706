"""What watches the passes of a step or an evaluation: hooks, the predictions file, named data sets.

# B lines, T tokens of a line, n sequences, S named data sets
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from tigon.data import Entry, MicroBatch, Mixture
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.train.build import TrainingRun
from tigon.train.callbacks import HookRequest, PassOutput, PredictionsWriter
from tigon.train.distributed import World
from tigon.train.tasks import MicroBatchLoss, StepInputs


class NamedSets:
    """Measures loss and accuracy of each named data set in the evaluation's one pass over all.

    A packed row may hold sequences of several sets; each position counts for its own.
    """

    def __init__(self, names: Sequence[str], set_of_part: Tensor, *, by_sequence: bool):
        """`set_of_part` int64: the index in `names` of each part of the corpus, -1 for none.
        `by_sequence`: each sequence weighs the same in the loss, not each token."""
        self.names, self.set_of_part, self.by_sequence = names, set_of_part, by_sequence
        # [S, 4]: loss, its denominator, right predictions, targets
        self.sums = torch.zeros(len(names), 4, dtype=torch.double, device=set_of_part.device)

    @classmethod
    def from_run(cls, run: TrainingRun) -> Self | None:
        """Returns the named sets of the run's held-out data; None if no entry has a name."""
        entries = [e for e in run.config.eval_data if isinstance(e, Entry)]
        names = [e.name for e in entries if e.name is not None]
        if not names or run.eval_data is None:
            return None
        assert isinstance(run.eval_data.windows, Mixture)
        set_of_entry = [
            names.index(e.name) if isinstance(e, Entry) and e.name is not None else -1
            for e in run.config.eval_data
        ]
        set_of_part = torch.tensor([set_of_entry[i] for i in run.eval_data.windows.entry_of_part])
        by_sequence = run.config.loss_reduction == "sequence"
        return cls(names, set_of_part.to(run.world.device), by_sequence=by_sequence)

    def add(self, output: PassOutput, micro_batch: MicroBatch) -> None:
        """Adds this rank's next micro-batch."""
        if not len(micro_batch.spans):
            return  # nothing but padding
        assert output.losses is not None
        labels, starts = output.labels.flatten(), micro_batch.spans[:, 0].contiguous()
        positions = torch.arange(len(labels), device=labels.device)
        sequence = torch.searchsorted(starts, positions, right=True) - 1  # [B T]
        targets = labels != IGNORE_INDEX
        right = targets & (output.predictions.flatten() == labels)
        sets = self.set_of_part[micro_batch.parts]  # [n]
        counts = torch.zeros_like(sets).index_add(0, sequence, targets.long())
        indices = torch.arange(len(self.names), device=labels.device)[:, None]
        in_set = sets[sequence] == indices  # [S, B T]
        columns = [
            torch.where(in_set, output.losses.flatten(), 0).sum(1, dtype=torch.double),
            (in_set & targets).sum(1),
            (in_set & right).sum(1),
            (in_set & targets).sum(1),
        ]
        if self.by_sequence:
            columns[1] = ((sets == indices) & (counts > 0)).sum(1)
        self.sums += torch.stack([x.double() for x in columns], 1)

    def metrics_to_log(self, world: World) -> dict[str, Tensor]:
        """Returns loss/NAME and accuracy/NAME over the micro-batches of all ranks."""
        loss, items, right, targets = world.all_reduce_sum(self.sums).unbind(1)
        metrics = {"loss": loss / items, "accuracy": right / targets}
        return {
            f"{key}/{name}": values[i]
            for i, name in enumerate(self.names)
            for key, values in metrics.items()
        }


class PassWatcher:
    """Shows each pass of a step or evaluation to the hooks that are due, the predictions file and
    the named data sets."""

    def __init__(
        self,
        run: TrainingRun,
        step: int,  # as in metrics.jsonl
        *,
        training: bool,
        file: PredictionsWriter | None = None,
        sets: NamedSets | None = None,
    ):
        self.run, self.file, self.sets = run, file, sets
        self.hooks = run.task.hooks if run.task.hooks.is_due(step, training=training) else None
        self.context = {"step": step, "training": training}

    def add_request(self, inputs: StepInputs) -> StepInputs:
        """Returns the inputs of a pass with what its watchers need; unchanged without any."""
        if not (self.hooks or self.file or self.sets):
            return inputs
        targets, request = inputs.targets, HookRequest()
        if self.hooks is not None:
            assert targets.labels is not None
            labels = targets.scatter_to_positions(targets.labels, IGNORE_INDEX)
            request = self.hooks.request(inputs.micro_batch, labels)
        return replace(inputs, request=replace(request, losses=self.sets is not None))

    def notify(self, result: MicroBatchLoss, index: int, inputs: StepInputs) -> MicroBatchLoss:
        """Shows the pass to its watchers; returns the result without the pass's output."""
        if result.output is None:
            return result
        micro_batch = inputs.micro_batch
        if self.file is not None:  # first: a hook may change what it is shown
            self.file.write(result.output, micro_batch)
        if self.sets is not None:
            self.sets.add(result.output, micro_batch)
        if self.hooks is not None:
            assert inputs.request is not None
            self.hooks.call(
                result.output,
                inputs.request,
                index=index,
                micro_batch=micro_batch,
                tokenizer=self.run.tokenizer,
                world=self.run.world,
                **self.context,
            )
        return replace(result, output=None)
