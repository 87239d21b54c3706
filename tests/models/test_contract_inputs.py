"""What inputs may be: labels and weights of every dtype, embeddings, positions, masks."""

import math
from typing import Any

import pytest
import torch

from tests.support.contract import assert_same_gradients, gradients, tokens
from tigon.layers import KVCache
from tigon.models import CausalLM

IDS, LABELS = torch.arange(26).view(2, 13), torch.arange(26).view(2, 13) + 40
RESTARTS = torch.tensor([[*range(13)], [*range(8), *range(5)]])


def changed(row: int, column: int, value: int) -> torch.Tensor:
    labels = LABELS.clone()
    labels[row, column] = value
    return labels


def test_labels_that_are_nobodys_target_are_not_judged(model: CausalLM) -> None:
    strange = changed(0, 0, 5000)  # the first label of a row is never predicted
    assert torch.equal(model(IDS, labels=strange).loss, model(IDS, labels=LABELS).loss)


def test_positions_that_agree_with_the_bounds(model: CausalLM) -> None:
    """Those that run on past a boundary do too, and those of padding mean nothing."""
    cu, expected = torch.tensor([0, 13, 21, 26]), model(IDS, position_ids=RESTARTS).logits
    for positions in (RESTARTS, torch.arange(13)):
        out = model(IDS, cu_seq_lens=cu, position_ids=positions).logits
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    real = torch.ones(2, 13).index_put((torch.tensor(1), torch.arange(8, 13)), torch.tensor(0.0))
    positions = RESTARTS * real.long()
    out = model(IDS, cu_seq_lens=cu, position_ids=positions, attention_mask=real).logits
    torch.testing.assert_close(out[real.bool()], expected[real.bool()], rtol=1e-5, atol=1e-5)


def test_attention_mask_covers_the_cache(model: CausalLM) -> None:
    ids, _ = tokens()
    cache = KVCache()
    model(ids[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask \(2, 4\) is not .* = \[2, 13\]"):
        model(ids[:, 9:], past_key_values=cache, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="cu_seq_lens with a cache that already holds 9 tokens"):
        model(ids[:, 9:], past_key_values=cache, cu_seq_lens=torch.tensor([0, 4, 8]))
    continued = model(ids[:, 9:], past_key_values=cache, attention_mask=torch.ones(2, 13))
    torch.testing.assert_close(continued.logits, model(ids).logits[:, 9:])


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PATHS: dict[str, dict[str, Any]] = {
    "fused": {},
    "with logits": {"return_logits": True},
    "metrics": {"metrics": ("accuracy", "nll")},
    "none": {"loss_reduction": "none"},
    "sequence": {"loss_reduction": "sequence", "loss_weights": torch.rand(2, 13)},
    "kept": {"logits_to_keep": 5},
    "packed": {"cu_seq_lens": torch.tensor([0, 4, 13, 26])},
}


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_labels_of_every_dtype(model: CausalLM, name: str, path: dict[str, Any]) -> None:
    for dtype in WHOLE:
        labels = LABELS if dtype == torch.uint8 else changed(1, 5, -100)
        given, exact = {name: labels.to(dtype)}, {name: labels}
        assert torch.equal(model(IDS, **given, **path).loss, model(IDS, **exact, **path).loss)
        assert torch.equal(model.num_items(**given, **path), model.num_items(**exact, **path))


def test_loss_weights_of_every_dtype(model: CausalLM) -> None:
    weights = torch.rand(2, 13, dtype=torch.float64).requires_grad_()
    out = model(IDS, labels=LABELS, loss_weights=weights)
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss, model(IDS, labels=LABELS, loss_weights=weights.float()).loss)
    (grad,) = torch.autograd.grad(out.loss, weights)
    assert grad.dtype == torch.float64 and grad[:, 1:].all()
    for dtype in (torch.bool, torch.uint8, torch.int64):
        ones = torch.ones(2, 13, dtype=dtype)
        loss = model(IDS, labels=LABELS, loss_weights=ones, loss_reduction="none").loss
        assert torch.equal(loss, model(IDS, labels=LABELS, loss_reduction="none").loss)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_weights_of_ignored_positions_mean_nothing(
    model: CausalLM, path: dict[str, Any], wrong: float
) -> None:
    path, labels = dict(path), changed(1, 5, -100)
    weights = path.pop("loss_weights", torch.rand(2, 13)).clone()
    given = {"labels": labels, "loss_weights": weights, **path}
    expected = model(IDS, **given)
    grads = gradients(expected.loss.sum(), model)
    strange = weights.clone()
    strange[1, 5] = strange[0, 0] = wrong  # ignored, and nobody's target
    strange.requires_grad_()
    out = model(IDS, **given | {"loss_weights": strange})
    assert torch.equal(out.loss, expected.loss)
    (grad,) = torch.autograd.grad(out.loss.sum(), strange, retain_graph=True)
    assert grad.isfinite().all() and grad[1, 5] == 0
    assert_same_gradients(gradients(out.loss.sum(), model), grads)
