import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import CASES, kl, teacher_and_student
from tests.kernels.test_operators import assert_as_good_as_eager
from tigon.kernels import (
    linear_cross_entropy,
    linear_cross_entropy_ref,
    linear_kl,
    linear_kl_ref,
    selected_logprobs,
)
from tigon.kernels.loss.api import METRICS, Options
from tigon.kernels.loss.fused_linear_pass import LossPlan

MODULE = SIZES = sys.modules["tigon.kernels.loss.fused_linear_pass"]
N, C, V = 37, 19, 211
rows = pytest.mark.parametrize("rows", [4, 10_000])


def chunk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(SIZES, "chunk_rows", lambda *_: rows)


def inputs(n: int = N, c: int = C, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    targets = torch.randint(0, vocab, (n,))
    targets[::5] = -100
    hidden, weight, bias = torch.randn(n, c), 0.5 * torch.randn(vocab, c), torch.randn(vocab)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def kl_inputs() -> dict[str, Tensor]:
    made = teacher_and_student(N, C, 13, V)
    del made["token_weights"]
    for name in ("hidden", "weight", "bias"):
        made[name].requires_grad_()
    return made


def test_teacher_gets_no_gradient() -> None:
    x = kl_inputs()
    x["teacher_weight"].requires_grad_()
    linear_kl(**x).backward()
    assert [name for name, t in x.items() if t.grad is not None] == ["hidden", "weight", "bias"]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_reference_of_kl_is_the_definition(beta: float) -> None:
    x, how = kl_inputs(), {"beta": beta, "reduction": "none"}
    expected = kl(**x, token_weights=torch.ones(N), **how)
    torch.testing.assert_close(linear_kl_ref(**x, **how).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_reference_is_the_definition() -> None:
    hidden, weight, bias, targets = inputs()
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    expected = F.cross_entropy(logits, targets)
    loss = linear_cross_entropy_ref(
        hidden, weight, targets, bias=bias, denominator=(targets != -100).sum()
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


@rows
def test_metrics_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    hidden, weight, _, targets = inputs()
    _, whole = linear_cross_entropy(hidden, weight, targets, metrics=METRICS)
    chunk(monkeypatch, rows)
    with_metrics, parts = linear_cross_entropy(hidden, weight, targets, metrics=METRICS)
    assert list(parts) == list(METRICS)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value)
    assert whole["nll"].sum().item() == pytest.approx(with_metrics.item(), rel=1e-5)


@rows
@pytest.mark.parametrize("reduction", ["sum", "none"])
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


@pytest.mark.parametrize("rows", [128, 10_000])
def test_fp16_gradients_do_not_underflow(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Of a part of a batch of 2048 tokens, by whose number the loss is divided."""
    *tensors, targets = inputs(n=256, c=32, vocab=1024)
    tensors[1].detach().mul_(0.1)  # an untrained head: every probability is about 1 / V
    chunk(monkeypatch, rows)
    low = [x.detach().half().requires_grad_() for x in tensors]
    wide = [x.detach().float().requires_grad_() for x in low]
    losses = [
        f(h, w, targets, bias=b, denominator=2048)
        for f, (h, w, b) in ((linear_cross_entropy, low), (linear_cross_entropy_ref, wide))
    ]
    torch.testing.assert_close(losses[0].value, losses[1], rtol=1e-3, atol=1e-4)
    found, expected = (
        torch.autograd.grad(losses[0].value, low),
        torch.autograd.grad(losses[1], wide),
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float16 and (a - b).norm() <= 1e-3 * b.norm()


def test_fp16_sums_do_not_overflow() -> None:
    hidden = torch.full((320, 4), 300.0).half().requires_grad_()
    weight = torch.zeros(8, 4).half().requires_grad_()
    targets = torch.zeros(320, dtype=torch.long)
    loss, _ = linear_cross_entropy(hidden, weight, targets, denominator=320)
    (grad,) = torch.autograd.grad(loss, weight)
    expected = torch.full((8, 4), 300 / 8)
    expected[0] -= 300  # 320 times that is more than fp16 can hold
    torch.testing.assert_close(grad.float(), expected)


CE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"targets": torch.zeros(38).long()}, r"targets \(38,\) is not \[N\] = \[37\]"),
    ({"targets": torch.zeros(4).long()}, r"targets \(4,\) is not \[N\] = \[37\]"),
    ({"token_weights": torch.ones(3)}, r"token_weights \(3,\) is not \[N\] = \[37\]"),
    ({"weight": torch.ones(V, 20)}, r"\(37, 19\) and weight \(211, 20\) are not"),
    ({"hidden": torch.ones(2, N, C)}, r"hidden \(2, 37, 19\)"),
    ({"reduction": "mean"}, "reduction='mean' is not 'sum' or 'none'"),
    ({"bias": torch.ones(3)}, r"bias \(3,\) is not \[V\] = \[211\]"),
    ({"weight": torch.ones(V, C).double()}, "hidden is torch.float32, weight torch.float64"),
    ({"weight": torch.ones(V, C, device="meta")}, "hidden is on .*; weight is on meta"),
    ({"metrics": ("entropie",)}, r"unknown metrics \['entropie'\]"),
]
KL_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.ones(2, 3, C)}, r"hidden \(2, 3, 19\) is not \[N, C\]"),
    ({"teacher_hidden": torch.ones(N, 5)}, r"teacher_hidden \(37, 5\) and teacher_weight"),
    ({"hidden": torch.ones(4, C)}, "the student has 4 rows and 211 tokens, the teacher 37"),
    ({"teacher_bias": torch.ones(3)}, r"teacher_bias \(3,\) is not \[V\]"),
    ({"beta": 1.5}, r"beta=1.5 is not in \[0, 1\]"),
    ({"temperature": 0.0}, "temperature=0.0 is not positive"),
    ({"options": Options(z_loss=1.0)}, "label_smoothing and z_loss are for cross-entropy alone"),
]


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [(linear_cross_entropy, *error) for error in CE_ERRORS]
    + [(linear_kl, *error) for error in KL_ERRORS]
    + [
        (
            selected_logprobs,
            {"options": Options(label_smoothing=0.1)},
            "are for cross-entropy alone",
        )
    ],
)
def test_bad_input(function: Any, change: dict[str, Any], message: str) -> None:
    hidden, weight, _, targets = inputs()
    given = {"hidden": hidden, "weight": weight, "targets": targets}
    given = (kl_inputs() if function is linear_kl else given) | change
    moved = {
        k: x.to(hidden.device) if isinstance(x, Tensor) and not x.is_meta else x
        for k, x in given.items()
    }
    with pytest.raises(ValueError, match=message):
        function(**moved)


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


@rows
@pytest.mark.parametrize("reduction", ["sum", "none"])
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
    loss_rows = MODULE.loss_rows

    def counted(logits: Tensor, *rest: Any, **more: Any) -> object:
        seen.append(logits.shape[0])
        return loss_rows(logits, *rest, **more)

    monkeypatch.setattr(MODULE, "loss_rows", counted)
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
    for a, b in zip(
        torch.autograd.grad(loss, tensors, upstream),
        torch.autograd.grad(expected, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
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
                MODULE._head_pass.op, arguments, test_utils=("test_schema", "test_faketensor")
            )
