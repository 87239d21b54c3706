"""Kernels of the first step, compiled side by side: what is left alone, and what it waits for."""

import multiprocessing
import random
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tigon.kernels import precompile
from tigon.train import compile_step as module
from tigon.train.compile_step import compile_step, compute_gradients
from tigon.train.config_file import load
from tigon.train.distributed import start
from tigon.train.model import meta_model
from tigon.train.tasks import find_task

PLAIN = {"attention": "reference", "micro_batch_size": 2, "batch_size": 2}
LORA = {"lora.rank": 2, "lora.dropout": 0.2}


@pytest.mark.parametrize("changes", [{}, LORA], ids=["all weights", "adapter"])
def test_a_step_on_fake_tensors_draws_nothing(workspace, monkeypatch, changes):
    config = load(None, workspace.settings("fake", **PLAIN, **changes))
    norms: list[Any] = []
    clip = module.clip
    monkeypatch.setattr(module, "clip", lambda *given: norms.append(clip(*given)[0]))
    monkeypatch.setattr(precompile, "note_launches", lambda *_: nullcontext())
    with start("cpu") as world:
        model = meta_model(config, torch.float32)
        step = partial(compute_gradients, model, find_task("sft")(config, world), world.device)
        before = torch.get_rng_state(), random.getstate()
        with precompile.compile_kernels(step):
            pass
    assert [norm.shape for norm in norms] == [()]  # it came to its end
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.fixture
def compile_jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiles by these jobs in a process."""

    def compiling(jobs: dict[int, Any], run: Any = lambda: None) -> Any:
        monkeypatch.setattr(
            precompile, "note_launches", lambda noted, _: nullcontext(noted.update(jobs))
        )
        return precompile.compile_kernels(run)

    monkeypatch.setattr(precompile, "MOST", 1)
    return compiling


def test_compilers_end_with_the_block(tmp_path, compile_jobs):
    """Where the block raises, nothing waits for them; what they raise is no error."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="stop"), compile_jobs({0: partial(time.sleep, 60)}):
        raise ValueError("stop")
    assert time.monotonic() - began < 30
    for job, complete in ((lambda: 1 // 0, False), (lambda: None, True)):
        file = tmp_path / str(complete)
        with compile_jobs({0: job, 1: file.touch}) as compilation:
            pass
        assert file.exists() and compilation.complete == complete
    assert not multiprocessing.active_children()


def test_nothing_that_goes_wrong_ends_a_run(tmp_path, compile_jobs, monkeypatch):
    """A pass that raises leaves kernels out; a machine may let no process fork."""
    file = tmp_path / "done"
    with compile_jobs({0: file.touch}, run=lambda: 1 // 0) as compilation:
        pass
    assert file.exists() and not compilation.complete

    def refuse(*_: Any) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(precompile.os, "fork", refuse)
    with compile_jobs({0: lambda: None}) as compilation:
        pass
    assert not compilation.complete


def test_it_is_done_once(workspace, tmp_path, monkeypatch):
    """For a model and settings; not where something is wrong, nor on a CPU."""
    done: list[int] = []
    complete = True

    @contextmanager
    def compiling(run: Any) -> Any:
        yield SimpleNamespace(complete=complete)
        done.append(1)

    def count(wrong: Exception | None = None, **changes: Any) -> int:
        task.config = load(None, workspace.settings("once", **PLAIN | changes))
        done.clear()
        with compile_step(task, None, None):
            if wrong is not None:
                raise wrong
        return len(done)

    monkeypatch.setattr(module.triton.knobs.cache, "dir", str(tmp_path / "new"))
    monkeypatch.setattr(module, "compile_kernels", compiling)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with start("cpu") as world:
        task = find_task("sft")(load(None, workspace.settings("once")), world)
        assert count() == 0
        monkeypatch.setattr(module, "_has_kernels", lambda _: True)
        with pytest.raises(ValueError, match="wrong"):
            count(ValueError("wrong"))
        complete = False
        assert count() == 1
        complete = True
        assert [count(), count(), count(lr=1.0), count(seq_len=16)] == [1, 0, 0, 1]
        monkeypatch.setattr(module.triton.knobs.cache, "dir", str(tmp_path / "other"))
        task.world = SimpleNamespace(size=2, device=world.device)
        assert count() == 0
        task.world = world
        assert count() == 1
