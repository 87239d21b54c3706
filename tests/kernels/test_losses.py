"""Losses of logits and of a head: extreme numbers, chunks of rows, and what does not count."""

import math
import runpy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import CASES
from tests.kernels.conftest import CUDA
from tests.kernels.definitions import losses as exact
from tests.kernels.loss_cases import teacher_and_student
from tests.kernels.operators import assert_as_good_as_eager
from tigon.kernels import (
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_kl,
    linear_kl_ref,
    runtime,
    selected_logprobs,
    selected_logprobs_ref,
)
from tigon.kernels.loss import fused_linear_pass as head_pass
from tigon.kernels.loss.fused_linear_pass import LossPlan
from tigon.kernels.loss.logits import METRICS, Options
from tigon.kernels.loss.terms import find_valid_rows
from tigon.kernels.runtime import check_values, checks

N, C, V = 37, 19, 211
few_rows = pytest.mark.parametrize("rows", [4, 10_000])
reductions = pytest.mark.parametrize("reduction", ["sum", "none"])


def inputs(n: int = N, c: int = C, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    targets = torch.randint(0, vocab, (n,))
    targets[::5] = -100
    hidden, weight, bias = torch.randn(n, c), 0.5 * torch.randn(vocab, c), torch.randn(vocab)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def logits_and_targets() -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    targets[1], targets[2] = 0, V - 1
    return (2 * torch.randn(N, V)).requires_grad_(), targets


def kl_inputs() -> dict[str, Tensor]:
    made = teacher_and_student(N, C, 13, V)
    del made["token_weights"]
    for name in ("hidden", "weight", "bias"):
        made[name].requires_grad_()
    return made


def chunk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(head_pass, "chunk_rows", lambda *_: rows)


def per_row(logits: Tensor, targets: Tensor, **arguments: Any) -> Tensor:
    return cross_entropy(logits, targets, reduction="none", **arguments)[0]


def finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def assert_all_close(found: Any, expected: Any, **how: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **how)


def test_large_logits_do_not_overflow() -> None:
    logits, targets = logits_and_targets()
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
    logits, targets = logits_and_targets()
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
    logits, targets = logits_and_targets()
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


def test_no_gradient_is_made_for_nobody(
    monkeypatch: pytest.MonkeyPatch, kernels_only: None
) -> None:
    """Without a gradient to make, no second tensor of the logits' size exists."""
    logits, targets = logits_and_targets()
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


REFERENCES = {
    "linear_cross_entropy, all": linear_cross_entropy_ref,
    "selected_logprobs, capped": selected_logprobs_ref,
    **{f"linear_kl, {name}": linear_kl_ref for name in ("1.0, none", "temperature", "capped")},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_the_definitions(name: str) -> None:
    case = CASES[name]
    inputs = case.make()
    pairs = zip(case.run(inputs, REFERENCES[name]), case.run(inputs, case.definition), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_teacher_gets_no_gradient() -> None:
    x = kl_inputs()
    x["teacher_weight"].requires_grad_()
    linear_kl(**x).backward()
    assert [name for name, t in x.items() if t.grad is not None] == ["hidden", "weight", "bias"]


@few_rows
@reductions
@pytest.mark.parametrize("n", [0, 1, 6])
def test_no_target(monkeypatch: pytest.MonkeyPatch, rows: int, n: int, reduction: str) -> None:
    chunk(monkeypatch, rows)
    *tensors, targets = inputs(n=n)
    targets[:] = -100
    loss, metrics = linear_cross_entropy(
        tensors[0], tensors[1], targets, bias=tensors[2], reduction=reduction, metrics=METRICS
    )
    assert (loss == 0).all() and metrics["accuracy"] == 0
    assert loss.shape == (() if reduction == "sum" else (n,))
    for x, grad in zip(tensors, torch.autograd.grad(loss.sum(), tensors), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("rows", [3, 10_000])
def test_bf16_is_as_good_as_eager(
    monkeypatch: pytest.MonkeyPatch, kernels_only: None, rows: int
) -> None:
    """Of up to 171 chunks, too: a sum of their gradients in bf16 would be 7 times as wrong."""
    chunk(monkeypatch, rows)
    case = CASES["linear_cross_entropy, plain, sum"]
    assert_as_good_as_eager(case, (512, 48, 300), torch.bfloat16)


def test_fp16_sums_do_not_overflow() -> None:
    hidden = torch.full((320, 4), 300.0).half().requires_grad_()
    weight = torch.zeros(8, 4).half().requires_grad_()
    targets = torch.zeros(320, dtype=torch.long)
    loss, _ = linear_cross_entropy(hidden, weight, targets, denominator=320)
    (grad,) = torch.autograd.grad(loss, weight)
    expected = torch.full((8, 4), 300 / 8)
    expected[0] -= 300  # 320 times that is more than fp16 can hold
    torch.testing.assert_close(grad.float(), expected)


def test_an_upstream_factor_is_not_rounded_to_bf16() -> None:
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    w = torch.randn(101, 32).bfloat16().requires_grad_()
    t = torch.randint(0, 101, (64,))
    factor = 1.003  # bf16 has 1.0 and 1.0078 beside it
    plain = torch.autograd.grad(linear_cross_entropy(x, w, t)[0], (x, w))
    scaled = torch.autograd.grad(linear_cross_entropy(x, w, t)[0] * factor, (x, w))
    for a, b in zip(scaled, plain, strict=True):
        ratio = (a.float() * b.float()).sum() / b.float().square().sum()
        assert ratio.item() == pytest.approx(factor, abs=5e-4)


@few_rows
@reductions
@pytest.mark.parametrize("metrics", [(), ("nll",)])
def test_rows_that_do_not_count_are_not_computed(
    monkeypatch: pytest.MonkeyPatch, rows: int, reduction: str, metrics: tuple[str, ...]
) -> None:
    chunk(monkeypatch, rows)
    *tensors, targets = inputs()
    hidden, weight, bias = tensors
    w = torch.rand(N)
    w[3::4] = 0
    seen: list[int] = []
    loss_rows = head_pass.loss_rows

    def counted(logits: Tensor, *rest: Any, **more: Any) -> object:
        seen.append(logits.shape[0])
        return loss_rows(logits, *rest, **more)

    monkeypatch.setattr(head_pass, "loss_rows", counted)
    loss, found = linear_cross_entropy(
        hidden, weight, targets, bias=bias, token_weights=w, reduction=reduction, metrics=metrics
    )
    counts = targets != -100
    assert sum(seen) == (counts if metrics else counts & (w != 0)).sum()
    expected = linear_cross_entropy_ref(
        hidden, weight, targets, bias=bias, token_weights=w, reduction=reduction
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(loss)
    grads = (torch.autograd.grad(y, tensors, upstream) for y in (loss, expected))
    assert_all_close(*grads, rtol=1e-4, atol=1e-5)
    for name in metrics:
        assert (found[name][counts] != 0).all()


def test_a_weight_of_zero_that_learns_counts() -> None:
    hidden, weight, _, targets = inputs()
    w = torch.zeros(N, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, targets, token_weights=w)
    expected = linear_cross_entropy_ref(hidden, weight, targets, token_weights=w)
    torch.testing.assert_close(
        torch.autograd.grad(loss, w), torch.autograd.grad(expected, w), rtol=1e-5, atol=1e-5
    )


@pytest.mark.traced
def test_the_operator_is_what_it_says(kernels_only: None) -> None:
    hidden, weight, bias, targets = (t.detach() for t in inputs())
    names = tuple(m for m in METRICS if m != "accuracy")
    plan = LossPlan("cross_entropy", Options(softcap=3.0), metrics=names, statistics=True)
    slots = [targets, None, None, None, None, None]
    for needs in ([False] * 5, [True] * 5):
        for index in (None, torch.arange(9)):
            low = torch.rand(N, 3), torch.rand(len(weight), 3)
            given = (hidden, weight, bias, *low, index, None, slots, [torch.rand(N)])
            arguments = (*given, plan.encode(), plan.numbers(), needs, 2**30, False)
            torch.library.opcheck(
                head_pass._head_pass.op, arguments, test_utils=("test_schema", "test_faketensor")
            )


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
    assert_all_close(grads[1:], torch.autograd.grad(expected.sum(), (weight, bias)))
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


@pytest.mark.parametrize("rows", [16, 10_000])
@reductions
def test_fp16_with_tiny_weights_and_large_denominators(
    monkeypatch: pytest.MonkeyPatch, reduction: str, rows: int
) -> None:
    chunk(monkeypatch, rows)
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
