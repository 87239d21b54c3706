"""What the head can be asked for beside cross-entropy: all follow the forward contract."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.contract import Outputs, V, assert_same_gradients, gradients, tiny_llama, tokens
from tigon.kernels import KL, CrossEntropy, Head, LogProbs
from tigon.models import CausalLM

B, T = 2, 13
IDS, LABELS = tokens(B, T)


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], labels.new_full((B, 1), -100)], 1)


def test_distillation_in_one_pass(model: CausalLM) -> None:
    """In chunks, what the terms are alone; logits of student and teacher are computed once."""
    hidden, head = torch.randn(B, T, 56), Head(torch.randn(V, 56))
    kl = KL(teacher_hidden=hidden, teacher=head, coefficient=0.7)
    criteria = CrossEntropy(coefficient=0.3), kl
    terms = tuple(model(IDS, labels=LABELS, criteria=(c,)).loss for c in criteria)
    expected = gradients(sum(terms), model)
    model.lm_head.logits_bytes = 16 * V * 8
    with Outputs() as seen:
        out = model(IDS, labels=LABELS, criteria=criteria, metrics="nll")
        found = gradients(out.loss, model)
    rows = [s.numel() // V for s in seen.products if s[-1:] == (V,)]
    assert max(rows) <= 8 and sum(rows) == 2 * int((LABELS[:, 1:] != -100).sum())
    torch.testing.assert_close(out.loss, sum(terms))
    torch.testing.assert_close(out.criteria, terms)
    assert_same_gradients(found, expected)
    assert out.metrics.keys() == {"nll"}


def test_options_reach_a_cross_entropy_among_criteria(model: CausalLM) -> None:
    given = {"labels": LABELS, "label_smoothing": 0.1, "z_loss": 0.01}
    expected = model(IDS, **given).loss
    out = model(IDS, **given, criteria=(CrossEntropy(), LogProbs()))
    torch.testing.assert_close(out.loss, expected)
    assert out.logprobs.shape == (B, T) and len(out.criteria) == 2


def test_a_criterion_with_targets_of_its_own(model: CausalLM) -> None:
    own = shifted(IDS)
    expected = model(IDS, labels=IDS, criteria=(LogProbs(),), logits_to_keep=4).logprobs
    out = model(
        IDS, labels=LABELS, criteria=(LogProbs(targets=own), CrossEntropy()), logits_to_keep=4
    )
    torch.testing.assert_close(out.logprobs, expected)
    torch.testing.assert_close(out.loss, model(IDS, labels=LABELS, logits_to_keep=4).loss)
    alone = model(IDS, criteria=(LogProbs(targets=own),), logits_to_keep=4)
    torch.testing.assert_close(alone.logprobs, expected)


def test_a_criterion_with_weights_of_its_own(model: CausalLM) -> None:
    """They count rows that `loss_weights` leave out."""
    weights, own = torch.rand(B, T), torch.rand(B, T)
    weights[:, ::2], own[:, 1::3] = 0, 0
    options: dict[str, Any] = {"shift_labels": LABELS, "loss_reduction": "sum"}
    a, b = (model(IDS, loss_weights=w, **options).loss for w in (weights, own))
    expected = gradients(a + b, model)
    out = model(
        IDS, loss_weights=weights, criteria=(CrossEntropy(), CrossEntropy(weights=own)), **options
    )
    torch.testing.assert_close(out.loss, a + b)
    assert_same_gradients(gradients(out.loss, model), expected)
    alone = model(IDS, loss_weights=weights, criteria=(CrossEntropy(weights=own),), **options)
    torch.testing.assert_close(alone.loss, b)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_stored_log_probabilities_of_the_whole_vocabulary(beta: float) -> None:
    model, teacher = tiny_llama(), torch.randn(2, 5, 97)
    ids = torch.randint(0, 97, (2, 5))
    logprobs, tokens = teacher.log_softmax(-1).topk(97)
    stored = KL(teacher_tokens=tokens, teacher_logprobs=logprobs, beta=beta)
    found = model(ids, criteria=(stored,)).loss
    hidden, eye = teacher, Head(torch.eye(97))
    expected = model(ids, criteria=(KL(teacher_hidden=hidden, teacher=eye, beta=beta),)).loss
    torch.testing.assert_close(found, expected)


def test_hidden_states_are_what_a_student_needs(model: CausalLM) -> None:
    teacher = tiny_llama(hidden_size=48)
    with torch.no_grad():
        out = teacher(IDS, logits_to_keep=1, return_hidden=True)
        torch.testing.assert_close(teacher.lm_head(out.hidden[:, -1:]).logits, out.logits)
        q = teacher(IDS).logits.log_softmax(-1)
    assert out.hidden.shape == (*IDS.shape, 48) and "hidden" not in model(IDS)
    kl = KL(teacher_hidden=out.hidden, teacher=teacher.lm_head)
    loss = model(IDS, criteria=(kl,), loss_reduction="sum").loss
    p = model(IDS).logits.log_softmax(-1)
    torch.testing.assert_close(loss, (q.exp() * (q - p)).sum())
