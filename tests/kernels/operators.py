"""The operators of `cases.CASES` as parameters, and their results beside those of a definition."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import CASES, FP8, KINDS, MORE_KINDS
from tests.kernels.conftest import CUDA
from tests.kernels.op_case import Inputs, OpCase, learned

SLOW = [pytest.param(CASES[name], id=name, marks=pytest.mark.slow) for name in MORE_KINDS]
ALWAYS = [pytest.param(CASES[name], id=name) for name in KINDS]
OTHERS = [pytest.param(case, id=name) for name, case in FP8.items()]
kinds = pytest.mark.parametrize("case", [*ALWAYS, *SLOW])
kinds_and_fp8 = pytest.mark.parametrize("case", [*ALWAYS, *OTHERS, *SLOW])


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter so few programs that each has several tokens, and sums in steps."""
    if not CUDA:
        module = importlib.import_module("tigon.kernels.rope.qk_norm_rope")
        monkeypatch.setattr(module, "RESIDENT", 2)
        module = importlib.import_module("tigon.kernels.norm.rms_norm_kernels")
        monkeypatch.setattr(module, "SUM_ROWS", 1)
        module = importlib.import_module("tigon.kernels.delta.causal_conv")
        monkeypatch.setattr(module, "CHUNKS", (8, 4))


def random_like(found: list[Tensor]) -> list[Tensor]:
    return [torch.randn(y.shape) for y in found]


def gradients(found: list[Tensor], inputs: Inputs, ups: list[Tensor], **how: Any) -> list[Tensor]:
    ups = [up.to(y.dtype) for y, up in zip(found, ups, strict=True) if y.requires_grad]
    found = [y for y in found if y.requires_grad]
    return list(torch.autograd.grad(found, learned(inputs), ups, **how))


def assert_exact(case: OpCase, inputs: Inputs, ups: list[Tensor] | None = None) -> None:
    """Outputs and gradients in float32 are those of the definition; nothing is written to."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    before = [(x.detach().clone(), x._version) for x in tensors]
    found, expected = case.run(inputs), case.run(inputs, case.definition)
    for y, wanted in zip(found, expected, strict=True):
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    ups = random_like(found) if ups is None else ups
    kept = [up.clone() for up in ups]
    pairs = zip(gradients(found, inputs, ups), gradients(expected, inputs, ups), strict=True)
    for grad, wanted in pairs:
        atol = 2e-5 * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
        torch.testing.assert_close(grad, wanted, rtol=case.rtol, atol=atol)
    assert all(torch.equal(up, k) and up._version == 0 for up, k in zip(ups, kept, strict=True))
    for x, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(x, value) and x._version == version


def assert_as_good_as_eager(
    case: OpCase, size: Any, dtype: torch.dtype, factor: float = 2.0
) -> None:
    """Hardly farther from the definition than plain torch in the same dtype."""
    assert case.eager is not None
    inputs = case.make(size, dtype)
    exact = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }
    truth = case.run(exact, case.definition)
    ups = random_like(truth)
    # As a loss scaler does: float16 rounds gradients below 6e-5 to fewer digits
    scale = 1024.0 if dtype == torch.float16 and case.result else 1.0
    ups = [up.to(case.result or dtype) * scale for up in ups]
    best = [*truth, *gradients(truth, exact, ups)]
    found, plain = case.run(inputs), case.run(inputs, case.eager)
    assert all(y.dtype == (case.result or dtype) for y in found)
    ours, theirs = (y + gradients(y, inputs, ups) for y in (found, plain))
    for x, grad in zip(learned(inputs), ours[len(found) :], strict=True):
        assert grad.dtype == x.dtype
    for a, b, right in zip(ours, theirs, best, strict=True):
        error, bound = ((y.double() - right.double()).norm() for y in (a, b))
        assert error <= factor * bound + 2e-6 * right.norm(), f"{error:.3g}, eager {bound:.3g}"


JUDGED = {name: case for name, case in CASES.items() if case.eager is not None}
