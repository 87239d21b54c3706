import math

import pytest
import torch
from torch import Tensor

from tigon.kernels import gated_act


def exact(gate: Tensor, act: str) -> Tensor:
    x = gate.double()
    if act == "silu":
        return x / (1 + (-x).exp())
    if act == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


acts = pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])


@acts
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 202)], ids=str)
def test_forward_and_gradients(act: str, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape)).requires_grad_()
    gate, up = x[..., : shape[-1] // 2], x[..., shape[-1] // 2 :]
    y, expected = gated_act(x, act), exact(gate, act) * up
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad((y * upstream).sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad((y * upstream).sum(), x)
    (reference,) = torch.autograd.grad((expected * upstream).sum(), x)
    torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)
    assert torch.equal(grad, again)
    assert x._version == 0


@acts
def test_gradcheck(act: str) -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gated_act(x, act), x)


@acts
def test_strided_input(act: str) -> None:
    x = torch.randn(12, 3, 7).permute(2, 1, 0)
    expected = exact(x[..., :6], act) * x[..., 6:]
    torch.testing.assert_close(gated_act(x, act).double(), expected, rtol=1e-5, atol=1e-6)


@acts
def test_bf16_rounds_the_activation_as_transformers_does(act: str) -> None:
    x = torch.randn(64, 200).bfloat16()
    rounded = exact(x[:, :100], act).bfloat16().float()
    expected = (rounded * x[:, 100:].float()).bfloat16()
    assert (gated_act(x, act) != expected).float().mean() < 1e-2


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="act='relu' is not one of"):
        gated_act(torch.ones(2, 4), "relu")
