"""Every test of an operator runs on both paths: plain torch, and Triton's kernels.

The kernels run on a GPU where there is one, else under Triton's interpreter.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._device
from torch import Tensor
from torch._dynamo import trace_rules

import tigon.kernels

CUDA = torch.cuda.is_available()
# Remembered at their first call, which must come before allocations are poisoned: a test that
# compiles something would let the compiler of all later ones know the poison as torch's own
torch.utils._device._device_constructors()
trace_rules.get_tensor_method()
trace_rules.get_torch_obj_rule_map()


@pytest.fixture(
    autouse=True, params=["reference", pytest.param("triton", marks=pytest.mark.kernel)]
)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The path that this run of the test takes, on the GPU if there is one."""
    torch.set_default_device("cuda" if CUDA else "cpu")
    with tigon.kernels.use(request.param):
        yield request.param
    torch.set_default_device(None)


@pytest.fixture
def kernels_only(path: str) -> None:
    if path == "reference":
        pytest.skip("about the kernels")


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that Tigon allocates without filling it holds NaN, not luckily zeros."""
    if request.node.get_closest_marker("traced"):
        return  # Dynamo cannot look through it, and remembers what it saw

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals["__name__"]
            return (
                out.fill_(float("nan"))
                if caller.startswith("tigon.") and out.is_floating_point()
                else out
            )

        return poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
