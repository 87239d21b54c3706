"""A new objective is one file: this one, through the command line as it is.

Pairs of a chosen and a rejected answer, as in DPO: log-probabilities of a reference per token, a
weight per example, and a denominator of its own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tests.support.small import chats
from tests.train.ranks import Ranks
from tigon.data import Encoder, Example, Format
from tigon.models import CausalLM, Targets
from tigon.settings.data import TASK_ROWS
from tigon.tokenizer import Tokenizer
from tigon.train import main
from tigon.train.tasks import TASKS, MicroBatchLoss, StepInputs, Task

BETA = 0.5


class PairEncoder(Encoder):
    per_token = {"supervised": bool, "reference": np.float32}
    per_example = {"weight": np.float32}

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def digest(self) -> str:
        return self.tokenizer.digest()

    def row(self, row: dict[str, Any], form: Format) -> list[Example]:
        first = self.tokenizer.encode(row["prompt"])

        def example(answer: str) -> Example:
            ids = self.tokenizer.encode(row["prompt"] + answer)
            supervised = [i >= len(first) for i in range(len(ids))]
            reference = [-float(i % 7) for i in range(len(ids))]
            columns = {"supervised": supervised, "reference": reference}
            return Example(ids, columns, {"weight": row["weight"]})

        return [example(row["chosen"]), example(row["rejected"])]


class Pairs(Task):
    unit = "pair"

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return PairEncoder(tokenizer)

    def weights(self, inputs: StepInputs) -> Tensor:
        return inputs.micro_batch.per_example["weight"].unflatten(0, (-1, 2))[:, 0]

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        weights = self.weights(inputs)
        return {"weights": weights.sum(), "pairs": torch.tensor(len(weights))}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        micro_batch = inputs.micro_batch
        targets = Targets.of(inputs.batch, loss_reduction="none", **self.targets(micro_batch))
        nll = model(batch=inputs.batch, targets=targets).loss
        learned = micro_batch.per_token["supervised"] & (micro_batch.position_ids > 0)
        reference = micro_batch.per_token["reference"] * learned
        before = F.pad((-nll - reference).flatten().double().cumsum(0), (1, 0))
        starts, stops = micro_batch.spans.unbind(1)
        chosen, rejected = (before[stops] - before[starts]).unflatten(0, (-1, 2)).unbind(1)
        margins = BETA * (chosen - rejected)
        loss = -(F.logsigmoid(margins) * self.weights(inputs)).sum() / sums["weights"]
        right = (margins.detach() > 0).sum() / sums["pairs"]
        return MicroBatchLoss(
            loss, {"accuracy": right, "margin": margins.detach().sum() / sums["pairs"]}
        )

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        return metrics | {"reward": 2 * metrics["margin"]}


def run_pairs(settings: list[str]) -> None:
    TASKS["pairs"], TASK_ROWS["pairs"] = Pairs, "pairs"
    main(settings)


@pytest.fixture
def settings(workspace, tmp_path, monkeypatch):
    """21 pairs of uneven lengths and weights, and some held out."""
    monkeypatch.setitem(TASKS, "pairs", Pairs)
    monkeypatch.setitem(TASK_ROWS, "pairs", "rows of its own")

    def write(name: str, count: int, seed: int) -> Path:
        answers = [c[1]["content"] for c in chats(2 * count, seed)]
        rows = [
            {"prompt": c[0]["content"] + ":", "chosen": a, "rejected": b, "weight": 0.5 + i % 3}
            for i, (c, a, b) in enumerate(
                zip(chats(count, seed + 1), answers[::2], answers[1::2], strict=True)
            )
        ]
        path = workspace.root / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    data, held_out = write("pairs.jsonl", 21, 5), write("held-out-pairs.jsonl", 5, 9)

    def make(run: str, **changes) -> list[str]:
        same = {"task": "pairs", "data": data, "eval_data": held_out, "steps": 4, "eval_every": 2}
        return workspace.settings(run, **same | changes)

    return make


def reference_loss(workspace, file: str) -> tuple[float, float]:
    """Loss and accuracy of the untrained model, a sequence at a time."""
    model = tigon.from_pretrained(workspace.model)
    tokenizer = Tokenizer.from_pretrained(workspace.model)
    losses, right, weights = 0.0, 0, 0.0
    rows = [json.loads(line) for line in (workspace.root / file).read_text().splitlines()]
    for row in rows:
        first, scores = len(tokenizer.encode(row["prompt"])), []
        for answer in (row["chosen"], row["rejected"]):
            ids = torch.tensor(tokenizer.encode(row["prompt"] + answer))
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
            score = sum(logprobs[t - 1, ids[t]].item() + t % 7 for t in range(first, len(ids)))
            scores.append(BETA * score)
        losses += row["weight"] * np.logaddexp(0, scores[1] - scores[0])
        weights += row["weight"]
        right += scores[0] > scores[1]
    return losses / weights, right / len(rows)


KEYS = ("loss", "grad_norm", "accuracy", "margin", "reward", "eval_loss", "eval_accuracy")


def test_a_new_objective_trains_evaluates_and_resumes(workspace, settings):
    main(settings("pairs", save_every=2))
    held_out, accuracy = reference_loss(workspace, "held-out-pairs.jsonl")
    assert workspace.metrics("pairs", "eval_loss")[0] == pytest.approx(held_out, rel=1e-5)
    assert workspace.metrics("pairs", "eval_accuracy")[0] == pytest.approx(accuracy)
    assert workspace.metrics("pairs", "eval_loss")[-1] < held_out
    source = workspace.checkpoint("pairs", 2)
    main(settings("pairs-resumed", resume=source))
    printed = Ranks(2, run_pairs, settings("pairs-two")).finish()
    assert "data: 21 pairs" in printed
    for key in KEYS:
        curve = workspace.metrics("pairs", key)
        assert len(curve) == (3 if key.startswith("eval") else 4)
        resumed, two = (workspace.metrics(f"pairs-{run}", key) for run in ("resumed", "two"))
        assert len(resumed) == 2  # another run_dir has no evaluation of its first step yet
        assert resumed == curve[-len(resumed) :], key
        assert two == pytest.approx(curve, rel=1e-5), key
