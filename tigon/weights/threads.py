"""Work that threads share."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

Job = TypeVar("Job")
Tool = TypeVar("Tool")


def spread(
    jobs: Iterable[Job],
    work: Callable[[Job, Tool], None],
    tool: Callable[[], AbstractContextManager[Tool]],
    workers: int,
) -> None:
    """`work` on each job, begun in this order, by threads that each have a tool of their own.

    What one raises is raised here; after it no more jobs are begun.
    """
    queue = deque(jobs)

    def run() -> None:
        try:
            with tool() as own:
                while True:
                    try:
                        job = queue.popleft()
                    except IndexError:
                        return
                    work(job, own)
        except BaseException:
            queue.clear()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(run) for _ in range(workers)]:
                done.result()
        except BaseException:  # an interrupt: the threads end after what they have in hand
            queue.clear()
            raise
