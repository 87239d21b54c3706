"""The processes that write one checkpoint together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankError(RuntimeError):
    """What stopped another rank stops this one."""


class Writers:
    """Those of a process group, the default one if none is given; or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        grouped = dist.is_initialized()
        self.rank = dist.get_rank(group) if grouped else 0
        self.size = dist.get_world_size(group) if grouped else 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave together; what one rank raises inside stops all of them.

        Inside, no rank may wait for another.
        """
        fault: str | None = None
        try:
            yield
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            faults = self.gather(fault)
        for rank, found in enumerate(faults):
            if found is not None:
                raise RankError(f"rank {rank} stopped with {found}")
