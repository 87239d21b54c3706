"""Losses of a head where numbers are extreme, missing, or not there yet."""

import math
import runpy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import CUDA
from tests.kernels.definitions import losses as exact
from tests.kernels.test_linear_cross_entropy import N, V, inputs, kl_inputs
from tigon.kernels import (
    CrossEntropy,
    cross_entropy,
    linear_cross_entropy,
    linear_kl,
    run_loss_terms,
    runtime,
    selected_logprobs,
)
from tigon.kernels.loss.api import METRICS, Options
from tigon.kernels.loss.terms import find_valid_rows
from tigon.kernels.runtime import check_values, checks

reductions = pytest.mark.parametrize("reduction", ["sum", "none"])


def finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


@reductions
def test_a_nan_weight_of_an_ignored_position(reduction: str) -> None:
    hidden, weight, _, targets = inputs()
    w = torch.rand(N)
    plain, _ = linear_cross_entropy(hidden, weight, targets, token_weights=w, reduction=reduction)
    w[targets == -100] = torch.nan
    loss, _ = linear_cross_entropy(hidden, weight, targets, token_weights=w, reduction=reduction)
    torch.testing.assert_close(loss, plain)
    assert finite(*torch.autograd.grad(loss.sum(), (hidden, weight)))
    loss, _ = cross_entropy(hidden @ weight.T, targets, token_weights=w, reduction=reduction)
    torch.testing.assert_close(loss, plain)
    assert finite(*torch.autograd.grad(loss.sum(), (hidden, weight)))


@reductions
@pytest.mark.parametrize("metrics", [(), METRICS])
@pytest.mark.parametrize("options", [Options(), Options(softcap=3.0)], ids=["plain", "cap"])
def test_metrics_do_not_change_the_loss(
    reduction: str, metrics: tuple[str, ...], options: Options
) -> None:
    hidden, weight, bias, targets = inputs()
    w = torch.rand(N)
    w[1::4] = 0
    hidden.detach()[1::4] = torch.nan
    given = {"token_weights": w, "reduction": reduction, "bias": bias, "options": options}
    loss, found = linear_cross_entropy(hidden, weight, targets, metrics=metrics, **given)
    kept = w != 0
    expected, _ = linear_cross_entropy(
        hidden.detach()[kept].requires_grad_(),
        weight,
        targets[kept],
        **given | {"token_weights": w[kept]},
    )
    torch.testing.assert_close(loss.sum(), expected.sum())
    grads = torch.autograd.grad(loss.sum(), (hidden, weight, bias))
    assert finite(*grads)
    for a, b in zip(grads[1:], torch.autograd.grad(expected.sum(), (weight, bias)), strict=True):
        torch.testing.assert_close(a, b)
    valid = (targets != -100) & (w != 0)
    assert all((found[n][valid] != 0).any() for n in metrics if found[n].dim())


@reductions
def test_divergence_leaves_out_rows_of_weight_0(reduction: str) -> None:
    x = kl_inputs()
    w = torch.rand(len(x["hidden"]))
    plain = linear_kl(**x, token_weights=w, reduction=reduction)
    w[::3] = 0
    x["hidden"].detach()[::3] = torch.nan
    x["teacher_hidden"][::3] = torch.nan
    loss = linear_kl(**x, token_weights=w, reduction=reduction)
    assert finite(loss, *torch.autograd.grad(loss.sum(), (x["hidden"], x["weight"])))
    if reduction == "none":
        torch.testing.assert_close(loss, plain * (w != 0))
    x = kl_inputs()
    x["teacher_hidden"][4] = torch.nan
    for beta in (0.0, 0.3, 1.0):
        assert linear_kl(**x, beta=beta, reduction="none").isnan().nonzero().tolist() == [[4]]


@reductions
def test_torch_func(reduction: str) -> None:
    hidden, weight, bias, targets = inputs()

    def total(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        loss, _ = linear_cross_entropy(h, w, targets, bias=b, reduction=reduction)
        return (loss * 3).sum()

    tensors = [x.detach() for x in (hidden, weight, bias)]
    found = torch.func.grad(total, argnums=(0, 1, 2))(*tensors)
    expected = torch.autograd.grad(total(hidden, weight, bias), (hidden, weight, bias))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)

    def squared(w: Tensor) -> Tensor:
        return torch.func.grad(total, argnums=1)(tensors[0], w, tensors[2]).square().sum()

    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.func.grad(squared)(tensors[1])
    logits = hidden.detach() @ tensors[1].T
    grad = torch.func.grad(lambda z: cross_entropy(z, targets, reduction=reduction)[0].sum())
    z = logits.clone().requires_grad_()
    (plain,) = torch.autograd.grad(cross_entropy(z, targets, reduction=reduction)[0].sum(), z)
    torch.testing.assert_close(grad(logits), plain)


@reductions
def test_fp16_with_tiny_weights_and_large_denominators(reduction: str) -> None:
    *tensors, targets = inputs(n=64, c=32, vocab=1024)
    hidden, weight, _ = (x.detach().half().requires_grad_() for x in tensors)
    weight.detach().mul_(0.1)
    w = 1e-6 * (torch.rand(64) + 0.5)
    d = 1e6 if reduction == "sum" else 1.0
    found, _ = linear_cross_entropy(
        hidden, weight, targets, token_weights=w, denominator=d, reduction=reduction
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    losses = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="none") * w
    up = 1e12 if reduction == "sum" else 1e6  # what a gradient scaler may bring along
    actual = torch.autograd.grad(found.sum() * up, (hidden, weight))
    expected = torch.autograd.grad((losses.sum() / d) * up, wide)
    for a, b in zip(actual, expected, strict=True):
        assert (a.double() - b).norm() <= 2e-3 * b.norm()


