"""Every family against transformers, on the same tiny random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import CASES, EVERY, FIRST, load_reference, reference
from tigon.models import MODELS, CausalLM, from_pretrained

B, T = 2, 40  # longer than max_position_embeddings
NO_SDPA = ("gemma2",)


def tokens(vocab: int = 211) -> Tensor:
    ids = torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(1))
    ids[:, ::7] = 3  # also the pad token's row
    return ids


def test_every_registered_family_has_cases() -> None:
    assert CASES.keys() == MODELS.keys()


def gradients(model: CausalLM) -> dict[str, Tensor]:
    """Gradients under the checkpoint's names."""
    parameters = dict(model.named_parameters())
    found = {}
    for name, parts in model.layout().items():
        for part in parts:
            grad = parameters[name].grad
            assert grad is not None
            found[part.name] = grad.narrow(0, part.start, part.shape[0])
    return found


@pytest.mark.parametrize(("model_type", "case"), EVERY)
def test_logits_loss_and_gradients(model_type: str, case: str, tmp_path: Path) -> None:
    theirs = reference(model_type, CASES[model_type][case], tmp_path)
    ours = from_pretrained(tmp_path)
    assert type(ours) is MODELS[model_type]
    assert ours.dtype == torch.float32
    assert not ours.training
    ids = tokens()
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)

    expected = theirs(ids, labels=labels)
    logits = ours(ids).logits
    scale = expected.logits.abs().max()
    assert scale > 1
    assert (logits - expected.logits).abs().max() <= 1e-5 * scale

    loss = ours(ids, labels=labels).loss
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    loss.backward()
    expected.loss.backward()
    found = gradients(ours)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize(("model_type", "case"), EVERY)
def test_bf16_is_as_near_as_two_ways_of_transformers(
    model_type: str, case: str, tmp_path: Path
) -> None:
    reference(model_type, CASES[model_type][case], tmp_path, dtype=torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        eager = load_reference(tmp_path, "eager")(ids).logits
        if model_type in NO_SDPA:  # the second way is the same in fp32
            other = load_reference(tmp_path, "eager", torch.float32)(ids).logits
        else:
            other = load_reference(tmp_path, "sdpa")(ids).logits
            assert other.dtype == torch.bfloat16
        ours = from_pretrained(tmp_path)(ids).logits
    assert eager.dtype == ours.dtype == torch.bfloat16
    spread = (eager.float() - other.float()).abs()
    for theirs in (eager, other):
        error = (ours.float() - theirs.float()).abs()
        assert error.max() <= 2 * spread.max()
        assert error.square().mean().sqrt() <= 1.3 * spread.square().mean().sqrt()


@pytest.mark.parametrize(("model_type", "case"), FIRST)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model_type: str, case: str, side: str, tmp_path: Path) -> None:
    theirs: Any = reference(model_type, CASES[model_type][case], tmp_path)
    ours = from_pretrained(tmp_path)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, slice(11) if side == "left" else slice(T - 11, T)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[0, 11] = -100  # transformers lets the last pad predict it
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask, labels=labels)
        logits = ours(ids, attention_mask=mask).logits
        loss = ours(ids, attention_mask=mask, labels=labels).loss
        unpadded = ours(ids[:1, mask[0].bool()]).logits
    real = mask.bool()
    scale = expected.logits[real].abs().max()
    assert (logits - expected.logits)[real].abs().max() <= 1e-5 * scale
    assert (logits[:1][:, mask[0].bool()] - unpadded).abs().max() <= 1e-5 * scale
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
