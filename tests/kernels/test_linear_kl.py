from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import CUDA
from tigon.kernels import kl_ref, linear_kl, linear_kl_ref
from tigon.kernels.loss.api import Options
from tigon.kernels.loss.fused_linear_pass import Plan, _head_pass

N, C, D, V = 21, 19, 13, 211
BETAS = [0.0, 0.3, 1.0]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "heads": {
        "options": Options(softcap=2.0, logit_scale=0.7),
        "teacher_options": Options(softcap=3.0, logit_scale=1.3),
    },
}


def inputs(n: int = N, c: int = C, d: int = D, vocab: int = V) -> dict[str, Tensor]:
    return {
        "hidden": torch.randn(n, c, requires_grad=True),
        "weight": (c**-0.5 * torch.randn(vocab, c)).requires_grad_(),
        "teacher_hidden": torch.randn(n, d),
        "teacher_weight": torch.randn(vocab, d),
        "bias": torch.randn(vocab, requires_grad=True),
        "teacher_bias": torch.randn(vocab),
    }


def exact(
    x: dict[str, Tensor],
    beta: float,
    temperature: float = 1.0,
    options: Options = Options(),  # noqa: B008
    teacher_options: Options = Options(),  # noqa: B008
) -> Tensor:
    """From the definitions, float64."""

    def probabilities(h: Tensor, w: Tensor, b: Tensor, o: Options) -> Tensor:
        z = F.linear(h.double(), w.double(), b.double()) * o.logit_scale
        z = z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap)
        return (z / temperature).softmax(-1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    p = probabilities(x["hidden"], x["weight"], x["bias"], options)
    q = probabilities(x["teacher_hidden"], x["teacher_weight"], x["teacher_bias"], teacher_options)
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_forward_and_gradients(case: str, beta: float, reduction: str) -> None:
    x, options = inputs(), CASES[case]
    w = torch.rand(N, requires_grad=True)
    for logits_bytes in (2**30, 2**14):
        loss = linear_kl(
            **x,
            beta=beta,
            token_weights=w,
            denominator=torch.tensor(7) if reduction == "sum" else 1.0,
            reduction=reduction,
            logits_bytes=logits_bytes,
            **options,
        )
        expected = exact(x, beta, **options) * w
        expected = expected.sum() / 7 if reduction == "sum" else expected
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        learned = (x["hidden"], x["weight"], x["bias"], w)
        upstream = torch.randn_like(loss)
        for a, b in zip(
            torch.autograd.grad(loss, learned, upstream),
            torch.autograd.grad(expected, learned, upstream.double()),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_the_reference_is_the_definition(beta: float) -> None:
    x = inputs()
    found = linear_kl_ref(**x, beta=beta, reduction="none")
    torch.testing.assert_close(found.double(), exact(x, beta), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_have_no_divergence(beta: float) -> None:
    x = inputs(d=C)
    x |= {f"teacher_{k}": x[k].detach() for k in ("hidden", "weight", "bias")}
    loss = linear_kl(**x, beta=beta)
    assert loss.abs() < 1e-4
    for grad in torch.autograd.grad(loss, (x["hidden"], x["weight"])):
        assert grad.abs().max() < 1e-4


def test_nothing_is_written_to_and_a_second_backward_gives_the_same() -> None:
    x = inputs()
    before = {k: (t.detach().clone(), t._version) for k, t in x.items()}
    for reduction in ("sum", "none"):
        loss = linear_kl(**x, reduction=reduction).sum() * 3
        first = torch.autograd.grad(loss, x["weight"], retain_graph=True)[0].clone()
        assert torch.equal(torch.autograd.grad(loss, x["weight"])[0], first)
        with pytest.raises(RuntimeError, match="linear_kl has no second derivative"):
            again = linear_kl(**x, reduction=reduction).sum()
            torch.autograd.grad(again, x["weight"], create_graph=True)
    for name, (value, version) in before.items():
        assert torch.equal(x[name], value) and x[name]._version == version


@pytest.mark.parametrize("learned", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_nothing(learned: str) -> None:
    x = inputs()
    for name, tensor in x.items():
        tensor.requires_grad_(name in (learned, "teacher_weight"))
    linear_kl(**x).backward()
    assert [name for name, t in x.items() if t.grad is not None] == [learned]
    with torch.no_grad():
        assert not linear_kl(**x).requires_grad


def test_no_rows() -> None:
    x = inputs(n=0)
    loss = linear_kl(**x)
    assert loss == 0
    assert (torch.autograd.grad(loss, x["weight"])[0] == 0).all()


@pytest.mark.traced
def test_compiled() -> None:
    torch.compiler.reset()
    x = inputs()
    compiled = torch.compile(
        lambda x: linear_kl(**x, beta=0.3),
        fullgraph=True,
        backend="inductor" if CUDA else "aot_eager",
    )
    found, expected = compiled(x), linear_kl(**x, beta=0.3)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found, (x["hidden"], x["weight"])),
        torch.autograd.grad(expected, (x["hidden"], x["weight"])),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.traced
def test_the_operator_is_what_it_says() -> None:
    x = {k: t.detach() for k, t in inputs().items()}
    teacher = (x[f"teacher_{k}"] for k in ("hidden", "weight", "bias"))
    plan = Plan("divergence", Options(), 0.3)
    slots = [next(teacher), None, *teacher, None, None]
    for needs in ([False] * 5, [True] * 5):
        none = [None] * 4
        arguments = (x["hidden"], x["weight"], x["bias"], *none, slots, [torch.rand(N)])
        arguments += (plan.word(), plan.numbers(), needs, 2**30, False)
        torch.library.opcheck(
            _head_pass.op, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.gpu
@pytest.mark.parametrize("beta", BETAS)
def test_bf16_at_real_sizes(beta: float) -> None:
    """At most twice as wrong as eager torch in bf16."""
    x = {k: t.detach().bfloat16() for k, t in inputs(1000, 1152, 512, 32003).items()}
    x["teacher_weight"] *= 0.05
    names = ("hidden", "weight", "bias")
    learned = [x[k].requires_grad_() for k in names]
    loss = linear_kl(**x, beta=beta)
    wide = {k: t.detach().float().requires_grad_(k in names) for k, t in x.items()}
    expected = linear_kl_ref(**wide, beta=beta)
    student = F.linear(*learned).float().log_softmax(-1)
    teacher = F.linear(*(x[f"teacher_{k}"] for k in names)).float().log_softmax(-1)
    eager = kl_ref(student, teacher, beta).sum()
    exact = torch.autograd.grad(expected, [wide[k] for k in names])
    for a, b, c in zip(
        torch.autograd.grad(loss, learned), torch.autograd.grad(eager, learned), exact, strict=True
    ):
        assert (a.float() - c).norm() <= 2 * (b.float() - c).norm() + 1e-6 * c.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(2, 3, C)}, r"hidden \(2, 3, 19\) is not \[N, C\]"),
        ({"teacher_hidden": torch.ones(N, 5)}, r"teacher_hidden \(21, 5\) and teacher_weight"),
        ({"hidden": torch.ones(4, C)}, "the student has 4 rows and 211 tokens, the teacher 21"),
        ({"teacher_bias": torch.ones(3)}, r"teacher_bias \(3,\) is not \[V\]"),
        ({"token_weights": torch.ones(3)}, r"token_weights \(3,\) is not \[N\] = \[21\]"),
        ({"beta": 1.5}, r"beta=1.5 is not in \[0, 1\]"),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
        (
            {"options": Options(z_loss=1.0)},
            "label_smoothing and z_loss are for cross-entropy alone",
        ),
        ({"reduction": "mean"}, "reduction='mean' is not"),
        ({"weight": torch.ones(V, C, device="meta")}, "weight is on meta"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given = inputs()
    device = given["hidden"].device  # not yet the default one where the changes are made
    for name, x in change.items():
        given[name] = x.to(device) if isinstance(x, Tensor) and not x.is_meta else x
    with pytest.raises(ValueError, match=message):
        linear_kl(**given)
