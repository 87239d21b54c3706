"""Labels to a loss: what is counted, weighed and divided, in training and evaluation alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.contract import assert_same_gradients, gradients, tiny_llama, tokens
from tigon.models import Batch, CausalLM, Targets

B, T = 2, 13
REDUCTIONS = ["token", "sequence", "sum", "none"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_training_and_evaluation_are_bitwise_equal(model: CausalLM, reduction: str) -> None:
    ids, labels = tokens()
    arguments = {"labels": labels, "loss_reduction": reduction, "metrics": ("entropy",)}
    train, logits = model.train()(ids, **arguments), model(ids).logits
    evaluated = model.eval()(ids, **arguments)
    assert torch.equal(train.loss, evaluated.loss)
    assert torch.equal(train.metrics["entropy"], evaluated.metrics["entropy"])
    assert torch.equal(logits, model(ids).logits)
    with torch.no_grad():
        assert torch.equal(model(ids, **arguments).loss, train.loss)
    with torch.inference_mode():
        assert torch.equal(model(ids, **arguments).loss, train.loss)


def test_shift_labels_are_not_shifted_again_and_win_over_labels(model: CausalLM) -> None:
    ids, labels = tokens()
    shifted = torch.randint(0, 97, (B, T))  # the last position has a target too
    logp = model(ids).logits.double().log_softmax(-1)
    expected = -logp.gather(-1, shifted[..., None]).mean()
    for given in ({}, {"labels": labels}):
        loss = model(ids, shift_labels=shifted, **given).loss
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("return_logits", [False, True])
def test_all_ignored_is_zero_with_zero_gradients(
    model: CausalLM, reduction: str, return_logits: bool
) -> None:
    ids, _ = tokens()
    out = model(
        ids,
        labels=torch.full_like(ids, -100),
        loss_reduction=reduction,
        return_logits=return_logits,
        metrics=("accuracy", "entropy", "predicted_tokens"),
    )
    assert (out.loss == 0).all()
    assert out.metrics["accuracy"] == 0
    assert (out.metrics["entropy"] == 0).all()
    assert (out.metrics["predicted_tokens"] == -100).all()
    found = gradients(out.loss.sum(), model)
    assert [name for name, grad in found.items() if not (grad == 0).all()] == []


@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_num_items_of_zero(model: CausalLM, items: int | Tensor) -> None:
    ids, _ = tokens()
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=items).loss
    assert loss == 0
    assert all((g == 0).all() for g in gradients(loss, model).values())


@pytest.mark.parametrize("resolved", [False, True], ids=["keywords", "batch and targets"])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_uneven_micro_batches_equal_one_batch(reduction: Any, resolved: bool) -> None:
    model = tiny_llama()
    ids, labels = tokens(batch=5)
    labels[0], labels[1, 3:], labels[4, :11] = -100, -100, -100  # one, none and many targets
    whole = model(ids, labels=labels, loss_reduction=reduction).loss
    expected = gradients(whole, model)
    parts = [slice(0, 1), slice(1, 2), slice(2, 5)]
    given = [{"labels": labels[p], "loss_reduction": reduction} for p in parts]
    items = torch.stack([model.num_items(**arguments) for arguments in given]).sum()
    total = 0.0
    for p, arguments in zip(parts, given, strict=True):
        if resolved:
            batch = Batch.of(model, ids[p])
            targets = Targets.of(batch, **arguments)
            loss = model(batch=batch, targets=targets.with_num_items(items)).loss
        else:
            loss = model(ids[p], **arguments, num_items_in_batch=items).loss
        total += loss.item()
        loss.backward()
    assert total == pytest.approx(whole.item(), rel=1e-6)
    assert_same_gradients({n: p.grad for n, p in model.named_parameters()}, expected)
