"""Checks of values that may be on a device, which the host does not wait for."""

import torch
from torch import Tensor

from tigon.kernels._triton import has_values


def on_host(tensor: Tensor) -> bool:
    """Whether looking at a value costs nothing: no device sync, no graph break."""
    return tensor.device.type == "cpu" and has_values(tensor)


def check(ok: Tensor, message: str) -> None:
    """Raise unless `ok`; on a GPU the device raises, without a host sync."""
    if on_host(ok):
        if not ok:
            raise ValueError(message)
    else:
        torch._assert_async(ok, message)
