"""Criteria over a head's logits: several in one pass, stored log-probabilities, class weights."""

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.definitions import criterion
from tigon.kernels import (
    KL,
    CrossEntropy,
    Head,
    LogProbs,
    checks,
    cross_entropy,
    kl_ref,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    run_loss_terms,
)
from tigon.kernels.loss import fused_linear_pass as head_pass
from tigon.kernels.loss.fused_linear_pass import ChunkSizes
from tigon.kernels.loss.logits import Options, scale_and_cap

N, C, D, V, K = 21, 19, 13, 211, 5
heads = pytest.mark.parametrize(
    "options", [Options(), Options(softcap=2.0, logit_scale=0.7)], ids=["plain", "cap"]
)


class Batch:
    """A student, a teacher and targets, some of them ignored."""

    def __init__(self) -> None:
        self.hidden = torch.randn(N, C, requires_grad=True)
        self.weight = (0.5 * torch.randn(V, C)).requires_grad_()
        self.bias = torch.randn(V, requires_grad=True)
        self.teacher_hidden = torch.randn(N, D)
        self.teacher = Head(0.5 * torch.randn(V, D), torch.randn(V))
        self.targets = torch.randint(0, V, (N,))
        self.targets[::5] = -100
        self.weights = torch.rand(N)
        full = self.teacher_logits().log_softmax(-1)
        self.logprobs, self.tokens = full.topk(K)
        self.tokens[3, 2:] = -1
        self.learned = (self.hidden, self.weight, self.bias)

    def teacher_logits(self) -> Tensor:
        return F.linear(self.teacher_hidden, *self.teacher[:2])

    def run(self, criteria: list[Any], options: Options = Options(), **more: Any) -> list[Tensor]:  # noqa: B008
        found = run_loss_terms(
            self.hidden, self.weight, self.bias, criteria, options=options, **more
        )
        return [x.value for x in found]

    def expected(self, criteria: list[Any], options: Options = Options()) -> list[Tensor]:  # noqa: B008
        """From the definitions, float64."""
        z = F.linear(*(x.double() for x in self.learned))
        return [criterion(c, scale_and_cap(z, options)) for c in criteria]


