from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import LOSSES
from tests.kernels.conftest import CUDA
from tests.kernels.definitions import losses as exact
from tigon.kernels import cross_entropy
from tigon.kernels.loss.api import METRICS, Options

N, V = 37, 211


def inputs() -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    targets[1], targets[2] = 0, V - 1
    return (2 * torch.randn(N, V)).requires_grad_(), targets


def per_row(logits: Tensor, targets: Tensor, **arguments: Any) -> Tensor:
    return cross_entropy(logits, targets, reduction="none", **arguments)[0]


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, targets = inputs()
    logits = logits.detach().bfloat16()
    expected = exact(logits, targets, Options()).float()
    torch.testing.assert_close(per_row(logits, targets), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits, targets = inputs()
    logits = 300 * logits.detach()
    expected = -logits.double().log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    actual = per_row(logits, targets).double()
    torch.testing.assert_close(actual, expected * (targets != -100), rtol=1e-5, atol=1e-4)


def test_confident_predictions_keep_their_small_loss() -> None:
    z, targets = torch.zeros(3, V), torch.tensor([4, 5, 6])
    z[range(3), targets] = torch.tensor([12.0, 16.0, 19.0])
    expected = torch.log1p((V - 1) * torch.tensor([12.0, 16.0, 19.0]).neg().double().exp())
    losses = per_row(z, targets)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-2, atol=3e-7)


def test_metrics_of_rows() -> None:
    logits, targets = inputs()
    z = logits.detach()
    p = z.double().softmax(-1)
    valid = targets != -100
    expected = {
        "entropy": torch.distributions.Categorical(p).entropy() * valid,
        "max_logit": z.double().max(-1).values * valid,
        "nll": -p.gather(1, targets.clamp(min=0)[:, None])[:, 0].log() * valid,
        "z": z.double().exp().sum(-1).log() * valid,
        "predicted_tokens": torch.where(valid, z.argmax(-1), -100),
    }
    names = [name for name in METRICS if name != "accuracy"]
    assert expected.keys() == set(names)
    _, metrics = cross_entropy(z, targets, metrics=names)
    for name, value in expected.items():
        actual = metrics[name].to(value.dtype)
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)


def test_predicted_tokens_takes_the_first_of_equals() -> None:
    logits = torch.zeros(4, V)
    logits[1, [7, 9, 200]] = 1.0
    logits[2, V - 1] = 1.0
    logits[3] = -torch.inf
    logits[3, 5:] = 2.0
    _, metrics = cross_entropy(logits, torch.tensor([1, 2, 3, 6]), metrics=("predicted_tokens",))
    assert metrics["predicted_tokens"].tolist() == [0, 7, V - 1, 5]


def test_forbidden_tokens() -> None:
    """Logits of -inf have no probability and no gradient."""
    logits, targets = inputs()
    z = logits.detach().clone()
    z[:, 3:50] = -torch.inf
    targets[(targets >= 3) & (targets < 50)] = 60
    z.requires_grad_()
    loss, metrics = cross_entropy(z, targets, metrics=("entropy",))
    (grad,) = torch.autograd.grad(loss, z)
    allowed = [*range(3), *range(50, V)]
    kept = z.detach()[:, allowed]
    expected = torch.distributions.Categorical(kept.double().softmax(-1)).entropy()
    torch.testing.assert_close(
        metrics["entropy"].double(), expected * (targets != -100), rtol=1e-5, atol=1e-5
    )
    assert (grad[:, 3:50] == 0).all() and grad.isfinite().all()
    moved = torch.where(targets >= 50, targets - 47, targets)
    torch.testing.assert_close(loss, per_row(kept, moved).sum())


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_sum_and_its_gradient(options: Options, overwrite: bool) -> None:
    logits, targets = inputs()
    w = torch.randn(N, requires_grad=True)
    given = logits * 1
    before = given.detach().clone()
    loss, _ = cross_entropy(
        given,
        targets,
        token_weights=w,
        denominator=torch.tensor(7),
        options=options,
        overwrite=overwrite,
    )
    expected = (exact(logits, targets, options) * w).sum() / 7
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad(loss, (logits, w), torch.tensor(3.0))
    reference = torch.autograd.grad(expected, (logits, w), torch.tensor(3.0).double())
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert overwrite or (torch.equal(given, before) and given._version == 0)


def test_overwritten_logits_cannot_be_used_again(kernels_only: None) -> None:
    logits, targets = inputs()
    given = logits * 1
    squared = given.square()
    loss, _ = cross_entropy(given, targets, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(squared.sum() + loss, logits)


def test_a_second_backward_pass() -> None:
    """With one number for all rows, and where the first gradient was written to."""
    logits, targets = inputs()
    losses = per_row(logits, targets)
    ones = torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0]  # expanded
    assert torch.equal(ones, torch.autograd.grad(losses, logits, torch.ones(N))[0])
    total, _ = cross_entropy(logits * 1, targets, overwrite=True)
    first = torch.autograd.grad(total * 3, logits, retain_graph=True)[0]
    kept = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(total * 3, logits)[0], kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total * 3, logits)


def test_no_gradient_is_made_for_nobody(
    monkeypatch: pytest.MonkeyPatch, kernels_only: None
) -> None:
    """Without a gradient to make, no second tensor of the logits' size exists."""
    logits, targets = inputs()
    sizes: list[int] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> Tensor:
        out = empty(*size, **options)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch, "empty", counted)
    with torch.no_grad():
        cross_entropy(logits, targets, metrics=METRICS)
    cross_entropy(logits.detach(), targets)
    assert sizes and max(sizes) < logits.numel()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    logits = torch.empty(9000, 262144, dtype=torch.bfloat16).normal_().requires_grad_()
    targets = torch.randint(0, 262144, (9000,))
    last = logits.detach()[-60:].clone().requires_grad_()
    loss, expected = per_row(logits, targets), per_row(last, targets[-60:])
    assert torch.equal(loss[-60:], expected)
    (grad,), (wanted,) = (
        torch.autograd.grad(y.sum(), x) for y, x in ((loss, logits), (expected, last))
    )
    assert torch.equal(grad[-60:], wanted)


@pytest.mark.parametrize("bad", [V, -1, -99, 2**40])
def test_a_target_outside_the_vocabulary(bad: int) -> None:
    logits, targets = inputs()
    targets[11] = bad
    if CUDA:
        pytest.skip("an assertion on the device ends the process's use of it")
    with pytest.raises(ValueError, match=rf"label {bad} at \[11\] is neither -100 nor in \[0, 211"):
        cross_entropy(logits, targets)
