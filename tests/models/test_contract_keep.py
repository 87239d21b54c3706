"""logits_to_keep: positions are picked before the head, and labels with them, in either mode."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.contract import assert_same_gradients, gradients, mean, token_losses, tokens
from tigon.models import CausalLM

B, T = 2, 13
BOOL = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]).bool()
# logits_to_keep -> the positions of each row that it names
KEEPS: dict[str, tuple[Any, list[list[int]]]] = {
    "0": (0, [list(range(T))] * 2),
    "1": (1, [[12]] * 2),
    "last 4": (4, [[9, 10, 11, 12]] * 2),
    "T": (T, [list(range(T))] * 2),
    "more than T": (T + 7, [list(range(T))] * 2),
    "index": (torch.tensor([5, 0, 11, 12, 3]), [[5, 0, 11, 12, 3]] * 2),
    "int32 index": (torch.tensor([2, 9], dtype=torch.int32), [[2, 9]] * 2),
    "uint8 index": (torch.tensor([2, 9, 12], dtype=torch.uint8), [[2, 9, 12]] * 2),
    "int8 per row": (torch.tensor([[-1, 2], [-13, -5]], dtype=torch.int8), [[12, 2], [0, 8]]),
    "negative index": (torch.tensor([-13, -3, 4]), [[0, 10, 4]] * 2),
    "bool": (BOOL, [[1, 4, 5, 8, 11, 12]] * 2),
    "per row": (torch.tensor([[1, 8, 3], [0, 12, 6]]), [[1, 8, 3], [0, 12, 6]]),
    "negative per row": (torch.tensor([[-1, 2], [-13, -5]]), [[12, 2], [0, 8]]),
}
keeps = pytest.mark.parametrize(("keep", "rows"), KEEPS.values(), ids=KEEPS)
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def pick(x: Tensor, rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.stack([x[b, t] for t in row]) for b, row in enumerate(rows)])


@keeps
def test_logits_are_those_of_the_positions(model: CausalLM, keep: Any, rows: Any) -> None:
    ids, _ = tokens()
    full = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, pick(full, rows))


@modes
@keeps
def test_loss_is_over_the_kept_positions(
    model: CausalLM, keep: Any, rows: Any, training: bool
) -> None:
    model.train(training)
    ids, labels = tokens(ignored=0.2)
    labels[0, 0] = 5  # the first label is nobody's target
    losses = token_losses(model(ids).logits, labels)
    kept = [losses[b, t] for b, row in enumerate(rows) for t in row if (b, t) in losses]
    out = model(ids, labels=labels, logits_to_keep=keep)
    assert out.logits is None
    if not kept:  # the last position predicts nothing
        assert out.loss == 0
        return
    assert out.loss.item() == pytest.approx(mean(kept).item(), rel=1e-6)
    assert_same_gradients(gradients(out.loss, model), gradients(mean(kept), model))


@keeps
@pytest.mark.parametrize("return_logits", [False, True])
def test_everything_the_head_returns_is_of_the_kept_positions(
    model: CausalLM, keep: Any, rows: Any, return_logits: bool
) -> None:
    ids, _ = tokens()
    shifted = torch.randint(0, 97, (B, T))
    weights = torch.rand(B, T)
    full = model(ids).logits
    out = model(
        ids,
        shift_labels=shifted,
        loss_weights=weights,
        loss_reduction="none",
        logits_to_keep=keep,
        return_logits=return_logits,
        metrics=("max_logit", "predicted_tokens", "accuracy"),
    )
    logp = -full.log_softmax(-1).gather(-1, shifted[..., None]).squeeze(-1)
    torch.testing.assert_close(out.loss, pick(logp * weights, rows))
    torch.testing.assert_close(out.metrics["max_logit"], pick(full.amax(-1), rows))
    assert torch.equal(out.metrics["predicted_tokens"], pick(full.argmax(-1), rows))
    right = pick((full.argmax(-1) == shifted).float(), rows).mean()
    assert out.metrics["accuracy"].item() == pytest.approx(right.item())
    assert (out.logits is not None) == return_logits
    if return_logits:
        torch.testing.assert_close(out.logits, pick(full, rows))


@keeps
def test_nothing_else_is_projected(model: CausalLM, keep: Any, rows: Any) -> None:
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    ids, labels = tokens()
    model(ids, logits_to_keep=keep)
    model(ids, labels=labels, logits_to_keep=keep)
    assert seen == [(B, len(rows[0]), 56)] * 2


@pytest.mark.parametrize("none", [torch.zeros(0, dtype=torch.long), torch.zeros(T).bool()])
def test_nothing_kept(model: CausalLM, none: Tensor) -> None:
    ids, labels = tokens()
    assert model(ids, logits_to_keep=none).logits.shape == (B, 0, 97)
    loss = model(ids, labels=labels, logits_to_keep=none, metrics=("accuracy",)).loss
    assert loss == 0
    assert all((g == 0).all() for g in gradients(loss, model).values())


@pytest.mark.parametrize("keep", [3, BOOL, torch.tensor([[0, 1, 2, 4, 9], [7, 8, 9, 10, 12]])])
def test_sequence_reduction_counts_the_kept_targets(model: CausalLM, keep: Any) -> None:
    ids, labels = tokens(ignored=0.0)
    labels[0, ::2] = -100
    starts = {(0, 0), (0, 5), (1, 0), (1, 9)}
    positions = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])
    losses = token_losses(model(ids, position_ids=positions).logits, labels, starts)
    chosen = pick(torch.arange(T).expand(B, -1), _rows(keep)).tolist()
    sequences: dict[tuple[int, int], list[Tensor]] = {}
    for b, row in enumerate(chosen):
        for t in row:
            if (b, t) in losses:
                first = max(s for r, s in starts if r == b and s <= t)
                sequences.setdefault((b, first), []).append(losses[b, t])
    expected = mean(mean(group) for group in sequences.values())
    batch = {"labels": labels, "position_ids": positions, "logits_to_keep": keep}
    loss = model(ids, **batch, loss_reduction="sequence").loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert model.num_items(**batch, loss_reduction="sequence") == len(sequences)
    assert model.num_items(**batch) == sum(map(len, sequences.values()))


def _rows(keep: Any) -> list[list[int]]:
    if isinstance(keep, int):
        return [list(range(T - keep, T))] * B
    if keep.dtype == torch.bool:
        return [[t for t in range(T) if keep[t]]] * B
    rows: list[list[int]] = keep.tolist()
    return rows


def test_a_default_is_set_once_and_the_call_wins(model: CausalLM) -> None:
    ids, labels = tokens()
    full = model(ids).logits
    model.defaults.logits_to_keep = 2
    torch.testing.assert_close(model(ids).logits, full[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=5).logits, full[:, -5:])
    assert torch.equal(model(ids, logits_to_keep=0).logits, full)
    losses = token_losses(full, labels)
    late = [loss for (_, t), loss in losses.items() if t >= T - 2]
    assert model(ids, labels=labels).loss.item() == pytest.approx(mean(late).item(), rel=1e-6)
    assert model.num_items(labels) == len(late)
    assert model.num_items(labels, logits_to_keep=0) == len(losses)