def assert_same(found: Tensor, expected: Tensor, learned: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, learned, upstream, retain_graph=True),
        torch.autograd.grad(expected, learned, upstream.double(), retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def criteria_of(b: Batch, reduction: str = "sum") -> list[Any]:
    mine = {"targets": b.targets, "weights": b.weights, "reduction": reduction}
    if reduction == "sum":
        mine["denominator"] = 7.0
    return [
        CrossEntropy(**mine, label_smoothing=0.1, coefficient=0.5),
        KL(**mine, teacher_hidden=b.teacher_hidden, teacher=b.teacher, beta=0.3, temperature=2.0),
        KL(**mine, teacher_tokens=b.tokens, teacher_logprobs=b.logprobs, coefficient=2.0),
    ]


@heads
@pytest.mark.parametrize("logits_bytes", [2**30, 2**15])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_several_criteria(options: Options, logits_bytes: int, reduction: str) -> None:
    b = Batch()
    criteria = criteria_of(b, reduction)
    expected = b.expected(criteria, options)
    found = b.run(criteria, options, logits_bytes=logits_bytes)
    assert_same(sum(found), sum(expected), b.learned)
    # Sums that count differently, and one that does not count at all
    assert_same(found[0] - 3 * found[2], expected[0] - 3 * expected[2], b.learned)


@pytest.mark.parametrize("logits_bytes", [pytest.param(2**30, marks=pytest.mark.slow), 2**15])
@pytest.mark.parametrize("last", range(3))
def test_rows_that_the_last_criterion_ignores(last: int, logits_bytes: int) -> None:
    """It writes the whole gradient, of what the others say too."""
    b = Batch()
    all_count = [
        KL(teacher_hidden=b.teacher_hidden, teacher=b.teacher),
        KL(teacher_tokens=b.tokens, teacher_logprobs=b.logprobs),
    ]
    criteria = [*all_count, criteria_of(b)[last]]
    found = b.run(criteria, logits_bytes=logits_bytes)
    assert_same(sum(found), sum(b.expected(criteria)), b.learned)


class Cut(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_gradient_from_above(reduction: Any) -> None:
    b = Batch()
    loss = b.run([CrossEntropy(targets=b.targets, reduction=reduction)])[0]
    Cut.apply(loss).sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in b.learned)


@pytest.mark.parametrize("mixed", [False, True])
def test_logits_are_computed_twice_at_most(monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    b = Batch()
    widths: list[int] = []
    product = head_pass._product

    def counted(h: Tensor, *rest: Any) -> Tensor:
        widths.append(h.shape[1])
        return product(h, *rest)

    monkeypatch.setattr(head_pass, "_product", counted)
    criteria = criteria_of(b) + ([LogProbs(targets=b.targets)] if mixed else [])
    total = sum(x.sum() for x in b.run(criteria))
    assert widths == [C, D]
    total.backward()
    assert widths == ([C, D] * 2 if mixed else [C, D])
    for x, expected in zip(
        b.learned,
        torch.autograd.grad(sum(x.sum() for x in b.expected(criteria)), b.learned),
        strict=True,
    ):
        torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=2e-5)


@heads
def test_of_logits_that_exist(options: Options) -> None:
    b = Batch()
    logits = F.linear(*b.learned).detach().requires_grad_()
    criteria = [*criteria_of(b), LogProbs(targets=b.targets)]
    before = logits.detach().clone()
    found = run_loss_terms(logits, None, None, criteria, options=options, logits_bytes=2**15)
    z = scale_and_cap(logits.double(), options)
    for c, x in zip(criteria, found, strict=True):
        assert_same(x.value, criterion(c, z), (logits,))
    assert torch.equal(logits, before) and logits._version == 0


def test_stored_logprobs_of_a_student_sure_of_them() -> None:
    """What is left for other tokens is far below what 1 - sum can tell; so is its gradient."""
    b = Batch()
    b.bias.detach()[b.tokens.clamp(min=0).flatten()] += 60
    c = KL(teacher_tokens=b.tokens, teacher_logprobs=b.logprobs)
    found, expected = b.run([c])[0], b.expected([c])[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    grad, exact = (torch.autograd.grad(x, b.bias)[0] for x in (found, expected))
    torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_stored_logprobs_of_all_tokens(beta: float) -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    teacher = torch.randn(3, 7).log_softmax(-1)
    criterion = KL(teacher_tokens=teacher.argsort(), teacher_logprobs=teacher.sort()[0], beta=beta)
    ((loss, _),) = run_loss_terms(logits, None, None, [criterion])
    student = logits.double().log_softmax(-1)
    expected = kl_ref(student, teacher.double(), beta).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (found,), (true,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.01, 0.5, 0.99])
def test_divergence_of_distributions_that_underflow(beta: float) -> None:
    """Where exp(logit) is subnormal in fp32, or 0, for student and teacher alike."""
    student = torch.linspace(0, -130, 301)[None].repeat(2, 1)
    teacher = torch.stack((student[0], student[0] * 0.9)).log_softmax(-1)
    student = student.log_softmax(-1).requires_grad_()
    eye = torch.eye(301)
    criterion = KL(teacher_hidden=teacher, teacher=Head(eye), beta=beta)
    ((loss, _),) = run_loss_terms(student, None, None, [criterion])
    exact = student.detach().double().requires_grad_()
    s, t = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    m = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta))
    expected = beta * (t.exp() * (t - m)).sum() + (1 - beta) * (s.exp() * (s - m)).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    (found,), (true,) = torch.autograd.grad(loss, student), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(found.double(), true, rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_count_may_hold_anything() -> None:
    b = Batch()
    dead = b.targets == -100
    b.tokens[dead], b.logprobs[dead] = -100, torch.nan
    c = KL(targets=b.targets, teacher_tokens=b.tokens, teacher_logprobs=b.logprobs)
    loss = b.run([c])[0]
    grads = torch.autograd.grad(loss, b.learned)
    assert loss.isfinite() and all(g.isfinite().all() for g in grads)
    with checks(wait=True), pytest.raises(ValueError, match="teacher_tokens are not in"):
        b.run([KL(teacher_tokens=b.tokens, teacher_logprobs=b.logprobs)])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_class_weights(reduction: Any) -> None:
    """As torch's, whose mean and other arguments there are none of here."""
    b, classes = Batch(), torch.rand(V)
    classes[b.targets[1]] = 0
    logits = F.linear(*b.learned)
    plain = F.cross_entropy(
        logits.double(), b.targets, weight=classes.double(), reduction=reduction
    )
    how = {"class_weights": classes, "reduction": reduction}
    given = b.hidden, b.weight, b.targets
    assert_same(linear_cross_entropy(*given, bias=b.bias, **how).value, plain, b.learned)
    assert_same(cross_entropy(logits, b.targets, **how).value, plain, b.learned)
    d, mine = (7.0 if reduction == "sum" else 1.0), {"token_weights": b.weights, **how}
    expected = linear_cross_entropy_ref(*given, bias=b.bias, denominator=d, **mine)
    found = linear_cross_entropy(*given, bias=b.bias, denominator=d, **mine).value
    assert_same(found, expected.double(), b.learned)


def test_targets_of_a_batch_fill_what_is_missing() -> None:
    b = Batch()
    plain = LogProbs().with_targets(b.targets, b.weights, 7.0)
    assert plain.targets is b.targets
    mine = CrossEntropy(weights=b.weights).with_targets(b.targets, torch.ones(N), 7.0)
    assert mine.weights is b.weights and mine.denominator == 7.0 and mine.targets is b.targets


def test_one_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    product = head_pass._product

    def counted(*given: Any) -> Tensor:
        assert all(x() is None for x in alive)
        logits = product(*given)
        alive.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(head_pass, "_product", counted)
    monkeypatch.setattr(head_pass, "chunk_sizes", lambda *_: ChunkSizes(4, 4, 0))
    b = Batch()
    b.run([CrossEntropy(targets=b.targets)])
    assert len(alive) > 3
