"""Kernels of the first step, compiled side by side: what is left alone, and what it waits for."""

import multiprocessing
import random
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.models import tiny
from tigon.kernels import precompile
from tigon.models import MODELS
from tigon.settings.load import load
from tigon.train import compile_step as module
from tigon.train.compile_step import compile_step, keep_distinct_blocks, run_step
from tigon.train.distributed import start
from tigon.train.model import meta_model
from tigon.train.optim import adamw
from tigon.train.tasks import TASKS

PLAIN = {"attention": "reference", "micro_batch_size": 2, "batch_size": 2}
TYPES = [*["sliding_attention"] * 2, "full_attention"] * 3
LORA = {"lora.rank": 2, "lora.dropout": 0.2}


@pytest.mark.parametrize("changes", [{}, LORA], ids=["all weights", "adapter"])
def test_a_step_on_fake_tensors_draws_nothing(workspace, monkeypatch, changes):
    given = workspace.settings("fake", eval_data=workspace.held_out, **PLAIN, **changes)
    config = load(None, given)
    norms: list[Any] = []
    clip = module.clip
    monkeypatch.setattr(precompile, "note_launches", lambda *_: nullcontext())
    updated: list[Any] = []
    monkeypatch.setattr(
        adamw.FusedAdamW, "__call__", lambda _, name, slots, *given: updated.extend(slots)
    )

    def clip_by_definition(*given: Any) -> Any:
        norms.append(clip(*given)[0])
        monkeypatch.setattr(adamw, "_fits_kernel", lambda _: True)
        return norms[0], None

    monkeypatch.setattr(module, "clip", clip_by_definition)
    sequences: list[Any] = []
    modes: list[Any] = []
    with start("cpu") as world:
        model, task = meta_model(config, torch.float32), TASKS["sft"](config, world)
        forward = task._forward

        def note_mode(model: Any, inputs: Any, *given: Any) -> Any:
            sequences.append(inputs.batch.mask.sequences())
            modes.append((inputs.training, model.training, torch.is_grad_enabled()))
            return forward(model, inputs, *given)

        monkeypatch.setattr(task, "_forward", note_mode)
        step = partial(run_step, model, task, world.device)
        before = torch.get_rng_state(), random.getstate()
        with precompile.compile_kernels(step):
            pass
    assert [norm.shape for norm in norms] == [()]
    learned = {p for p in model.parameters() if p.requires_grad}
    assert {slot.weight for slot in updated} == learned
    assert modes == [(True,) * 3, (False,) * 3]  # a step, then an evaluation
    assert not sequences[0].even(2 * config.seq_len)  # which would be rows to attention
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("family", MODELS)
def test_distinct_blocks_are_left(family: str) -> None:
    """Each kind is among them, and they are a model still."""
    case = next(iter(tiny.CASES[family].values()))
    config = tiny.their_config(family, **tiny.SIZES | case).get_text_config().to_dict()
    model = MODELS[family].from_config(config, device="cpu")
    before = {module._kind(block) for block in model.model.layers}
    model.activation_checkpointing = 2
    keep_distinct_blocks(model)
    assert {module._kind(block) for block in model.model.layers} == before
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(ids, labels=ids).loss.backward()


def test_blocks_that_are_left() -> None:
    config = {"num_hidden_layers": 9, "sliding_window": 4, "layer_types": TYPES}
    model = MODELS["gemma3_text"].from_config(tiny.SIZES | config, device="meta")
    blocks = list(model.model.layers)
    model.activation_checkpointing = [0, 2, 3]
    keep_distinct_blocks(model)
    assert list(model.model.layers) == [blocks[i] for i in (0, 1, 2, 5)]
    assert model.activation_checkpointing == [0, 2]


def test_experts_of_blocks_that_are_left_are_computed_again() -> None:
    sizes = tiny.SIZES | tiny.CASES["qwen3_moe"]["plain"]
    model = MODELS["qwen3_moe"].from_config(sizes, device="meta")
    model.activation_checkpointing = "experts"
    keep_distinct_blocks(model)
    assert all(block.mlp.experts.recompute_gate_up for block in model.model.layers)


def test_sources_of_keys_and_values() -> None:
    """A block that is left reads those of the same block as before."""
    types = [*["sliding_attention"] * 4, "full_attention"] * 3
    sizes = {"num_hidden_layers": 15, "num_kv_shared_layers": 5, "layer_types": types}
    model = MODELS["gemma4_text"].from_config(tiny.SIZES | sizes, device="meta")
    blocks = list(model.model.layers)
    sources = {block: blocks[block.kv_source] for block in blocks if block.kv_source is not None}
    keep_distinct_blocks(model)
    left = list(model.model.layers)
    found = {block: left[block.kv_source] for block in left if block.kv_source is not None}
    assert len(found) == 3 and found.items() <= sources.items()


@pytest.fixture
def compile_jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiles by these jobs in a process."""

    def compiling(jobs: dict[int, Any], run: Any = lambda: None) -> Any:
        keys = {("kernel", number): job for number, job in jobs.items()}
        monkeypatch.setattr(
            precompile, "note_launches", lambda noted, _: nullcontext(noted.update(keys))
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


def test_slow_kernels_begin_first(tmp_path, monkeypatch):
    """And one that takes long keeps no other from being compiled meanwhile."""
    file, kernels = tmp_path / "begun", [("kernel", n) for n in range(3)]
    slow, others = tmp_path / "slow", tmp_path / "others"

    def note(name: str) -> None:
        with file.open("a") as out:
            out.write(f"{name} ")

    def wait() -> None:
        note("slow")
        while not others.exists():
            time.sleep(0.01)
        slow.touch()

    def fast(number: int) -> None:
        note("fast")
        if number == 2:
            others.touch()

    jobs: dict[Any, Any] = {key: partial(fast, key[1]) for key in kernels} | {(wait, ""): wait}
    monkeypatch.setattr(precompile.fa4, "LAUNCHERS", (wait,))
    monkeypatch.setattr(precompile, "MOST", 2)
    monkeypatch.setattr(precompile, "count_cpus", lambda: 2)
    monkeypatch.setattr(precompile, "note_launches", lambda n, _: nullcontext(n.update(jobs)))
    with precompile.compile_kernels(lambda: None) as compilation:
        pass
    assert compilation.complete and slow.exists()
    assert "slow" in file.read_text().split()[:2]  # of two processes


def test_nothing_that_goes_wrong_ends_a_run(tmp_path, compile_jobs, monkeypatch):
    """A pass that raises leaves kernels out; a machine may let no process fork."""
    file = tmp_path / "done"
    with compile_jobs({0: file.touch}, run=lambda: 1 // 0) as compilation:
        pass
    assert file.exists() and not compilation.complete
    refuse = Mock(side_effect=BlockingIOError("no more processes"))
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
        task = TASKS["sft"](load(None, workspace.settings("once")), world)
        assert count() == 0
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
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
