"""Checks of values that may be on a device, which the host does not wait for unless asked to."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

# What a device's assertion may say: torch takes a longer one for an error of its own
MOST_BYTES = 254
AND_THEN = "; TIGON_CHECKS=1 raises where it happens, and says which"
CUT = " ..."
_SETTINGS = {"": False, "0": False, "1": True}


def _from_environment() -> bool:
    setting = os.environ.get("TIGON_CHECKS", "")
    if setting not in _SETTINGS:
        raise ValueError(f"TIGON_CHECKS={setting!r} is not 0 or 1")
    return _SETTINGS[setting]


_wait = _from_environment()


@contextlib.contextmanager
def checks(*, wait: bool) -> Iterator[None]:
    """With `wait`, a check of values on a GPU waits for the device and raises ValueError.

    Without, the device asserts: nobody waits, but a failed assertion ends the process's use of the
    GPU. The environment variable TIGON_CHECKS=1 turns waiting on everywhere; graphs, traced or
    captured, never wait.
    """
    global _wait
    before, _wait = _wait, wait
    try:
        yield
    finally:
        _wait = before


def has_values(x: Tensor) -> bool:
    """Whether `x` holds numbers now: it is not traced, not on meta, and no fake tensor."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return type(x) in (Tensor, torch.nn.Parameter)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func is at work on one of them."""
    if torch.compiler.is_compiling():
        return False
    return any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors if x is not None)


def on_host(x: Tensor) -> bool:
    """Whether looking at a value costs nothing: no device sync, no graph break."""
    return x.device.type == "cpu" and has_values(x)


def may_wait(x: Tensor) -> bool:
    """Whether the host may look at a value: it is on the host, or checks wait for the device."""
    if not has_values(x):
        return False
    if x.device.type != "cuda":
        return True
    return _wait and not torch.cuda.is_current_stream_capturing()


def check(ok: Tensor, message: str) -> None:
    """Raise unless `ok`; on a GPU the device asserts, unless checks wait for it."""
    if may_wait(ok):
        if not ok:
            raise ValueError(message)
    elif not ok.is_meta:
        end = "" if torch.compiler.is_compiling() else AND_THEN
        torch._assert_async(ok, shorten(message, MOST_BYTES - len(end)) + end)


def shorten(message: str, most: int) -> str:
    """The message, or its beginning, of at most so many bytes."""
    encoded = message.encode()
    if len(encoded) <= most:
        return message
    return encoded[: most - len(CUT)].decode(errors="ignore") + CUT


def integer_labels(labels: Tensor, name: str = "labels") -> Tensor:
    """Labels of any integer dtype as int64; TypeError for bool, float and what is no tensor."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} is a {type(labels).__name__}, not a tensor of integers")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} is {labels.dtype}: labels are integers, -100 is ignored")
    return labels.long()
