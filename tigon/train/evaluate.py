"""The held-out data, as one step of training would have it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tigon.train.build import Run
from tigon.train.distributed import reshard
from tigon.train.named_sets import NamedSets
from tigon.train.objectives import Inputs, Part
from tigon.train.predictions import Predictions
from tigon.train.samples import generate
from tigon.train.step import numbers, summed, total
from tigon.train.watch import Watch


class Interrupted(Exception):
    """By a signal: the evaluation is made when the run goes on."""


def sample(run: Run) -> list[dict[str, str]]:
    """Rows of samples.jsonl, on every rank."""
    if not run.prompts:
        return []
    return generate(run.model, run.prompts, run.tokenizer, run.config.sample_tokens, run.world)


@torch.no_grad()
def evaluate(run: Run, step: int) -> dict[str, Any] | None:
    """The row of metrics.jsonl: the loss of the held-out data as one step of training would have
    it, and what else is logged; None without any.

    Every rank runs as many forward passes as the others. Raises Interrupted on all ranks once one
    of them keeps a signal for the loop.
    """
    if run.eval_data is None:
        return None
    config, world, model, objective = run.config, run.world, run.model, run.objective
    data = run.eval_data
    began = time.perf_counter()

    def batches() -> Iterator[Inputs]:
        for i in range(data.steps_per_epoch or 0):
            for rows in data.micro_batches(i):
                if world.all_reduce_max_int(world.signals.received):
                    raise Interrupted
                yield objective.resolve(model, rows.to(world.device), training=False)

    def part(index: int, inputs: Inputs) -> Part:
        inputs = watch.ask(inputs)
        return watch.show(objective.evaluate(model, inputs, sums), index, inputs)

    model.eval()
    sums = total(world, [objective.sums(model, inputs) for inputs in batches()])
    with ExitStack() as stack:
        file = None
        if config.predictions:
            file = Predictions(Path(config.run_dir), step, run.tokenizer, world)
            stack.enter_context(file)
        sets = NamedSets.of(run)
        watch = Watch(run, step, training=False, file=file, sets=sets)
        parts = [part(i, inputs) for i, inputs in enumerate(batches())]
    model.train()
    reshard(model)
    found = summed(run, parts) | ({} if sets is None else sets.logged(world))
    values = {f"eval_{name}": value for name, value in numbers(found).items()}
    tokens, seconds = data.targets, time.perf_counter() - began
    return {"step": step, **values, "eval_tokens": tokens, "seconds": seconds}
