"""What the head can be asked for beside cross-entropy: all follow the forward contract."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.contract import Outputs, V, assert_same_gradients, gradients, tiny_llama, tokens
from tigon.kernels import KL, CrossEntropy, Head, LogProbs
from tigon.models import CausalLM

B, T = 2, 13
IDS, LABELS = tokens(B, T)
PAD = torch.tensor([[1] * 9 + [0] * 4, [1] * T])


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], labels.new_full((B, 1), -100)], 1)


def reduced(values: Tensor, valid: Tensor, reduction: str, items: float | None = None) -> Tensor:
    """The reductions' definitions over weighted values [B, n]; a row is a sequence."""
    values = values * valid
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if reduction == "token":
        return values.sum() / (items or valid.sum())
    means = [v.sum() / m.sum() for v, m in zip(values, valid, strict=True) if m.any()]
    return torch.stack(means).sum() / (items or len(means))


class Teacher:
    """Another model's hidden states and head, and what they say of every token."""

    def __init__(self) -> None:
        other = tiny_llama()
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.1 * torch.randn_like(p))
        seen: list[Tensor] = []
        hook = other.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            self.logp = other(IDS, attention_mask=PAD).logits.double().log_softmax(-1)
        hook.remove()
        self.hidden, self.model = seen[0], other

    def kl(self, **options: Any) -> KL:
        return KL(teacher_hidden=self.hidden, teacher=self.model.lm_head, **options)


def forward_kl(teacher: Tensor, logits: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - logits.double().log_softmax(-1))).sum(-1)


def test_distillation_in_one_pass(model: CausalLM) -> None:
    teacher = Teacher()
    model.lm_head.logits_bytes = 16 * V * 8  # many chunks
    logits = model(IDS, attention_mask=PAD).logits
    valid = shifted(LABELS) != -100
    ce = F.cross_entropy(logits.double().flatten(0, 1), shifted(LABELS).flatten())
    kl = reduced(forward_kl(teacher.logp, logits), valid, "token")
    mixed = 0.3 * ce + 0.7 * kl
    criteria = CrossEntropy(coefficient=0.3), teacher.kl(coefficient=0.7)
    with Outputs() as seen:
        out = model(IDS, attention_mask=PAD, labels=LABELS, criteria=criteria, metrics="nll")
        found = gradients(out.loss, model)
    rows = [s.numel() // V for s in seen.products if s[-1:] == (V,)]
    assert sum(rows) == 2 * int(valid.sum())  # the student's logits and the teacher's, each once
    torch.testing.assert_close(out.loss.double(), mixed, rtol=1e-5, atol=1e-5)
    assert_same_gradients(found, gradients(mixed, model))
    torch.testing.assert_close(out.criteria[0].double(), 0.3 * ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.criteria[1].double(), 0.7 * kl, rtol=1e-5, atol=1e-5)
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
