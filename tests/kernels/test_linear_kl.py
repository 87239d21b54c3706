from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import kl, teacher_and_student
from tigon.kernels import linear_kl, linear_kl_ref
from tigon.kernels.loss.api import Options

N, C, D, V = 21, 19, 13, 211
BETAS = [0.0, 0.3, 1.0]


def inputs(d: int = D) -> dict[str, Tensor]:
    made = teacher_and_student(N, C, d, V)
    del made["token_weights"]
    for name in ("hidden", "weight", "bias"):
        made[name].requires_grad_()
    return made


def exact(x: dict[str, Tensor], beta: float) -> Tensor:
    return kl(**x, token_weights=torch.ones(N), beta=beta, reduction="none")


def test_teacher_gets_no_gradient() -> None:
    x = inputs()
    x["teacher_weight"].requires_grad_()
    linear_kl(**x).backward()
    assert [name for name, t in x.items() if t.grad is not None] == ["hidden", "weight", "bias"]


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
