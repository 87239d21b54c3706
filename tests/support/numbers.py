"""How near to the truth a computation in floating point has to be.

A tolerance such as 1e-5 is what one CPU happens to give: another instruction set, another BLAS or
another number of threads adds in another order. So a test that compares two computations takes the
truth in float64, and a peer that computes the same in the dtype of what is tested, and asks:

    error of what is tested <= 2 * error of the peer + 4 * eps of the dtype

- An error is the root mean square of the difference, relative to that of the truth. The largest
  difference of thousands varies far more from one CPU to another.
- Of tensors tested together, such as all gradients of a model, the peer's worst error counts. How
  much rounding grows on the way (the gradients of keys nearly cancel) is a property of the model;
  what is left of it in one small tensor is chance, by a factor of 4 on a single CPU.
- The floor is for the peer's luck where the result is one number, such as a loss: it may be exact.
  Storing a result costs up to eps / 2, and so do the last sum, logarithm and division.

Code paths that must agree bit for bit are compared with `torch.equal` instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FACTOR = 2.0  # of the peer's error
FLOOR = 4.0  # eps
SANE = 1000.0  # eps: a peer as far off as this computes something else


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference, relative to that of `truth`, in float64."""
    assert found.shape == truth.shape
    exact = truth.detach().double()
    scale = exact.norm().item()
    assert scale > 0, "a truth of zeros compares nothing"
    return (found.detach().double() - exact).norm().item() / scale


def assert_as_near(
    found: Tensor | dict[str, Tensor],
    peer: Tensor | dict[str, Tensor],
    truth: Tensor | dict[str, Tensor],
) -> None:
    """`found` is as near to `truth`, which is float64, as `peer` is, by the rule above."""
    ours, theirs, exact = ({"": x} if isinstance(x, Tensor) else x for x in (found, peer, truth))
    assert ours.keys() == theirs.keys() == exact.keys()
    assert all(t.dtype == torch.float64 for t in exact.values())
    (dtype,) = {t.dtype for t in (*ours.values(), *theirs.values())}
    eps = torch.finfo(dtype).eps
    yardstick = max(relative_error(t, exact[name]) for name, t in theirs.items())
    assert yardstick <= SANE * eps, f"the peer is {yardstick:.1e} off: is it the same function?"
    for name, t in ours.items():
        error, allowed = relative_error(t, exact[name]), FACTOR * yardstick + FLOOR * eps
        assert error <= allowed, f"{name}: {error:.2e}, {allowed:.2e} allowed"


class _Promote(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def promoted(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(promoted, args), **{k: promoted(v) for k, v in (kwargs or {}).items()})


class _Refuse(TorchDispatchMode):
    """No operator gives a floating-point tensor of another dtype than float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                assert x.dtype == torch.float64, f"{func} gives {x.dtype}"
        return out


@contextmanager
def float64() -> Iterator[None]:
    """Everything inside computes in float64, also where the code asks for float32 by name.

    transformers does so in norms, softmax, RoPE, routing and the loss, whatever the model's dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote(), _Refuse():
            yield
    finally:
        torch.set_default_dtype(before)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 values toward zero and away from it, in float64."""
    _, exponent = torch.frexp(x.double())
    spacing = torch.ldexp(torch.ones_like(x).double(), (exponent - 8).clamp(min=-133))
    toward = (x.double() / spacing).trunc() * spacing
    return toward, toward + x.double().sign() * spacing
