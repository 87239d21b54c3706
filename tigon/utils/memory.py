"""How much memory and how many CPUs a process may use, and lists cut by the memory they take."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2; containers and batch systems limit it here
MEMINFO = Path("/proc/meminfo")
UNKNOWN = 1 << 60  # more than any machine has
# Of errors where memory ends outside of torch's allocator: a driver's, as it loads a kernel, and
# that of cuBLAS and cuDNN
OUT_OF_MEMORY = ("CUDA error: out of memory", "[CUDA]: out of memory", "_STATUS_ALLOC_FAILED")

T = TypeVar("T")


def total_memory(device: torch.device) -> int:
    """Returns the bytes that a GPU has, or that this process may have of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        size = UNKNOWN
    return min(size, _cgroup_limit())


def available_memory() -> int:
    """Returns the bytes of the host's memory that this process may still take."""
    free, used = UNKNOWN, 0
    with suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError, LookupError):
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
    return min(free, _cgroup_limit() - used)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error says that a GPU's memory is used up, for tensors or anything else
    that is kept there."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def count_cpus() -> int:
    """Counts the CPUs that this process may use."""
    count = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(count(0)) if count else os.cpu_count() or 1


def count_rank_cpus() -> int:
    """Counts the CPUs of this process, shared with the ranks of its host; at least 1."""
    return max(1, count_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _cgroup_limit() -> int:
    """Returns the bytes that this process's control group may have; UNKNOWN without a limit."""
    with suppress(OSError, ValueError):  # there is none, or it is the word max
        return int((CGROUP / "memory.max").read_text())
    return UNKNOWN


def check_memory(
    needed: int, device: torch.device, subject: str, error: type[ValueError] = ValueError
) -> None:
    """Raises `error`, beginning with `subject`, if the device has less than `needed` bytes."""
    if needed > (available := total_memory(device)):
        needs, has = format_gib(needed), format_gib(available)
        raise error(f"{subject} {needs} GiB, and {device} has {has}")


def format_gib(size: int) -> str:
    """Formats bytes as a number of GiB, with enough digits for tiny models."""
    gib = size / 2**30
    return f"{gib:,.2f}" if gib >= 1 else f"{gib:.3g}"


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields consecutive items of together at most `limit`, or one item that is larger."""
    part: list[T] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if part and size + item_size > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += item_size
    if part:
        yield part
