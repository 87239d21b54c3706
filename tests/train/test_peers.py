"""Fine-tuning beside transformers: same rows and masks, 50 steps in fp32.

They share no code of the forward pass, the loss and the batches with Tigon.
"""

import json
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tigon
from tests.train import watching
from tigon.train import main

STEPS, BATCH, MICRO = 50, 4, 2
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95)}
TOLERANCE = 1e-4  # relative, over 50 steps, as the project asks

Chats = list[tuple[list[int], list[int]]]  # ids and labels of each line


class Ours:
    """A run with one chat to a row, and which lines each of its steps had, from a hook."""

    def __init__(self, workspace: Any):
        self.model = workspace.model
        lines = workspace.data.read_text().splitlines()[:40]  # ten whole batches
        data = workspace.root / "peers.jsonl"
        data.write_text("\n".join(lines) + "\n")
        tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)
        self.chats: Chats = []
        for line in lines:
            ids, mask = tokenizer.encode_chat(json.loads(line)["messages"])
            labels = [i if learned else -100 for i, learned in zip(ids, mask, strict=True)]
            self.chats.append((ids, labels))
        changes = {"data": data, "packing": "false", "seed": 3, "steps": STEPS}
        changes |= {"batch_size": BATCH, "micro_batch_size": MICRO, "schedule": "constant"}
        changes |= {"lr": ADAM["lr"], "max_grad_norm": 1.0, "export": "true"}
        watching.SEEN.clear()
        main(workspace.settings("peers", **changes, hooks="tests.train.watching:keep"))
        self.steps: list[list[int]] = [[] for _ in range(STEPS)]
        for seen in watching.SEEN:
            lines = [int(origin.rpartition(":")[2]) for origin in seen.micro_batch.origins]
            self.steps[seen.step - 1] += [line - 1 for line in lines]
        watching.SEEN.clear()
        assert {len(step) for step in self.steps} == {BATCH}
        self.losses = workspace.metrics("peers", "loss")
        self.weights = tigon.from_pretrained(workspace.root / "peers/hf").state_dict()

    def assert_same(self, losses: list[float], model: torch.nn.Module, directory: Any) -> None:
        assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
        assert losses == pytest.approx(self.losses, rel=TOLERANCE)
        model.save_pretrained(directory)  # type: ignore[operator]
        theirs = tigon.from_pretrained(directory).state_dict()
        assert theirs.keys() == self.weights.keys()
        for name, weight in self.weights.items():
            error = (theirs[name] - weight).norm() / weight.norm()
            assert error <= TOLERANCE, name


@pytest.fixture(scope="module")
def ours(workspace) -> Ours:
    return Ours(workspace)


def padded(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def test_a_loop_over_transformers(ours, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(ours.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, **ADAM)
    losses = []
    for step in ours.steps:
        ids, labels = zip(*(ours.chats[i] for i in step), strict=True)
        input_ids, targets = padded(ids, 0), padded(labels, -100)
        mask = padded([[1] * len(row) for row in ids], 0)
        loss = model(input_ids=input_ids, attention_mask=mask, labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours.assert_same(losses, model, tmp_path / "hf")