@reductions
def test_fp32_gradients_far_from_zero(reduction: str) -> None:
    """A shift of all logits changes nothing but their last bits."""
    targets = torch.randint(0, V, (N,))
    logits = (2 * torch.randn(N, V) + 1e4).requires_grad_()
    (grad,) = torch.autograd.grad(
        cross_entropy(logits, targets, reduction=reduction)[0].sum(), logits
    )
    z = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(z, targets, reduction="sum"), z)
    assert (grad - expected).abs().max() < 1e-6


@pytest.mark.parametrize("cap", [1.0, 30.0, 1000.0])
def test_softcap_is_accurate(cap: float) -> None:
    targets = torch.randint(0, V, (N,))
    logits = 2 * torch.randn(N, V)
    options = Options(softcap=cap)
    found, _ = cross_entropy(logits, targets, reduction="none", options=options)
    wide = exact(logits, targets, options)
    plain = F.cross_entropy(cap * torch.tanh(logits / cap), targets, reduction="none")
    error, allowed = ((x.double() - wide).abs().max().item() for x in (found, plain))
    assert error <= 2 * allowed + 1e-6


@pytest.mark.parametrize("cap", [0, 0.0, -1.0, math.inf, math.nan])
def test_a_softcap_that_is_none(cap: float) -> None:
    with pytest.raises(ValueError, match="is not positive; None means no softcap"):
        Options(softcap=cap)


def test_active_rows_of_other_targets() -> None:
    hidden, weight, _, targets = inputs()
    other = targets.clone()
    other[1::2] = -100
    active = find_valid_rows(other)
    if CUDA:
        pytest.skip("an assertion on the device ends the process's use of it")
    for bad, message in ((active, "leaves out rows"), (find_valid_rows(other[:5]), "has 5 rows")):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(hidden, weight, targets, active=bad)
    loss, _ = linear_cross_entropy(hidden, weight, targets, active=find_valid_rows(targets.clone()))
    assert loss == linear_cross_entropy(hidden, weight, targets)[0]
    # More rows than needed are no mistake
    loss, _ = linear_cross_entropy(hidden, weight, other, active=find_valid_rows(targets))
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, other)[0])


@pytest.mark.parametrize("layout", ["columns", "expanded", "rows", "padded"])
def test_overwriting_strided_logits(layout: str) -> None:
    targets = torch.randint(0, V, (N,))
    plain = torch.randn(N, V)
    given = {
        "columns": torch.stack((plain, plain), -1)[..., 0],
        "expanded": plain[:1].expand(N, V),
        "rows": plain.T.contiguous().T,
        "padded": F.pad(plain, (0, 5))[:, :V],
    }[layout]
    z = given.detach().clone().requires_grad_()
    expected = F.cross_entropy(z, targets, reduction="sum")
    leaf = given.detach().requires_grad_()
    loss, _ = cross_entropy(leaf.view_as(leaf), targets, overwrite=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, z)[0]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = inputs()
    expected, metrics = linear_cross_entropy(hidden, weight, targets, metrics=METRICS)
    loss, found = linear_cross_entropy(hidden, weight, targets.to(dtype), metrics=METRICS)
    assert loss == expected and all(torch.equal(found[n], metrics[n]) for n in METRICS)
    plain, _ = cross_entropy(hidden @ weight.T, targets.to(dtype))
    torch.testing.assert_close(plain, expected)
    few = targets.clamp(min=0).to(torch.uint8)
    selected, _ = selected_logprobs(hidden, weight, few)
    assert torch.equal(selected, selected_logprobs(hidden, weight, few.long())[0])


@pytest.mark.parametrize("bad", [torch.float32, torch.bool])
def test_labels_that_are_no_integers(bad: torch.dtype) -> None:
    hidden, weight, _, targets = inputs()
    for f in (linear_cross_entropy, selected_logprobs):
        with pytest.raises(TypeError, match="labels are integers, -100 is ignored"):
            f(hidden, weight, targets.to(bad))
    with pytest.raises(TypeError, match="targets is a list"):
        run_loss_terms(hidden, weight, None, [CrossEntropy(targets=[1, 2])])  # type: ignore[arg-type]


def test_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in (False, True):
        with checks(wait=wait), pytest.raises(ValueError, match="no"):
            check_values(torch.tensor(False, device="cpu"), "no")
    monkeypatch.setenv("TIGON_CHECKS", "yes")
    with pytest.raises(ValueError, match="TIGON_CHECKS='yes' is not 0 or 1"):
        runpy.run_path(runtime.__file__)


@pytest.mark.parametrize("letter", ["a", "\N{EURO SIGN}"])
def test_device_assertion_cuts_a_long_message(monkeypatch, letter):
    said: list[str] = []
    monkeypatch.setattr(runtime, "may_sync", lambda ok: False)
    monkeypatch.setattr(torch, "_assert_async", lambda ok, message: said.append(message))
    for length in (5, 500):
        check_values(torch.tensor(True), length * letter)
    short, cut = (message.removesuffix(runtime.CHECKS_HINT) for message in said)
    assert short == 5 * letter and cut.startswith(50 * letter) and cut.endswith(runtime.ELLIPSIS)
    assert all(message.endswith(runtime.CHECKS_HINT) for message in said)
    # Each letter whole, and none left out that had fitted
    assert 254 - len(letter.encode()) < len(said[1].encode()) <= 254


def test_annealing_does_not_change_what_is_compiled() -> None:
    from tigon.kernels.loss.logits import head_constants

    def constants(**options: Any) -> list[bool]:
        return [x is None for x in head_constants(Options(**options))]

    assert constants(softcap=2.0, logit_scale=0.5) == constants(softcap=3.0, logit_scale=0.7)
