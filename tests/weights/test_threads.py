import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tigon.weights.read import parallel_for


def test_each_job_once_with_the_threads_own_tool() -> None:
    tools: list[list[int]] = []
    left: list[list[int]] = []

    @contextmanager
    def tool() -> Iterator[list[int]]:
        own: list[int] = []
        tools.append(own)
        yield own
        left.append(own)

    parallel_for(range(1000), lambda job, own: own.append(job), tool, 4)
    assert len(tools) == len(left) == 4
    assert sorted(job for own in tools for job in own) == [*range(1000)]
    assert all(own == sorted(own) for own in tools)


def test_after_an_error_of_any_thread_no_more_is_begun() -> None:
    begun: list[int] = []
    failed = threading.Event()

    @contextmanager
    def tool() -> Iterator[None]:
        yield

    def work(job: int, _: None) -> None:
        begun.append(job)
        if job == 1:
            failed.set()
            raise OSError("gone")
        assert failed.wait(60)  # the first thread goes on only when the other has failed
        time.sleep(0.01)

    with pytest.raises(OSError, match="gone"):
        parallel_for(range(1000), work, tool, 2)
    assert len(begun) < 500
