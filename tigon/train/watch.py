"""Who watches the passes of a step or of an evaluation, and what they are shown."""

from dataclasses import replace

from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.train.build import Run
from tigon.train.hooks import Wanted
from tigon.train.named_sets import NamedSets
from tigon.train.objectives import Inputs, Part
from tigon.train.predictions import Predictions


class Watch:
    """The hooks that are due in one step or evaluation, its file of predictions and its named
    data sets, if any."""

    def __init__(
        self,
        run: Run,
        step: int,  # as in metrics.jsonl
        *,
        training: bool,
        file: Predictions | None = None,
        sets: NamedSets | None = None,
    ):
        self.run, self.file, self.sets = run, file, sets
        self.hooks = run.objective.hooks.due(step, training=training)
        self.facts = {"step": step, "training": training}

    def ask(self, inputs: Inputs) -> Inputs:
        """The inputs of a pass with what they want of it."""
        if not (self.hooks or self.file or self.sets):
            return inputs
        targets, wanted = inputs.targets, Wanted()
        if self.hooks:
            assert targets.labels is not None
            labels = targets.place(targets.labels, IGNORE_INDEX)
            wanted = self.run.objective.hooks.wanted(inputs.micro_batch, labels)
        return replace(inputs, wanted=replace(wanted, losses=self.sets is not None))

    def show(self, part: Part, index: int, inputs: Inputs) -> Part:
        """Call them with the view of the pass that `ask` gave the inputs; the part without it."""
        if part.view is None:
            return part
        micro_batch = inputs.micro_batch
        if self.file is not None:  # first: a hook may change what it is shown
            self.file.write(part.view, micro_batch)
        if self.sets is not None:
            self.sets.add(part.view, micro_batch)
        if self.hooks:
            assert inputs.wanted is not None
            self.run.objective.hooks.show(
                part.view,
                inputs.wanted,
                index=index,
                micro_batch=micro_batch,
                tokenizer=self.run.tokenizer,
                world=self.run.world,
                **self.facts,
            )
        return replace(part, view=None)
