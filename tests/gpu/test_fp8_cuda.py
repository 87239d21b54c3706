"""Products of 8-bit floats on the GPU against their definition, at the sizes of an 8B model."""

import math

import pytest
import torch

from tests.support.numbers import relative_error
from tests.train.conftest import workspace
from tigon.kernels import fp8_linear, fp8_linear_ref, use
from tigon.kernels.linear.fp8 import MIN_CAPABILITY
from tigon.kernels.linear.fp8_casts import cast_both, cast_columns, cast_rows
from tigon.train import main

__all__ = ["workspace"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CAPABILITY,
        reason="needs sm_89",
    ),
]

T = 8192
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
# An exact product is rounded to bf16: 2^-9 at most. With fast accumulation tensor cores keep 14
# bits of a sum, for which DeepSeek-V3 (arXiv 2412.19437, 3.3.2) reports up to 2% of 4096 terms.
EXACT, FAST = 2**-9, 2e-2


def operands(N: int, K: int, rows: int = T) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, K, device="cuda") * torch.logspace(-2, 1, K, device="cuda")
    w = torch.randn(N, K, device="cuda") / math.sqrt(K)
    dy = torch.randn(rows, N, device="cuda") * torch.logspace(-6, 0, rows, device="cuda")[:, None]
    return x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(), dy.bfloat16()


def results(run, x, w, dy) -> dict[str, torch.Tensor]:
    y = run(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return {"y": y.detach(), "dx": dx, "dw": dw}


@pytest.mark.parametrize("shape", [*SHAPES.values(), (48, 80), (96, 20000)], ids=str)
@pytest.mark.parametrize("rows", [T, 1001])
def test_casts_have_the_bits_of_torch(shape, rows):
    x = torch.randn(rows, shape[1], device="cuda") * torch.logspace(
        -20, 10, rows, device="cuda"
    ).unsqueeze(1)
    x[5] = 0
    x = x.bfloat16()
    for cast in (cast_rows, cast_columns, cast_both):
        found = cast(x)
        with use("reference"):
            expected = cast(x)
        if cast is not cast_both:
            found, expected = [found], [expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.scale, theirs.scale)
            assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))


SIZES = [(name, rows) for name in SHAPES for rows in (T, 1001)] + [("qkv", n) for n in (1, 3, 17)]


@pytest.mark.parametrize(("name", "rows"), SIZES)
def test_products_are_those_of_the_definition(name, rows):
    tensors = operands(*SHAPES[name], rows=rows)
    found, expected = (results(run, *tensors) for run in (fp8_linear, fp8_linear_ref))
    for what, ours in found.items():
        error = relative_error(ours, expected[what])
        assert error <= (FAST if what == "y" else EXACT), (what, error)
    again = results(fp8_linear, *tensors)
    assert all(torch.equal(again[what], ours) for what, ours in found.items())


def test_a_run_on_the_gpu(workspace):
    changes = {"device": "cuda", "steps": 30}
    main(workspace.settings("bf16", **changes))
    main(workspace.settings("fp8", fp8="true", **changes))
    with use("reference"):
        main(workspace.settings("definition", fp8="true", **changes))
    bf16, fp8, definition = (
        sum(workspace.metrics(run, "loss")[-5:]) for run in ("bf16", "fp8", "definition")
    )
    assert fp8 == pytest.approx(bf16, rel=0.01)
    assert fp8 == pytest.approx(definition, rel=0.01)
