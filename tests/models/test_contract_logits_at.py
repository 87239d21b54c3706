"""logits_at: the logits of some positions beside the loss, and nothing else changed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.contract import Outputs, V, gradients, tiny_llama, tokens
from tigon.models import CausalLM

B, T = 2, 13
MASK = torch.zeros(B, T, dtype=torch.bool)
MASK[0, [3, 12]] = MASK[1, [0, 7]] = True
WAYS = {"bool": MASK, "index": MASK.flatten().nonzero().squeeze(1).int()}
ways = pytest.mark.parametrize("at", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("keep", [0, 3])
def test_they_are_those_of_the_full_logits(model: CausalLM, at: Tensor, keep: int) -> None:
    """Of positions that logits_to_keep leaves out of the loss, too."""
    ids, labels = tokens()
    out = model(ids, labels=labels, logits_to_keep=keep, logits_at=at)
    assert out.logits is None and not out.logits_at.requires_grad
    torch.testing.assert_close(out.logits_at, model(ids).logits[MASK])


def test_softcapped_and_scaled() -> None:
    model = tiny_llama()
    model.lm_head.options = replace(model.lm_head.options, softcap=2.0, logit_scale=0.5)
    ids, labels = tokens()
    out = model(ids, labels=labels, logits_at=MASK)
    torch.testing.assert_close(out.logits_at, model(ids).logits[MASK])


@ways
@pytest.mark.parametrize("reduction", ["token", "sequence", "none"])
def test_loss_and_gradients_are_the_same_bits(model: CausalLM, at: Tensor, reduction: str) -> None:
    ids, labels = tokens()
    given: dict[str, Any] = {"labels": labels, "loss_reduction": reduction, "metrics": ("nll",)}
    alone, beside = model(ids, **given), model(ids, **given, logits_at=at)
    assert torch.equal(alone.loss, beside.loss)
    assert torch.equal(alone.metrics["nll"], beside.metrics["nll"])
    expected = gradients(alone.loss.sum(), model)
    for name, grad in gradients(beside.loss.sum(), model).items():
        assert torch.equal(grad, expected[name]), name


def test_no_other_logits_exist(model: CausalLM) -> None:
    ids, labels = tokens()
    model.lm_head.logits_bytes = 16 * V * 4
    with Outputs() as outputs:
        model(ids, labels=labels, logits_at=MASK)
    of_vocabulary = [shape for shape in outputs.products if shape[-1] == V]
    assert torch.Size([4, V]) in of_vocabulary
    assert all(shape[0] <= 4 for shape in of_vocabulary)


def test_none_at_all(model: CausalLM) -> None:
    ids, labels = tokens()
    assert model(ids, labels=labels, logits_at=MASK & False).logits_at.shape == (0, V)
    assert model(ids, labels=labels).logits_at is None


def test_logits_bytes_of_a_call(model: CausalLM) -> None:
    """Smaller chunks, and the same loss and gradients up to rounding."""
    ids, labels = tokens(ignored=0)
    whole = model(ids, labels=labels)
    with Outputs() as outputs:
        parts = model(ids, labels=labels, logits_bytes=16 * V * 5)
    assert max(shape[0] for shape in outputs.products if shape[-1] == V) == 5
    torch.testing.assert_close(parts.loss, whole.loss)
    expected = gradients(whole.loss, model)
    for name, grad in gradients(parts.loss, model).items():
        torch.testing.assert_close(grad, expected[name])
