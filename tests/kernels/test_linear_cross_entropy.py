import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import CUDA
from tigon.kernels import linear_cross_entropy, linear_cross_entropy_ref
from tigon.kernels.loss.api import METRICS, Options
from tigon.kernels.loss.fused_linear_pass import LossPlan

MODULE = SIZES = sys.modules["tigon.kernels.loss.fused_linear_pass"]
N, C, V = 37, 19, 211
rows = pytest.mark.parametrize("rows", [4, 10_000])


def chunk(monkeypatch: pytest.MonkeyPatch, rows: int, vocab: int = V) -> None:
    monkeypatch.setattr(SIZES, "chunk_rows", lambda *_: rows)


def inputs(n: int = N, c: int = C, vocab: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    targets = torch.randint(0, vocab, (n,))
    targets[::5] = -100
    hidden, weight, bias = torch.randn(n, c), 0.5 * torch.randn(vocab, c), torch.randn(vocab)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def test_the_reference_is_the_definition() -> None:
    hidden, weight, bias, targets = inputs()
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    expected = F.cross_entropy(logits, targets)
    loss = linear_cross_entropy_ref(
        hidden, weight, targets, bias=bias, denominator=(targets != -100).sum()
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("denominator", [8, 8.0, torch.tensor(8), torch.tensor(8.0)])
def test_denominator(denominator: float | Tensor) -> None:
    hidden, weight, _, targets = inputs()
    whole, _ = linear_cross_entropy(hidden, weight, targets)
    loss, _ = linear_cross_entropy(hidden, weight, targets, denominator=denominator)
    torch.testing.assert_close(loss, whole / 8)
    torch.testing.assert_close(
        torch.autograd.grad(loss, weight)[0], torch.autograd.grad(whole, weight)[0] / 8
    )


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


def errors(
    dtype: torch.dtype, tensors: list[Tensor], targets: Tensor, w: Tensor, count: int | None = None
) -> list[tuple[str, float, float]]:
    """(what, our error, eager's error) against fp32 on the same rounded numbers."""
    count = int((targets != -100).sum()) if count is None else count
    low = [x.detach().to(dtype).requires_grad_() for x in tensors]
    wide = [x.detach().float().requires_grad_() for x in low]
    exact = linear_cross_entropy_ref(
        wide[0], wide[1], targets, bias=wide[2], token_weights=w, denominator=count
    )
    ours, _ = linear_cross_entropy(
        low[0], low[1], targets, bias=low[2], token_weights=w, denominator=count
    )
    logits = F.linear(*low)
    eager = (F.cross_entropy(logits.float(), targets, reduction="none") * w).sum() / count
    found = [("loss", abs((ours - exact).item()), abs((eager - exact).item()))]
    gradients = (
        torch.autograd.grad(ours, low),
        torch.autograd.grad(eager, low),
        torch.autograd.grad(exact, wide),
    )
    for name, a, b, c in zip(("hidden", "weight", "bias"), *gradients, strict=True):
        assert a.dtype == dtype
        scale = c.norm()
        errors = [((x.float() - c).norm() / scale).item() for x in (a, b)]
        found.append((name, errors[0], errors[1]))
    return found


@pytest.mark.parametrize("rows", [3, 10_000])
def test_bf16_is_as_good_as_eager(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    *tensors, targets = inputs(n=640, c=48, vocab=300)
    chunk(monkeypatch, rows, 300)  # up to 171 chunks: a sum in bf16 would be 7 times as wrong
    for name, ours, eager in errors(torch.bfloat16, tensors, targets, torch.rand(640)):
        assert ours <= 2 * eager + 1e-6, name


@pytest.mark.parametrize("rows", [128, 10_000])
def test_fp16_gradients_do_not_underflow(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    *tensors, targets = inputs(n=256, c=32, vocab=1024)
    tensors[1].detach().mul_(0.1)  # an untrained head: every probability is about 1 / V
    chunk(monkeypatch, rows, 1024)
    # Part of a batch of 2048 tokens, by whose number the loss is divided
    for name, ours, eager in errors(torch.float16, tensors, targets, torch.ones(256), 2048):
        assert ours <= 1e-3, name
        assert ours <= 2 * eager + 1e-6, name


def test_fp16_sums_do_not_overflow() -> None:
    hidden = torch.full((320, 4), 300.0).half().requires_grad_()
    weight = torch.zeros(8, 4).half().requires_grad_()
    targets = torch.zeros(320, dtype=torch.long)
    loss, _ = linear_cross_entropy(hidden, weight, targets, denominator=320)
    (grad,) = torch.autograd.grad(loss, weight)
    expected = torch.full((8, 4), 300 / 8)
    expected[0] -= 300  # 320 times that is more than fp16 can hold
    torch.testing.assert_close(grad.float(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
        pytest.param(
            {"targets": torch.full((N,), V)},
            rf"label {V} at \[0\] is neither -100 nor in",
            marks=pytest.mark.skipif(CUDA, reason="an assertion on the device ends its use"),
        ),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    hidden, weight, _, targets = inputs()
    change = {
        k: v.to(hidden.device) if isinstance(v, Tensor) and v.device.type == "cpu" else v
        for k, v in change.items()
    }
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


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


def test_the_budget_bounds_the_chunk() -> None:
    h = torch.empty(1, 4096, dtype=torch.bfloat16)
    for vocab, budget in ((128256, 2**30), (262144, 2**30), (151936, 2**28), (50, 2**20)):
        rows = SIZES.chunk_rows(vocab, h, budget)
        assert rows >= 1
        assert rows * vocab * 2 <= budget < 32 * rows * vocab + 32 * vocab
    assert SIZES.chunk_rows(300_000, h, 1) == 1


@pytest.mark.traced
def test_the_operator_is_what_it_says(path: str) -> None:
    if path == "reference":
        pytest.skip("there is no operator")
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
