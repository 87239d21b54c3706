import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that Tigon allocates without filling it holds NaN, not luckily zeros."""

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
