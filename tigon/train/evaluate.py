"""The held-out data, as one step of training would have it."""

import time
from collections.abc import Iterator

import torch

from tigon.train.build import Run
from tigon.train.objectives import Inputs
from tigon.train.parallel import reshard
from tigon.train.record import Record
from tigon.train.step import numbers, summed, total


class Interrupted(Exception):
    """By a signal: the evaluation is made when the run goes on."""


@torch.no_grad()
def evaluate(run: Run, step: int, record: Record) -> float | None:
    """The loss of the held-out data as one step of training would have it; None without any.

    Every rank runs as many forward passes as the others. Raises Interrupted on all ranks once one
    of them keeps a signal for the loop.
    """
    if run.eval_data is None:
        return None
    world, model, objective, data = run.world, run.model, run.objective, run.eval_data
    began = time.perf_counter()

    def batches() -> Iterator[Inputs]:
        for i in range(data.steps_per_epoch):
            for rows in data.micro_batches(i):
                if world.most(world.signals.received):
                    raise Interrupted
                yield objective.resolve(model, rows.to(world.device))

    model.eval()
    sums = total(world, [objective.sums(model, batch) for batch in batches()])
    parts = [objective.evaluate(model, batch, sums) for batch in batches()]
    model.train()
    reshard(model)
    values = {f"eval_{name}": value for name, value in numbers(summed(run, parts)).items()}
    tokens, seconds = int(data.row_targets.sum()), time.perf_counter() - began
    record.evaluation({"step": step, **values, "eval_tokens": tokens, "seconds": seconds})
    return values["eval_loss"]
