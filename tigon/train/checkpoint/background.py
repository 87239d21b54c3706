"""What is written while training goes on, and its end."""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self


class SaveError(OSError):
    """A checkpoint or an export could not be written; those before it are untouched."""


def has_failed(writing: Future[Any]) -> bool:
    return writing.done() and writing.exception() is not None


class InBackground(ABC):
    """Leaving its `with` block waits for what is being written, and raises what stopped it."""

    @abstractmethod
    def wait(self) -> None:
        """Until it is on the disk; raises SaveError, on all ranks, if it failed."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether this rank knows already that what is being written cannot be: `wait` raises it,
        and soon on the other ranks too, which are told what one of them met."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except SaveError as second:
            if error is None:
                raise
            error.add_note(str(second))
