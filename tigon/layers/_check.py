"""Checks of values that may be on a device, which the host does not wait for."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether looking at a value costs nothing: no device sync, no graph break."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check(ok: Tensor, message: str) -> None:
    """Raise unless `ok`; on a GPU the device raises, without a host sync."""
    if on_host(ok):
        if not ok:
            raise ValueError(message)
    else:
        torch._assert_async(ok, message)
