"""Operators that are not in `cases.py`, on tensors without numbers, on meta or fake."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.kernels import AttentionMask, KVBuffers, append_attention, attention, fp8_linear, gemv

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def append(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Any:
    with torch.no_grad():
        return append_attention(q, k, v, KVBuffers(keys, values), lengths)


r = torch.randn
CASES: dict[str, Callable[[], Case]] = {
    "fp8_linear": lambda: (fp8_linear, (r(3, 32).bfloat16(), r(16, 32).bfloat16())),
    "row_linear": lambda: (lambda x, w: gemv(x, w).detach(), (r(1, 8), r(4, 8))),
    "append_attention": lambda: (
        append,
        (
            r(2, 1, 4, 8),
            *(r(2, 1, 2, 8) for _ in "kv"),
            *(r(2, 2, 9, 8) for _ in "kv"),
            integers(2),
        ),
    ),
    "attention": lambda: (
        lambda q, k, v: attention(q, k, v, mask=AttentionMask(3)),
        (r(2, 3, 4, 8), r(2, 3, 2, 8), r(2, 3, 2, 8)),
    ),
}


def described(run: Callable[..., Any], tensors: tuple[Any, ...]) -> list[Any]:
    """Shape, dtype and device of each output and gradient."""
    floats = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    outputs = run(*floats)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wanted = [t for t in floats if t.requires_grad]
    gradients: tuple[Tensor, ...] = ()
    if any(y.requires_grad for y in outputs):
        gradients = torch.autograd.grad([y.sum() for y in outputs], wanted)
    return [(tuple(t.shape), t.dtype) for t in (*outputs, *gradients)]


@pytest.mark.traced
@pytest.mark.parametrize("where", ["meta", "fake", "fake, outside of its mode"])
@pytest.mark.parametrize("case", CASES)
def test_shapes_without_numbers(case: str, where: str, path: str) -> None:
    outside = where == "fake, outside of its mode"
    if outside and (case, path) == ("append_attention", "reference"):
        pytest.skip("torch.arange is real there")
    if outside and case == "attention" and torch.cuda.is_available():
        pytest.skip("the mask is real there")
    run, tensors = CASES[case]()
    expected = described(run, tensors)
    mode = FakeTensorMode()
    if where == "meta":
        assert described(run, tuple(t.to("meta") for t in tensors)) == expected
        return
    tensors = tuple(mode.from_tensor(t) for t in tensors)
    with mode if where == "fake" else contextlib.nullcontext():
        assert described(run, tensors) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
@pytest.mark.parametrize("case", ["fp8_linear", "row_linear"])
def test_fake_gpu_tensors_without_a_gpu(case: str) -> None:
    # With gradients, views or indices torch itself asks for a GPU
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        run, tensors = CASES[case]()
        outputs = run(*tensors)
    for y in [outputs] if isinstance(outputs, Tensor) else outputs:
        assert y.device.type == "cuda"
