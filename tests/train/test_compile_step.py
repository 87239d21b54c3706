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


def test_compilers_end_with_the_block(tmp_path, monkeypatch):
    """What they raise is no error, and where the block raises, nothing waits for them."""

    def note(jobs: dict[Any, Any], fake: type) -> Any:
        jobs |= {0: lambda: 1 // 0, 1: (tmp_path / "done").touch, 2: partial(time.sleep, seconds)}
        return nullcontext()

    monkeypatch.setattr(precompile, "note_launches", note)
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda _: range(1))
    seconds, began = 60.0, time.monotonic()
    with pytest.raises(ValueError, match="stop"), precompile.compile_kernels(lambda: None):
        raise ValueError("stop")
    assert time.monotonic() - began < 30
    seconds = 0.0
    with precompile.compile_kernels(lambda: None):
        pass
    assert (tmp_path / "done").exists()
    assert not multiprocessing.active_children()


def test_it_is_done_once(workspace, tmp_path, monkeypatch):
    """For a model and settings; not where something is wrong, nor on a CPU."""
    done: list[int] = []

    @contextmanager
    def compiling(run: Any) -> Any:
        yield
        done.append(1)

    def count(wrong: Exception | None = None, **changes: Any) -> int:
        task.config = load(None, workspace.settings("once", **PLAIN | changes))
        done.clear()
        with compile_step(task, None, None):
            if wrong is not None:
                raise wrong
        return len(done)

    monkeypatch.setenv("TIGON_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "compile_kernels", compiling)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with start("cpu") as world:
        task = find_task("sft")(load(None, workspace.settings("once")), world)
        assert count() == 0
        monkeypatch.setattr(module, "_has_kernels", lambda _: True)
        with pytest.raises(ValueError, match="wrong"):
            count(ValueError("wrong"))
        assert [count(), count(), count(lr=1.0), count(seq_len=16)] == [1, 0, 0, 1]
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        assert count() == 1
        task.world = SimpleNamespace(size=2, device=world.device)
        monkeypatch.setenv("TRITON_CACHE_DIR", "other")
        assert count() == 0
