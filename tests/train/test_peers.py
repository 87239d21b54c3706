"""Fine-tuning beside a loop over transformers: same rows and masks, 50 steps in fp32.

They share no code of the forward pass, the loss and the batches with Tigon.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tigon
from tests.support.numbers import relative_error
from tests.train import watching
from tests.train.test_loop import batch_of
from tigon.train import main

STEPS, BATCH = 50, 4
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95)}
TOLERANCE = 1e-4  # relative, over 50 steps, as the project asks


def padded(rows: list[Tensor], fill: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def test_a_loop_over_transformers(workspace, tmp_path):
    """Of one chat to a row; a hook says which lines each step of the run had."""
    lines = workspace.data.read_text().splitlines(keepends=True)[:40]  # ten whole batches
    (data := tmp_path / "peers.jsonl").write_text("".join(lines))
    chats = list(batch_of(tigon.Tokenizer.from_pretrained(workspace.model), data))
    changes = {"data": data, "packing": "false", "seed": 3, "steps": STEPS, "lr": ADAM["lr"]}
    changes |= {"batch_size": BATCH, "micro_batch_size": 2, "schedule": "constant"}
    changes |= {"max_grad_norm": 1.0, "export": "true", "hooks": "tests.train.watching:keep"}
    watching.SEEN.clear()
    main(workspace.settings("peers", **changes))
    steps: list[list[int]] = [[] for _ in range(STEPS)]
    for seen in watching.SEEN:
        origins = seen.micro_batch.origins
        steps[seen.step - 1] += [int(origin.rpartition(":")[2]) - 1 for origin in origins]
    watching.SEEN.clear()
    assert {len(step) for step in steps} == {BATCH}
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, **ADAM)
    losses = []
    for step in steps:
        ids, labels = zip(*(chats[i] for i in step), strict=True)
        mask = padded([torch.ones_like(row) for row in ids], 0)
        batch = {"input_ids": padded(ids, 0), "labels": padded(labels, -100)}
        loss = model(**batch, attention_mask=mask).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert workspace.metrics("peers", "loss") == pytest.approx(losses, rel=TOLERANCE)
    model.save_pretrained(tmp_path / "hf")
    found, expected = (
        tigon.from_pretrained(path).state_dict()
        for path in (workspace.root / "peers/hf", tmp_path / "hf")
    )
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert relative_error(found[name], weight) <= TOLERANCE, name
