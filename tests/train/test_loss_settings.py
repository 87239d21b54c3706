"""The settings of the loss against its definition in plain torch, in training and evaluation."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.train.focal import Focal
from tests.train.weights import token_weights, write_weighted
from tigon.settings.data import TASK_ROWS
from tigon.train import load, main, prepare, start, train
from tigon.train.tasks import TASKS


def chats_of(workspace, path) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each line: ids, and of each target its mask and weight."""
    tokenizer, found = tigon.Tokenizer.from_pretrained(workspace.model), []
    for line, text in enumerate(path.read_text().splitlines(), 1):
        ids, mask = tokenizer.encode_chat(json.loads(text)["messages"])
        weights = torch.from_numpy(token_weights(line, mask))
        found.append((torch.tensor(ids), torch.tensor(mask)[1:], weights[1:]))
    return found


def expected(
    model,
    chats,
    *,
    loss_reduction: str = "token",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_to_keep: int = 0,
    weighted: bool = True,
) -> dict[str, float]:
    """Loss, accuracy and entropy of chats one by one, without padding, in float64."""
    sums, counts, right, entropy = [], [], 0, 0.0
    for ids, mask, weights in chats:
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].double()
        if logits_to_keep:  # of the last k positions, the last one predicts nothing
            mask = mask & (torch.arange(len(mask)) >= len(ids) - logits_to_keep)
        logp = logits.log_softmax(-1)
        nll = -logp[torch.arange(len(logp)), ids[1:]]
        losses = (1 - label_smoothing) * nll - label_smoothing * logp.mean(-1)
        losses = losses + z_loss * logits.logsumexp(-1) ** 2
        if weighted:
            losses, mask = losses * weights, mask & (weights > 0)
        sums.append(losses[mask].sum().item())
        counts.append(int(mask.sum()))
        right += int((logits.argmax(-1) == ids[1:])[mask].sum())
        entropy -= (logp.exp() * logp).sum(-1)[mask].sum().item()
    if loss_reduction == "token":
        loss = sum(sums) / sum(counts)
    else:
        means = [x / n for x, n in zip(sums, counts, strict=True) if n]
        loss = sum(means) / len(means)
    total = sum(counts)
    return {"loss": loss, "accuracy": right / total, "entropy": entropy / total}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "as in training": ({"label_smoothing": 0.1, "z_loss": 1e-3}, {}),
    "apart": (
        {"label_smoothing": 0.1, "z_loss": 1e-3, "logits_bytes": 16 * 321 * 5},
        {"label_smoothing": 0.0, "z_loss": 0.0, "logits_bytes": 16 * 321 * 3},
    ),
    "kept": ({"logits_to_keep": 5, "label_smoothing": 0.1}, {"z_loss": 0.01}),
    "kept in training": ({"logits_to_keep": 5}, {"logits_to_keep": 0}),
}


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize(("training", "evaluation"), CASES.values(), ids=CASES)
def test_values(workspace, reduction, training, evaluation):
    data, held_out = map(write_weighted, (workspace.data, workspace.held_out))
    name = f"loss-{reduction}-{len(training)}-{len(evaluation)}-{'z_loss' in evaluation}"
    changes = {"data": data, "steps": 1, "batch_size": 64, "micro_batch_size": 4}
    changes |= {"loss_reduction": reduction, "eval_every": 1, "eval_data": held_out}
    changes |= training | {f"eval_{key}": value for key, value in evaluation.items()}
    main(workspace.settings(name, **changes, packing="logits_to_keep" not in training))
    model = tigon.from_pretrained(workspace.model)
    for prefix, data, settings in (
        ("", workspace.data, training),
        ("eval_", workspace.held_out, training | evaluation),
    ):
        settings = {k: v for k, v in settings.items() if k != "logits_bytes"}
        wanted = expected(model, chats_of(workspace, data), loss_reduction=reduction, **settings)
        for key in ("loss", "accuracy"):
            found = workspace.metrics(name, prefix + key)[0]
            assert found == pytest.approx(wanted[key], rel=1e-5), prefix + key


def test_metrics_in_training_and_evaluation_apart(workspace):
    changes = {"steps": 1, "batch_size": 64, "eval_every": 1, "eval_data": workspace.held_out}
    main(workspace.settings("apart", **changes, metrics="[nll, accuracy]", eval_metrics="entropy"))
    rows = (workspace.root / "apart/metrics.jsonl").read_text().splitlines()
    evaluated, stepped = json.loads(rows[0]), json.loads(rows[1])
    assert stepped["nll"] == pytest.approx(stepped["loss"], rel=1e-6)
    assert "entropy" not in stepped and "eval_nll" not in evaluated
    model = tigon.from_pretrained(workspace.model)
    held_out = chats_of(workspace, workspace.held_out)
    wanted = expected(model, held_out, weighted=False)
    for key, value in wanted.items():
        assert evaluated[f"eval_{key}"] == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_loss_of_log_probabilities(workspace, monkeypatch, reduction):
    monkeypatch.setitem(TASKS, "focal", Focal)
    monkeypatch.setitem(TASK_ROWS, "focal", "rows of its own")
    model, means, losses = tigon.from_pretrained(workspace.model), [], []
    for ids, mask, _ in chats_of(workspace, workspace.data):
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        nll = -logp[torch.arange(len(logp)), ids[1:]][mask]
        losses += ((1 - (-nll).exp()) ** 2 * nll).tolist()
        means.append(sum(losses[-len(nll) :]) / len(nll))
    changes = {"task": "focal", "steps": 1, "batch_size": 64, "micro_batch_size": 4, "lr": 0}
    changes |= {"eval_data": workspace.data, "loss_reduction": reduction}
    main(workspace.settings(f"focal-{reduction}", **changes))
    wanted = losses if reduction == "token" else means
    for key in ("loss", "eval_loss"):
        (found, *_) = workspace.metrics(f"focal-{reduction}", key)
        assert found == pytest.approx(sum(wanted) / len(wanted), rel=1e-5), key


def test_training_does_not_read_model_defaults(workspace):
    changes = {"steps": 1, "batch_size": 64, "packing": "false", "eval_data": workspace.held_out}
    defaults = {"logits_to_keep": 5, "loss_reduction": "sum", "metrics": ("nll",)}
    for name, values in (("no-defaults", {}), ("defaults", defaults)):
        with start("cpu") as world:
            run = prepare(load(None, workspace.settings(name, **changes)), world)
            vars(run.model.defaults).update(values)
            train(run)
    for key in ("loss", "eval_loss", "accuracy"):
        assert workspace.metrics("defaults", key) == workspace.metrics("no-defaults", key), key
    assert not workspace.metrics("defaults", "nll")
