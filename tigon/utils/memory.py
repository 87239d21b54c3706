"""How much memory a machine has."""

import os
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2; containers and batch systems limit it here
UNKNOWN = 1 << 60  # more than any machine has


def total_memory(device: torch.device, cgroup: Path = CGROUP) -> int:
    """Returns the bytes that a GPU has, or that this process may have of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # not on Windows
        limits = [UNKNOWN]
    with suppress(OSError, ValueError):  # there is none, or it is the word max
        limits.append(int((cgroup / "memory.max").read_text()))
    return min(limits)


def check_memory(
    needed: int, device: torch.device, what: str, error: type[ValueError] = ValueError
) -> None:
    """Raises `error` if the device has less than `needed` bytes, which `what` takes."""
    if needed > (available := total_memory(device)):
        needs, has = format_gib(needed), format_gib(available)
        raise error(f"{what} {needs}, and {device} has {has}")


def format_gib(size: int) -> str:
    """Formats a number of bytes in GiB, with one decimal."""
    return f"{size / 2**30:,.1f} GiB"
