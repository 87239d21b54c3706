"""Exports that are written while training goes on."""

import os
import threading

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.train.checkpoints import State
from tests.train.ranks import Ranks
from tigon.train import background_export, checkpoint
from tigon.train.background_export import Exporter
from tigon.train.checkpoint import saver
from tigon.train.distributed import start
from tigon.weights.write import RankError


def export(to, state, target):
    to.export(state.model, target, state.tokenizer, dtype=torch.bfloat16)


def weights(state):
    return {name: p.detach().bfloat16() for name, p in state.model.state_dict().items()}


def exported(target):
    return tigon.from_pretrained(target).state_dict()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_it_has_the_values_of_its_moment_and_one_waits_for_another(state, tmp_path, monkeypatch):
    pwrite, slow, begun = os.pwrite, threading.Event(), threading.Event()

    def wait(*arguments):
        begun.set()
        assert slow.wait(60)
        return pwrite(*arguments)

    first = weights(state)
    with Exporter(state.world) as to:
        monkeypatch.setattr(os, "pwrite", wait)
        export(to, state, tmp_path / "a")
        assert begun.wait(60)
        state.step(seed=2)  # training goes on
        assert not (tmp_path / "a").exists()
        threading.Timer(0.2, slow.set).start()
        export(to, state, tmp_path / "b")
        assert_same(exported(tmp_path / "a"), first)
        second = weights(state)
        state.step(seed=3)
    assert_same(exported(tmp_path / "b"), second)
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_stops_one_is_raised_by_the_next(state, tmp_path, monkeypatch):
    export(Exporter(state.world, background=False), state, tmp_path / "a")
    before = load_file(tmp_path / "a/model.safetensors")
    state.step(seed=2)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with Exporter(state.world) as to:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            export(to, state, tmp_path / "a")
            with pytest.raises(checkpoint.SaveError, match=r"a was not written: .*became full"):
                export(to, state, tmp_path / "b")
        to.wait()
        assert_same(load_file(tmp_path / "a/model.safetensors"), before)
        assert os.listdir(tmp_path) == ["a"]
        export(to, state, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator")]
)
def test_too_little_memory_to_write_is_said_of_the_export(state, tmp_path, monkeypatch, error):
    def no_memory(*arguments, **options):
        raise error

    monkeypatch.setattr(background_export, "write_model", no_memory)
    with pytest.raises(checkpoint.SaveError) as caught, Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
    assert str(caught.value) == f"{tmp_path}/a was not written: {error!r}"


def test_without_memory_for_a_copy_training_waits(state, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    with Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
        assert_same(exported(tmp_path / "a"), weights(state))


def on_ranks(model, target):
    """One rank's part cannot be written at first, then not be copied; then all can."""
    with start("cpu") as world, Exporter(world) as to:
        state, pwrite = State(model, world), os.pwrite

        def full(*arguments):
            raise OSError(28, "No space left on device")

        os.pwrite = full if world.rank else pwrite
        export(to, state, target)
        try:
            to.wait()
        except checkpoint.SaveError as error:
            assert "No space left" in str(error) or "became full" in str(error), error
        else:
            raise AssertionError("one rank has written half")
        assert not target.exists()
        os.pwrite = pwrite

        def no_memory(*arguments):
            raise MemoryError("for the copy")

        with pytest.MonkeyPatch.context() as patch:
            if world.rank:
                patch.setattr(background_export, "copy_to_host", no_memory)
            with pytest.raises((MemoryError, RankError), match="for the copy"):
                export(to, state, target)
        export(to, state, target)


def test_what_stops_one_rank_stops_all(workspace, state, tmp_path):
    Ranks(2, on_ranks, workspace.model, tmp_path / "out").finish()
    assert_same(exported(tmp_path / "out"), weights(state))
    assert os.listdir(tmp_path) == ["out"]
