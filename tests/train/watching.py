"""Callbacks that tests name: they keep, or write to a file, what they are shown."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from tigon.data import MicroBatch
from tigon.train.callbacks import EvaluationContext, PassContext

SEEN: list[PassContext | EvaluationContext] = []
not_callable = 3


def keep(seen: PassContext) -> None:
    assert not torch.is_grad_enabled()
    SEEN.append(seen)


class FirstAnswers:
    """The logits of the first token of each answer."""

    def positions(self, micro_batch: MicroBatch, labels: Tensor) -> Tensor:
        before = torch.nn.functional.pad(labels, (1, 0), value=-100)[:, :-1]
        return (labels != -100) & (before == -100)

    def __call__(self, seen: PassContext) -> None:
        assert seen.at is not None and seen.logits_at is not None
        assert len(seen.at) == len(seen.logits_at)
        SEEN.append(seen)


class Evaluations:
    """The ends of evaluations, and a metric in each pass."""

    metrics = ("nll",)

    def __call__(self, seen: PassContext) -> None:
        assert "nll" in seen.metrics

    def on_evaluate(self, seen: EvaluationContext) -> None:
        assert not torch.is_grad_enabled()
        SEEN.append(seen)


def wants_accuracy(seen: PassContext) -> None:
    """Has no value for each position."""


wants_accuracy.metrics = ("accuracy",)  # type: ignore[attr-defined]


def spoil(seen: PassContext) -> None:
    """What a careless callback might do."""
    seen.predictions.zero_()
    seen.labels.fill_(7)
    for tensor in (seen.logits, seen.logits_at, *seen.metrics.values()):
        if tensor is not None:
            tensor.fill_(float("nan"))
    seen.micro_batch.input_ids.zero_()
    torch.rand(3)


def broken(seen: PassContext) -> None:
    raise KeyError("what")


def report(seen: PassContext) -> None:
    """A line for each call, in a file for each rank."""
    right = ((seen.predictions == seen.labels) & (seen.labels != -100)).sum()
    every = seen.world.all_reduce_sum(right.clone())
    row = {"step": seen.step, "training": seen.training, "index": seen.index}
    row |= {"right": int(right), "all": int(every), "origins": list(seen.micro_batch.origins)}
    with Path(f"{os.environ['REPORT']}-{seen.world.rank}").open("a") as file:
        file.write(json.dumps(row) + "\n")
