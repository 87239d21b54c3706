"""Overlaps what a run does before its first step: data, model and kernels, on one rank.

A process of its own tokenizes into the cache, while this one loads the model and others compile its
kernels. The run then reads the data from the cache, and says what is wrong with them, as it does
without.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tigon.data.cache import train_extra
from tigon.data.sources import BLOCK_BYTES
from tigon.data.tokenized import MIN_PARALLEL_BLOCKS, end_children_with_parent
from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.choices import StepChoice
from tigon.train.compile_step import compile_step, has_kernels
from tigon.train.data import build_encoder, find_entry_sources, tokenize_entries
from tigon.train.signals import handled_signals
from tigon.train.tasks import Task

MIN_BYTES = MIN_PARALLEL_BLOCKS * BLOCK_BYTES  # bytes that are tokenized before a model has loaded


class EarlyModel:
    """The model of a run on one rank, built while its data are tokenized."""

    def __init__(self, build: Callable[..., CausalLM]) -> None:
        self._build = build
        self._built: tuple[Config, CausalLM] | None = None

    def build(
        self,
        choose: Callable[[], StepChoice | None],
        task: Task,
        tokenizer: Tokenizer,
        source: Path | None,
    ) -> StepChoice | None:
        """Returns what `choose` does. If there is much to tokenize, a process begins it; meanwhile
        the model is built and its kernels are compiled, unless that has found data that are wrong.
        What is wrong with the model is said when it is built again."""
        with tokenizer_process(task, tokenizer) as process:
            with launch_first_kernel(task.world.device):
                choice = choose()
            if process is None:
                return choice
            if not process.exitcode:
                with suppress(ValueError, OSError, ImportError), compile_step(task, source, choice):
                    self._built = task.config, self._build(task.config, source, choice)
                    with train_extra():  # takes a second, and comes next
                        import datasets  # noqa: F401
            process.join()
        return choice

    def take(self, config: Config) -> CausalLM | None:
        """Returns the model, and forgets it, if it was built with these settings; else None."""
        built, self._built = self._built, None
        return built[1] if built is not None and built[0] == config else None


@contextmanager
def launch_first_kernel(device: torch.device) -> Iterator[None]:
    """Launches the kernel that tells whether Triton runs on a GPU, while the `with` block runs, and
    waits for it. The block must not fork.

    A thread does it: other programs compile Triton's driver and the kernel, most of a second.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(has_kernels, device)
        yield


@contextmanager
def tokenizer_process(task: Task, tokenizer: Tokenizer) -> Iterator[Any]:
    """Starts the process that tokenizes the data of the task's run, yields it and ends it; yields
    None on several ranks, for streams, and for data that are small.

    Raises ValueError and OSError for data that are not there.
    """
    config, small = task.config, True
    if task.world.size == 1 and not config.streaming:
        sources = find_entry_sources(config, config.data)
        small = sum(source.size() for entry in sources for source in entry) < MIN_BYTES
    if small:
        yield None
        return
    with train_extra():
        import multiprocess  # type: ignore[import-untyped]  # as `datasets`, which has it

    context = multiprocess.get_context("fork")
    process: Any = context.Process(target=_tokenize, args=(task, tokenizer))
    with end_children_with_parent():
        process.start()
    _make_group(process.pid)
    try:
        yield process
    finally:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the workers that it has
        process.join()


def _tokenize(task: Task, tokenizer: Tokenizer) -> None:
    """Tokenizes the data of a run into the cache and ends this process, which it owns; its status
    says whether something is wrong with them, which is not printed."""
    _make_group(0)
    signal.set_wakeup_fd(-1)  # the parent's
    for number in handled_signals():
        signal.signal(number, signal.SIG_DFL)
    status = 1
    try:
        config = task.config
        for items, held_out in ((config.data, False), (config.held_out, True)):
            encoder = build_encoder(task, tokenizer)
            if items:
                corpora = tokenize_entries(config, items, encoder, held_out=held_out, check=False)
                wrong = any(part.report.errors for parts in corpora for part in parts)
                if wrong and not encoder.skip_bad_rows:
                    return
        status = 0
    finally:
        os._exit(status)


def _make_group(process: int) -> None:
    """Puts a process, 0 meaning this one, into a group of its own, unless it is in it already."""
    with suppress(OSError):  # parent and child both do it, as neither may be late
        os.setpgid(process, process)
