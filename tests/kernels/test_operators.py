"""What holds of every operator in `cases.CASES`, on both paths: values, gradients, autograd."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.cases import CASES, FP8
from tests.kernels.op_case import OpCase, learned
from tests.kernels.operators import (
    assert_exact,
    gradients,
    kinds,
    kinds_and_fp8,
    random_like,
    small_steps,
)
from tigon.kernels import gated_act

__all__ = ["small_steps"]
SIZES = {f"{name}, {size}": (case, size) for name, case in CASES.items() for size in case.sizes}
EMPTY = {
    f"{name}, {size}": (case, size)
    for name, case in {**CASES, **FP8}.items()
    for size in case.empty
}


@pytest.mark.parametrize(("case", "size"), SIZES.values(), ids=SIZES)
def test_forward_and_gradients(case: OpCase, size: Any) -> None:
    assert_exact(case, case.make(size))


@pytest.mark.parametrize(("case", "size"), EMPTY.values(), ids=EMPTY)
def test_empty_inputs_have_empty_gradients(case: OpCase, size: Any) -> None:
    inputs = case.make(size)
    found = case.run(inputs)
    assert [y.shape for y in found] == [y.shape for y in case.run(inputs, case.definition)]
    grads = torch.autograd.grad([y.sum() for y in found], learned(inputs))
    for grad, x in zip(grads, learned(inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


def transposed(x: Tensor) -> Tensor:
    """The same values, the last dimension outermost."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
    "part": lambda x: torch.cat((x[..., :1], x, x[..., :1]), -1)[..., 1 : 1 + x.shape[-1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_upstreams(case: OpCase, layout: str) -> None:
    inputs, change = case.make(), LAYOUTS[layout]
    for name, x in inputs.items():
        # One number for all of a weight, or one row for all, is another input
        if isinstance(x, Tensor) and (layout != "expanded" or x.dim() > 2):
            inputs[name] = change(x.detach()).requires_grad_(x.requires_grad)
    ups = [torch.ones(()).expand(y.shape) for y in case.run(inputs)]
    if layout != "expanded":
        ups = [change(torch.randn(y.shape)) if y.dim() else y.detach() for y in ups]
    assert_exact(case, inputs, ups)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_large_values(act: str) -> None:
    far = torch.tensor([-1e4, -80.0, -20.0, 20.0, 80.0, 1e4])
    x = torch.stack((far, torch.ones(6)), 1).requires_grad_()
    y = gated_act(x, act)
    torch.testing.assert_close(y.flatten(), far.clamp(min=0), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[:, 0], (far > 0).float(), rtol=1e-6, atol=1e-6)


# Sizes of more than 2**31 elements; how many rows at the end, in which dimension, of what
FAR: dict[str, tuple[Any, int, int, tuple[str, ...]]] = {
    "gated_act, silu": ((40_000, 2 * 28_672), 2, 0, ("gate_up",)),
    "cross_entropy, plain": ((9000, 262144), 60, 0, ("logits", "targets", "token_weights")),
    "rope": ((1, 140_000, 128, 1, 128, 128, 1), 2, 1, ("q", "k", "cos", "sin")),
    "qk_norm_rope": ((1, 140_000, 96, 16, 128, 128, 1), 2, 1, ("qkv", "cos", "sin")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAR)
def test_more_than_2_to_the_31_elements(name: str, kernels_only: None) -> None:
    size, rows, dim, names = FAR[name]
    assert_last_rows_are_those_alone(CASES[name], size, rows, dim, names)


def assert_last_rows_are_those_alone(
    case: OpCase, size: Any, rows: int, dim: int, names: tuple[str, ...]
) -> None:
    inputs = case.make(size, torch.bfloat16)

    def last(x: Tensor) -> Tensor:
        return x.narrow(dim, x.shape[dim] - rows, rows)

    tail = {n: last(inputs[n].detach()).clone() for n in names}
    tail = {n: x.requires_grad_(inputs[n].requires_grad) for n, x in tail.items()}
    results = []
    for given in (inputs, inputs | tail):
        found = case.run(given)
        (grad,) = torch.autograd.grad([y.sum() for y in found], given[names[0]])
        results.append([last(x.detach()) for x in (*found, grad)])
    assert all(map(torch.equal, *results))


def test_last_rows_of_small_inputs(kernels_only: None) -> None:
    assert_last_rows_are_those_alone(CASES["gated_act, silu"], (9, 20), 2, 0, ("gate_up",))


@kinds_and_fp8
def test_second_backward_has_the_same_bits(case: OpCase, kernels_only: None) -> None:
    """Also where the first gradients were written to."""
    inputs = case.make()
    found = case.run(inputs)
    ups = random_like(found)
    copied = [up.clone() for up in ups]  # a sum returns it as a gradient
    first = gradients(found, inputs, copied, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.zero_()
    assert all(map(torch.equal, kept, gradients(found, inputs, ups)))


@kinds_and_fp8
def test_second_derivative_is_right_or_refused(case: OpCase, path: str) -> None:
    inputs = case.make()
    total = sum(y.square().sum() for y in case.run(inputs))
    try:
        first = torch.autograd.grad(total, learned(inputs), create_graph=True)
    except RuntimeError as error:
        assert re.search(f"{case.second}.* second derivative", str(error))
        return
    assert path == "reference"  # where it is plain torch
    assert all(grad.requires_grad for grad in first)


@kinds_and_fp8
def test_each_input_may_be_frozen(case: OpCase) -> None:
    """What learns has the same gradient, alone and beside others; without any there is no graph."""
    inputs = case.make()
    found = case.run(inputs)
    ups = random_like(found)
    names = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
    expected = dict(zip(names, gradients(found, inputs, ups), strict=True))
    for wanted in [*([name] for name in names), names[1:]]:
        if wanted:
            some = inputs | {n: inputs[n].detach() for n in names if n not in wanted}
            for name, grad in zip(wanted, gradients(case.run(some), some, ups), strict=True):
                torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5)
    frozen = inputs | {name: inputs[name].detach() for name in names}
    assert not any(y.requires_grad for y in case.run(frozen))
    with torch.no_grad():
        assert all(y.grad_fn is None for y in case.run(inputs))


@kinds_and_fp8
def test_recomputed_operator_has_the_same_bits(case: OpCase) -> None:
    """Non-reentrant checkpointing raises where backward reads what is saved twice."""
    inputs = case.make()
    found = checkpoint(lambda: case.run(inputs), use_reentrant=False)
    expected = case.run(inputs)
    ups = random_like(found)
    ours, theirs = (gradients(y, inputs, ups) for y in (found, expected))
    assert all(map(torch.equal, ours, theirs))


@kinds
def test_one_of_several_outputs_is_used(case: OpCase) -> None:
    inputs = case.make()
    if len(found := case.run(inputs)) == 1:
        pytest.skip("there is one")
    for y, wanted in zip(found, case.run(inputs, case.definition), strict=True):
        up = torch.randn(y.shape)
        ours, theirs = (
            torch.autograd.grad(
                out, learned(inputs), up.to(out.dtype), retain_graph=True, allow_unused=True
            )
            for out in (y, wanted)
        )
        for a, b, x in zip(ours, theirs, learned(inputs), strict=True):
            a, b = (torch.zeros_like(x) if g is None else g for g in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
