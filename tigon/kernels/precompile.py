"""Compiles the kernels of a pass side by side, before the pass runs.

On fake tensors the pass launches nothing, and what it would launch is noted. Processes forked from
this one compile that into the caches on disk, Triton's and flash-attn-4's, where the real pass
finds it. A kernel that is missed, or fails, is compiled by the real pass.
"""

import gc
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tigon.kernels.attention import fa4
from tigon.kernels.runtime import launch_on_fakes, triton
from tigon.utils.memory import count_cpus

Job = Callable[[], object]  # compiles something
PATIENCE = 60.0  # seconds that a process may take after the block
MOST = 16  # processes: one compiles in some hundred MiB
NO_DEVICE = -1  # a number of a GPU for which Triton has no kernels, so that launches ask its hook
logger = logging.getLogger("tigon")


@dataclass
class Compilation:
    """Whether a pass's kernels were all found and compiled; known after the `with` block."""

    complete: bool = False


@contextmanager
def compile_kernels(run: Callable[[], object]) -> Iterator[Compilation]:
    """Compiles the kernels that `run` launches on fake tensors, while the `with` block runs.

    Leaving the block waits for them. Where `run` raises, later kernels are left out. Nothing that
    goes wrong is an error: the logger `tigon` says it at level DEBUG.
    """
    from torch._subclasses import fake_tensor  # takes a second

    mode, jobs = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), dict[Any, Job]()
    compilation, found_all, processes = Compilation(), False, list[Any]()
    # Triton asks a fake tensor for its address, of which torch warns
    quiet = warnings.catch_warnings(action="ignore")
    try:
        try:
            with quiet, note_launches(jobs, fake_tensor.FakeTensor), mode:
                run()
            found_all = True
        except Exception:
            logger.debug("not all kernels of the first step were found", exc_info=True)
        try:
            with mode:  # in which flash-attn-4 compiles and launches nothing
                # flash-attn-4's kernels take four times as long as most of Triton's
                order = sorted(jobs, key=lambda key: key[0] not in fa4.LAUNCHERS)
                for process in side_by_side([jobs[key] for key in order], fa4.environment()):
                    process.start()
                    processes.append(process)
        except Exception:  # no memory or no right to fork
            found_all = False
            logger.debug("kernels are not compiled side by side", exc_info=True)
        yield compilation
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        compilation.complete = found_all and all(process.exitcode == 0 for process in processes)
    finally:
        for process in processes:
            process.kill()


@contextmanager
def note_launches(jobs: dict[Any, Job], fake: type) -> Iterator[None]:
    """Notes launches in the `with` block instead of making them: `jobs` gets what compiles them."""
    knobs, driver = triton.knobs.runtime, triton.runtime.driver
    hook, active = knobs.jit_cache_hook, driver.active
    target = active.get_current_target()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        job = partial(_compile, active.launcher_cls, target, fn.jit_function, compile)
        jobs.setdefault((fn.jit_function, key), job)
        return True  # neither compile nor launch it

    def launch(launcher: Callable[..., Any], outputs: Callable[..., Any], arguments: Any) -> Any:
        if launcher not in fa4.LAUNCHERS:
            return launcher(*arguments)
        shapes = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in arguments]
        for number, job in enumerate(fa4.compile_jobs(launcher, arguments)):
            jobs.setdefault((launcher, str(shapes), number), job)
        return outputs(*arguments)

    knobs.jit_cache_hook = note
    stub = SimpleNamespace(  # a driver that has compiled no kernel yet
        utils=active.utils,
        get_current_target=lambda: target,
        get_current_device=lambda: NO_DEVICE,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(stub)
    try:
        with launch_on_fakes(launch, fake):
            yield
    finally:
        knobs.jit_cache_hook = hook
        driver.set_active(active)


def _compile(
    launcher: Callable[..., object], target: Any, kernel: Any, launch: dict[str, Any]
) -> None:
    """Compiles a kernel, and the C function that launches it, into Triton's cache."""
    options = json.loads(launch["specialization_data"])["options"]
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    source = triton.compiler.ASTSource(
        kernel, launch["signature"], launch["constants"], launch["configs"][0]
    )
    launcher(source, triton.compile(source, target=target, options=options).metadata)


def side_by_side(jobs: Sequence[Job], environment: Mapping[str, str]) -> list[Any]:
    """Returns forked processes, to be started, that run jobs in this order, each the next one that
    is left; these cannot use the GPU."""
    context, count = get_context("fork"), min(len(jobs), count_cpus(), MOST)
    given = jobs, context.Value("i", 0), environment, os.getpid()
    return [context.Process(target=_work, args=given, daemon=True) for _ in range(count)]


def _work(jobs: Sequence[Job], begun: Any, environment: Mapping[str, str], parent: int) -> None:
    """Runs jobs, of which `begun` counts those of all processes, until none is left, and ends the
    process: with 0 if all of its own have been done."""
    gc.disable()  # it takes a seventh of the time of flash-attn-4's compiler
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the real pass says what is wrong
    fake_tensor = sys.modules["torch._subclasses.fake_tensor"]
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)  # the parent's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    failures = 0
    while os.getppid() == parent:  # else nobody waits any more
        with begun.get_lock():
            index, begun.value = begun.value, begun.value + 1
        if index >= len(jobs):
            break
        try:
            jobs[index]()
        except Exception:
            failures += 1
    os._exit(min(failures, 1))  # nothing of the parent's is cleaned up here
