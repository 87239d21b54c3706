"""A table of calls, and what each returns: losses, gradients, metrics and logits in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.contract import V, assert_same_gradients, gradients, tokens
from tigon.kernels import KL, CrossEntropy, Head, LogProbs
from tigon.kernels.loss.logits import METRICS
from tigon.models import CausalLM

B, T = 2, 13
IDS, LABELS = tokens(B, T)
LABELS[0, 9:], LABELS[0, 0] = -100, 5  # the first label is nobody's target
WEIGHTS, CLASS_WEIGHTS = torch.rand(B, T), torch.rand(V) + 0.5
BOOL = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]).bool()
ALL = [[*range(T)]] * B
# Arguments of the batch, and the sequence of each token
BATCHES: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "rows": ({}, [[0] * T, [1] * T]),
    "padded": ({"attention_mask": torch.tensor([[1] * 9 + [0] * 4, [1] * T])}, [[0] * T, [1] * T]),
    "packed": (
        {"position_ids": torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])},
        [[0] * 5 + [1] * 8, [2] * 9 + [3] * 4],
    ),
}
# logits_to_keep, and the positions of each row that it names
KEEPS: dict[str, tuple[Any, list[list[int]]]] = {
    "0": (0, ALL),
    "1": (1, [[12]] * 2),
    "last 4": (4, [[9, 10, 11, 12]] * 2),
    "more than T": (T + 7, ALL),
    "index": (torch.tensor([5, 0, 11, -1, 3]), [[5, 0, 11, 12, 3]] * 2),
    "uint8 index": (torch.tensor([2, 9, 12], dtype=torch.uint8), [[2, 9, 12]] * 2),
    "bool": (BOOL, [[1, 4, 5, 8, 11, 12]] * 2),
    "per row": (torch.tensor([[1, 8, 3], [0, 12, 6]]), [[1, 8, 3], [0, 12, 6]]),
    "int8 per row": (torch.tensor([[-1, 2], [-13, -5]], dtype=torch.int8), [[12, 2], [0, 8]]),
}
TEACHER = torch.randn(B, T, V)
LOGP = TEACHER.double().log_softmax(-1)
BEST = LOGP.topk(20, dim=-1)
Terms = Callable[[Tensor, Tensor], Tensor]  # of logits [B, T, V] and targets [B, T]


def cross_entropy(z: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    flat = z.flatten(0, 1), targets.flatten()
    return F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing).view(B, T)


def with_options(z: Tensor, targets: Tensor) -> Tensor:
    values = cross_entropy(z, targets, 0.2) + 0.03 * z.logsumexp(-1).square()
    return values * CLASS_WEIGHTS[targets.clamp(min=0)]


def divergence(z: Tensor, targets: Tensor) -> Tensor:
    return (LOGP.exp() * (LOGP - z.log_softmax(-1))).sum(-1)


def divergence_of_stored(z: Tensor, targets: Tensor) -> Tensor:
    """All tokens that were not stored are one outcome."""
    pair = BEST.values, z.log_softmax(-1).gather(-1, BEST.indices)
    p, q = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in pair)
    return (p.exp() * (p - q)).sum(-1)


LIVE = KL(teacher_hidden=TEACHER, teacher=Head(torch.eye(V)), coefficient=0.7)
STORED = KL(teacher_tokens=BEST.indices, teacher_logprobs=BEST.values.float())
# Arguments of the loss, and its terms
CALLS: dict[str, tuple[dict[str, Any], Terms]] = {
    "cross-entropy": ({}, cross_entropy),
    "options": (
        {"label_smoothing": 0.2, "z_loss": 0.03, "class_weights": CLASS_WEIGHTS},
        with_options,
    ),
    "distillation": (
        {"criteria": (CrossEntropy(coefficient=0.3), LIVE)},
        lambda z, targets: 0.3 * cross_entropy(z, targets) + 0.7 * divergence(z, targets),
    ),
    "stored": ({"criteria": (STORED,)}, divergence_of_stored),
}


def shift(x: Tensor, sequences: list[list[int]], fill: float) -> Tensor:
    """x [B, T] moved left within each sequence, by a loop."""
    out = torch.full_like(x, fill)
    for b, row in enumerate(sequences):
        for i in range(T - 1):
            if row[i] == row[i + 1]:
                out[b, i] = x[b, i + 1]
    return out


def pick(x: Tensor, rows: list[list[int]]) -> Tensor:
    return torch.stack([x[b, row] for b, row in enumerate(rows)])


def reduce(
    values: Tensor, valid: Tensor, sequences: Tensor, reduction: str
) -> tuple[Tensor, int]:  # of kept positions [B, n]
    """The reductions' definitions, and the number of items."""
    if reduction == "none":
        return values * valid, int(valid.sum())
    groups = [values[valid]]
    if reduction == "sequence":
        groups = [values[valid & (sequences == s)] for s in sequences.unique()]
    groups = [group for group in groups if len(group)]
    items = len(groups) if reduction == "sequence" else int(valid.sum())
    total = sum(
        (x.mean() if reduction == "sequence" else x.sum() for x in groups), values.sum() * 0
    )
    return (total if reduction == "sum" else total / max(items, 1)), items


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum", "none"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("batch", "keep"),
    [
        *((batch, keep) for batch in BATCHES for keep in ("0", "per row")),
        *(("packed", k) for k in KEEPS),
    ],
)
def test_call_returns_what_the_table_says(
    model: CausalLM, batch: str, keep: str, call: str, reduction: str
) -> None:
    inputs, of_token = BATCHES[batch]
    options, terms = CALLS[call]
    kept, rows = KEEPS[keep]
    z = model(IDS, **inputs).logits.double()
    targets = shift(LABELS, of_token, -100)
    weights = WEIGHTS.clone().requires_grad_()
    values = terms(z, targets) * shift(weights, of_token, 0.0)
    valid, sequences = pick(targets != -100, rows), pick(torch.tensor(of_token), rows)
    expected, items = reduce(pick(values, rows), valid, sequences, reduction)

    given: dict[str, Any] = {"labels": LABELS, "loss_weights": weights, "logits_to_keep": kept}
    given |= {**inputs, **options, "loss_reduction": reduction}
    assert model.num_items(**given) == items
    shifted = {"labels": None, "shift_labels": targets, "loss_weights": shift(WEIGHTS, of_token, 0)}
    loss = model(IDS, **{**given, **shifted}).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for more in ({}, {"return_logits": True}):
        out = model(IDS, **given, **more)
        assert out.loss.dtype == torch.float32 and (out.logits is not None) == bool(more)
        torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-5)
        if expected.any():
            truth = gradients(expected.sum(), model, retain_graph=True)
            assert_same_gradients(gradients(out.loss.sum(), model, retain_graph=True), truth)
            found, truth = (
                torch.autograd.grad(x.sum(), weights, retain_graph=True)[0]
                for x in (out.loss, expected)
            )
            torch.testing.assert_close(found, truth)
    torch.testing.assert_close(out.logits.double(), pick(z, rows), rtol=1e-5, atol=1e-5)
    if reduction in ("token", "sequence"):
        for n in (7, torch.tensor(7.0), torch.tensor([7])):
            loss = model(IDS, **given, num_items_in_batch=n).loss
            torch.testing.assert_close(loss.double(), expected * items / 7, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("labeled", [True, False])
@pytest.mark.parametrize("return_logits", [None, True])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("batch", BATCHES)
def test_metrics_are_those_of_the_full_logits(
    model: CausalLM, batch: str, keep: str, return_logits: bool | None, labeled: bool
) -> None:
    """Without labels they are of all real positions, and replace the logits."""
    inputs, of_token = BATCHES[batch]
    kept, rows = KEEPS[keep]
    given = {**inputs, "logits_to_keep": kept}
    full = model(IDS, **inputs).logits
    z = pick(full, rows).double()
    targets = pick(shift(LABELS, of_token, -100), rows)
    real = pick(inputs.get("attention_mask", torch.ones(B, T)).bool(), rows)
    valid = targets != -100 if labeled else real
    p = z.softmax(-1)
    best, logp = z.argmax(-1), p.gather(-1, targets.clamp(min=0)[..., None])[..., 0].log()
    expected = {
        "entropy": -(p * p.log()).sum(-1) * valid,
        "max_logit": z.amax(-1) * valid,
        "z": z.logsumexp(-1) * valid,
        "predicted_tokens": best.where(valid, -100).double(),
    }
    if labeled:
        right = (best == targets)[valid].double()
        expected |= {"nll": -logp * valid, "accuracy": right.mean().nan_to_num(0.0)}
    names = METRICS if labeled else tuple(expected)
    labels = {"labels": LABELS} if labeled else {}
    out = model(IDS, **given, **labels, metrics=names, return_logits=return_logits)
    assert (out.logits is None) == (return_logits is None)
    assert out.metrics.keys() == expected.keys() and (out.loss is None) == (not labeled)
    for name, value in expected.items():
        assert not out.metrics[name].requires_grad
        torch.testing.assert_close(out.metrics[name].double(), value, rtol=1e-5, atol=1e-5)
    if labeled:
        out = model(IDS, **given, **labels, criteria=(LogProbs(),), metrics=names)
        assert out.loss is None and torch.equal(out.criteria[0], out.logprobs)
        torch.testing.assert_close(out.logprobs.double(), logp * valid, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.metrics["accuracy"].double(), expected["accuracy"])
        assert out.logprobs.dtype == torch.float32
        if valid.any():
            upstream = torch.randn(valid.shape)
            found = gradients((out.logprobs * upstream).sum(), model)
            assert_same_gradients(found, gradients((logp * valid * upstream).sum(), model))


@pytest.mark.parametrize("keep", KEEPS)
def test_only_kept_positions_are_projected(model: CausalLM, keep: str) -> None:
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    kept, rows = KEEPS[keep]
    full = model(IDS).logits
    torch.testing.assert_close(model(IDS, logits_to_keep=kept).logits, pick(full, rows))
    model(IDS, labels=LABELS, logits_to_keep=kept)
    assert seen[1:] == [(B, len(rows[0]), 56)] * 2


@pytest.mark.parametrize("none", [torch.zeros(0, dtype=torch.long), torch.zeros(T).bool()])
def test_nothing_kept(model: CausalLM, none: Tensor) -> None:
    assert model(IDS, logits_to_keep=none).logits.shape == (B, 0, V)
    loss = model(IDS, labels=LABELS, logits_to_keep=none, metrics=("accuracy",)).loss
    assert loss == 0
    assert all((g == 0).all() for g in gradients(loss, model).values())


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum", "none"])
def test_divergence_without_labels_counts_real_positions(model: CausalLM, reduction: str) -> None:
    inputs, of_token = BATCHES["padded"]
    z = model(IDS, **inputs).logits.double()
    real = inputs["attention_mask"].bool()
    expected, _ = reduce(0.7 * divergence(z, LABELS), real, torch.tensor(of_token), reduction)
    out = model(IDS, **inputs, criteria=(LIVE,), loss_reduction=reduction)
    assert out.logits is None
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(out.loss.sum(), model), gradients(expected.sum(), model))


def test_the_call_wins_over_defaults(model: CausalLM) -> None:
    full, by_token = model(IDS).logits, model(IDS, labels=LABELS).loss
    expected = model(IDS, labels=LABELS, logits_to_keep=2, loss_reduction="sum").loss
    defaults = model.defaults
    defaults.loss_reduction, defaults.return_logits, defaults.metrics = "sum", True, ("nll",)
    defaults.logits_to_keep = 2
    out = model(IDS, labels=LABELS)
    torch.testing.assert_close(out.loss, expected)
    assert set(out.metrics) == {"nll"}
    torch.testing.assert_close(out.logits, full[:, -2:])
    assert model(IDS).metrics == {}
    torch.testing.assert_close(model(IDS, logits_to_keep=5).logits, full[:, -5:])
    call = {"loss_reduction": "token", "return_logits": False, "metrics": (), "logits_to_keep": 0}
    out = model(IDS, labels=LABELS, **call)
    assert torch.equal(out.loss, by_token) and out.logits is None and out.metrics == {}
    assert model.num_items(LABELS) < model.num_items(LABELS, logits_to_keep=0)
