"""Checkpoints as files: what they hold, how they are written, checked, kept and read again."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import tigon
from tests.small import EXPERTS, write_model
from tigon.cli import main as command
from tigon.train import checkpoint, main
from tigon.train.checkpoint import files, integrity, legacy, memory, retention, saver, storage
from tigon.train.checkpoint.retention import Keep, Saved
from tigon.train.checkpoint.tensors import LocalRows, optimizer_states, weights
from tigon.train.parallel import start

Usage = namedtuple("Usage", "total used free")


class State:
    """A model after one step of AdamW, and what a Saver wants besides."""

    def __init__(self, directory: Path, world):
        self.model = tigon.from_pretrained(directory).train()
        self.tokenizer = tigon.Tokenizer.from_pretrained(directory)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.world = world
        self.step(seed=1)

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def save(self, to: saver.Saver, step: int) -> Path:
        return to.save(step, self.model, self.optimizer, self.tokenizer, {"config": {}})

    def tensors(self) -> dict[str, torch.Tensor]:
        state = weights(self.model) | optimizer_states(self.model, self.optimizer)
        return {n: torch.cat([c.rows for c in rows.chunks]).clone() for n, rows in state.items()}


@pytest.fixture
def world():
    with start("cpu") as world:
        yield world


@pytest.fixture
def state(workspace, world):
    return State(workspace.model, world)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_files_hold_the_tensors_by_their_names_in_checkpoints(state, workspace, tmp_path):
    with saver.Saver(tmp_path, state.world) as to:
        target = state.save(to, 7)
    assert {path.suffix for path in target.iterdir()} == {".safetensors", ".json", ""}
    assert [path.name for path in target.iterdir() if not path.suffix] == ["SHA256SUMS"]
    own = load_file(target / "weights-00000.safetensors")
    assert own.keys() == load_file(workspace.model / "model.safetensors").keys()
    attention = state.model.model.layers[0].self_attn.qkv_proj.weight
    q, k, v = (own[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(torch.cat([q, k, v]), attention)
    states = load_file(target / "optimizer-00000.safetensors")
    assert_equal(own | states, state.tensors())
    name = "optimizer.exp_avg.model.layers.1.mlp.up_proj.weight"
    up = state.model.model.layers[1].mlp.gate_up_proj.weight
    assert torch.equal(states[name], state.optimizer.state[up]["exp_avg"][96:])
    assert states["optimizer.step.model.norm.weight"].item() == 1
    assert os.popen(f"cd {target} && sha256sum --check --strict SHA256SUMS").read().count(
        ": OK"
    ) == (len([path for path in target.iterdir() if path.is_file()]) - 1)


def test_a_model_with_experts_comes_back(world, tmp_path):
    experts = write_model(tmp_path / "experts", **EXPERTS)
    state = State(experts, world)
    with saver.Saver(tmp_path, world) as to:
        target = state.save(to, 1)
    expected = state.tensors()
    state.step(seed=2)
    assert any(not torch.equal(t, expected[n]) for n, t in state.tensors().items())
    checkpoint.load(target, state.model, state.optimizer)
    assert_equal(state.tensors(), expected)


def test_several_slices_of_a_tensor_are_all_written(world, tmp_path):
    """As a rank of a tensor-parallel group has them; DCP's own writer keeps the last one only."""
    whole = torch.arange(24.0).view(8, 3)
    pieces = [saver.Chunk(row, whole[row : row + count]) for row, count in ((0, 2), (5, 3), (2, 3))]
    (tmp_path / "to").mkdir()
    written: dict[str, str] = {}
    dcp.save(
        {"x": LocalRows((8, 3), torch.float32, pieces)},
        storage_writer=storage.Writer(tmp_path / "to", written.update),
    )
    assert sorted(written) == [f"weights-00000{n}.safetensors" for n in ("-1", "-2", "")]
    for name, digest in written.items():
        assert integrity.checksum(tmp_path / "to" / name) == digest
    found = torch.zeros(8, 3)  # read on another layout
    halves = [saver.Chunk(0, found[:4]), saver.Chunk(4, found[4:])]
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "to"))
    dcp.load({"x": LocalRows((8, 3), torch.float32, halves)}, storage_reader=reader)
    assert torch.equal(found, whole)


def test_a_checkpoint_that_does_not_fit_is_refused(state, tmp_path, world):
    with saver.Saver(tmp_path, world) as to:
        target = state.save(to, 1)
    other = tigon.from_pretrained(
        write_model(tmp_path / "deep", num_hidden_layers=3, tie_word_embeddings=False)
    )
    with pytest.raises(ValueError, match=r"does not fit the model: it lacks lm_head.weight, .*and"):
        checkpoint.load(target, other)
    wide = tigon.from_pretrained(write_model(tmp_path / "wide", intermediate_size=128))
    with pytest.raises(ValueError, match=r"it resizes model.layers.0.mlp.down_proj.weight"):
        checkpoint.load(target, wide)


DAMAGE = {
    "weights-00000.safetensors": "flip",
    "optimizer-00000.safetensors": "truncate",
    "tokenizer.json": "remove",
    "config.json": "flip",
    "run.json": "truncate",
    "SHA256SUMS": "truncate",
}


def damage(path: Path, how: str) -> None:
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(workspace):
    main(workspace.settings("finished", steps=3, save_every=1, keep_last=0))
    return workspace.root / "finished"


@pytest.mark.parametrize(("name", "how"), DAMAGE.items())
def test_damage_is_found_and_the_checkpoint_before_is_taken(name, how, finished, tmp_path):
    directory = shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    newest = directory / "step-00000003"
    damage(newest / name, how)
    with pytest.raises(ValueError, match=rf"{newest / name} is (damaged|missing)"):
        checkpoint.verify(newest)
    said: list[str] = []
    assert checkpoint.newest_whole(directory, said.append) == directory / "step-00000002"
    assert len(said) == 1
    assert str(newest / name) in said[0] and "taking the checkpoint before it" in said[0]


def test_resuming_around_a_damaged_checkpoint_replaces_it(workspace, finished, capsys):
    run = shutil.copytree(finished, workspace.root / "damaged")
    settings = workspace.settings("damaged", steps=3, save_every=1, keep_last=1)
    weights_file = run / "checkpoints/step-00000003/weights-00000.safetensors"
    whole = weights_file.read_bytes()
    os.truncate(weights_file, 1000)
    with pytest.raises(SystemExit, match=r"weights-00000.safetensors is damaged: its SHA-256"):
        main([*workspace.settings("elsewhere"), f"resume={weights_file.parent}"])
    main([*settings, "resume=auto"])
    printed = capsys.readouterr().out
    assert "is damaged" in printed and "resumed from" in printed and "step-00000002" in printed
    assert weights_file.read_bytes() == whole
    assert workspace.metrics("damaged", "loss") == workspace.metrics("finished", "loss")
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000003"]
    damage(weights_file, "flip")
    with pytest.raises(SystemExit, match=r"no checkpoint in .* is whole: .*weights-00000"):
        main([*settings, "resume=auto"])


def test_a_save_in_the_background_has_the_values_of_its_moment(state, tmp_path, monkeypatch):
    expected, written = state.tensors(), storage._write
    slow, order = threading.Event(), []

    def wait(*arguments):
        slow.wait(60)
        order.append("written")
        return written(*arguments)

    monkeypatch.setattr(storage, "_write", wait)
    with saver.Saver(tmp_path, state.world) as to:
        first = state.save(to, 1)
        state.step(seed=2)  # training goes on
        later = state.tensors()
        assert not first.exists() and not order
        threading.Timer(0.5, slow.set).start()
        state.save(to, 2)  # waits for the first
        assert first.exists() and order[:2] == ["written", "written"]
    assert checkpoint.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-00000002"
    for target, tensors in (
        (first, expected),
        (checkpoint.latest(tmp_path / "checkpoints"), later),
    ):
        checkpoint.verify(target)
        checkpoint.load(target, state.model, state.optimizer)
        assert_equal(state.tensors(), tensors)


@pytest.mark.parametrize("background", [False, True])
def test_what_stops_a_save_is_raised_and_nothing_of_it_stays(
    background, state, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with saver.Saver(tmp_path, state.world, background=background) as to:
        first = state.save(to, 1)
        to.wait()
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(
            checkpoint.SaveError,
            match=r"^.*step-00000002 was not written: the disk became full while .*weights-00000.* "
            r"was written: 0\.\d MiB needed, [\d.]+ GiB free$",
        ):
            state.save(to, 2)
            to.wait()
        monkeypatch.undo()
        assert [path.name for path in first.parent.iterdir()] == ["step-00000001"]
        state.save(to, 3)  # the next one may succeed
    checkpoint.verify(tmp_path / "checkpoints/step-00000003")


def test_a_run_on_a_full_disk_ends_in_one_line(workspace, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 19))
    with pytest.raises(SystemExit) as error:
        main(workspace.settings("full", steps=2, save_every=1))
    message = str(error.value)
    assert "\n" not in message
    assert "step-00000001 was not written: the disk of" in message
    assert message.endswith("is too full: 0.9 MiB needed, 0.5 MiB free")
    assert list((workspace.root / "full/checkpoints").iterdir()) == []


@pytest.mark.parametrize("where", ["weight", "state"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_not_saved(where, value, state, tmp_path):
    with saver.Saver(tmp_path, state.world) as to:
        state.save(to, 1)
        p = state.model.model.layers[1].mlp.down_proj.weight
        tensor = p.data if where == "weight" else state.optimizer.state[p]["exp_avg_sq"]
        tensor[3, 5] = value
        name = ("" if where == "weight" else "exp_avg_sq of ") + "model.layers.1.mlp.down_proj"
        with pytest.raises(FloatingPointError, match=f"not finite: {name}.weight$"):
            state.save(to, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    if where == "weight":
        with pytest.raises(FloatingPointError, match="not finite"):
            checkpoint.check_finite(state.model)
    else:
        checkpoint.check_finite(state.model)


HOUR = 3600


def test_which_checkpoints_stay():
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 4.0}
    saved = [Saved(step, step * HOUR / 10, losses.get(step)) for step in range(10, 61, 10)]
    assert Keep(last=2).choose(saved) == {50, 60}
    assert Keep(last=0).choose(saved) == {10, 20, 30, 40, 50, 60}
    assert Keep(last=1, best=2).choose(saved) == {20, 30, 60}
    assert Keep(last=1, best=9).choose(saved) == {10, 20, 30, 50, 60}
    assert Keep(last=1, hours=2.5).choose(saved) == {10, 40, 60}
    left: list[Saved] = []  # pruned after each save: the same ones stay for ever
    for s in saved:
        chosen = Keep(last=1, hours=2.5).choose([*left, s])
        left = [kept for kept in [*left, s] if kept.step in chosen]
    assert [kept.step for kept in left] == [10, 40, 60]


def test_retention_spares_the_best_those_in_use_and_the_last_good_one(workspace, tmp_path):
    main(
        workspace.settings(
            "kept", eval_data=workspace.held_out, eval_every=1, steps=5, save_every=1,
            keep_last=1, keep_best=1, lr=1e-2, schedule="constant",
        )
    )  # fmt: skip
    evaluated = dict(zip(range(6), workspace.metrics("kept", "eval_loss"), strict=True))
    best = min(range(1, 5), key=evaluated.__getitem__)  # the last is saved before it is evaluated
    names = sorted(path.name for path in (workspace.root / "kept/checkpoints").iterdir())
    assert names == sorted({f"step-{best:08d}", "step-00000005"})

    for step in (1, 2, 3, 9):
        (tmp_path / f"step-{step:08d}").mkdir()
    with files.in_use(tmp_path / "step-00000001"):
        retention.prune(tmp_path, 3, Keep(last=1), {})
        assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "3", "9"]  # 9 is no news
    retention.prune(tmp_path, 3, Keep(last=1), {})
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "9"]


def test_leftovers_are_removed_but_not_those_of_a_live_run(state, tmp_path):
    (tmp_path / "checkpoints/.step-00000004.partial").mkdir(parents=True)
    (tmp_path / "checkpoints/.step-00000002.removed").mkdir()
    live = tmp_path / "checkpoints/.step-00000008.partial"
    live.mkdir()
    with files.in_use(live), saver.Saver(tmp_path, state.world) as to:
        saved = state.save(to, 1)
        to.wait()
        assert sorted((tmp_path / "checkpoints").iterdir()) == [live, saved]


def save_as_before(directory: Path, step: int, state: State, facts: dict) -> Path:
    """What versions before this format wrote."""
    target = directory / f"step-{step:08d}"
    parameters = {name: p.detach() for name, p in state.model.named_parameters()}
    states = dict(get_optimizer_state_dict(state.model, state.optimizer))["state"]
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=target)
    (target / "run.json").write_text(json.dumps({"step": step, **facts}))
    return target


def test_checkpoints_of_earlier_versions_are_read(state, workspace, tmp_path):
    target = save_as_before(tmp_path, 4, state, {})
    checkpoint.verify(target)
    expected = state.tensors()
    state.step(seed=2)
    checkpoint.load(target, state.model, state.optimizer)
    assert_equal(state.tensors(), expected)
    stored = next(target.glob("*.distcp"))
    os.truncate(stored, stored.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{stored} is damaged: it has \d+ bytes of \d+"):
        checkpoint.verify(target)


def test_a_run_of_an_earlier_version_goes_on(workspace, finished, tmp_path, capsys):
    run = workspace.root / "earlier"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("step-*"))
    source = finished / "checkpoints/step-00000002"
    with start("cpu") as world:
        state = State(workspace.model, world)
        checkpoint.load(source, state.model, state.optimizer)
        facts = {k: v for k, v in checkpoint.facts(source).items() if k in ("data", "config")}
        facts["config"].pop("async_save")
        old = save_as_before(run / "checkpoints", 2, state, facts)
    assert (old / ".metadata").is_file()
    assert command(["export", str(old), str(tmp_path / "hf")]) == 0
    assert_equal(
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(source / "weights-00000.safetensors"),
    )
    main([*workspace.settings("earlier", steps=3, save_every=1, keep_last=0), "resume=auto"])
    assert workspace.metrics("earlier", "loss") == workspace.metrics("finished", "loss")
    new, expected = (d / "checkpoints/step-00000003" for d in (run, finished))
    for name in ("weights-00000.safetensors", "optimizer-00000.safetensors"):
        assert (new / name).read_bytes() == (expected / name).read_bytes()


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_cannot_run_code(state, tmp_path):
    target = save_as_before(tmp_path, 4, state, {})
    good = (target / ".metadata").read_bytes()
    sign = tmp_path / "ran"
    (target / ".metadata").write_bytes(pickle.dumps(Evil(sign), protocol=2))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: posix\.mkdir is not allowed"):
        checkpoint.verify(target)
    with pytest.raises(Exception, match="not allowed"):
        checkpoint.load(target, state.model)
    metadata = pickle.loads(good)
    for name in metadata.state_dict_metadata:  # an object where the model has a tensor
        metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    metadata.storage_data = {
        dcp.metadata.MetadataIndex(index.fqn): info for index, info in metadata.storage_data.items()
    }
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    stored = next(target.glob("*.distcp"))
    stored.write_bytes(pickle.dumps(Evil(sign), protocol=2).ljust(stored.stat().st_size, b"."))
    with pytest.raises(Exception, match="is a pickled object, not a tensor"):
        checkpoint.load(target, state.model)
    (target / ".metadata").write_bytes(good)  # and where a tensor is announced
    with pytest.raises(Exception, match=r"Weights only load failed|UnpicklingError|invalid"):
        checkpoint.load(target, state.model)
    assert not sign.exists()
    (target / ".metadata").write_bytes(good)
    for text in (b"cbuiltins\neval\n.", b"ctorch\nload\n.", b"cos\nsystem\n."):
        (target / ".metadata").write_bytes(text)
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            legacy.read_metadata(target)


def test_memory_for_the_copy(tmp_path, state, capsys):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:    800 kB\n")
    assert memory.available(meminfo, tmp_path) == 800 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory.available(meminfo, tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available(meminfo, tmp_path) == 800 * 1024


def test_without_memory_for_a_copy_training_waits(state, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saver, "available", lambda: 1000)
    to = saver.Saver(tmp_path, state.world)
    assert state.save(to, 1).exists()
    assert state.save(to, 2).exists()
    assert capsys.readouterr().out.count("async_save: no host memory for a copy") == 1
    assert to._stager.buffers == {}


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.train.test_checkpoint import State
from tigon.train.checkpoint import Keep, newest_whole, saver
from tigon.train.parallel import start

model, root = map(Path, sys.argv[1:])
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
moment = 0
while True:
    moment += 1
    child = os.fork()
    if child == 0:
        count = 0
        def hook(event, arguments):
            global count
            if event in EVENTS and str(arguments[0]).startswith(str(root / "checkpoints")):
                count += 1
                if count == moment * 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        with start("cpu") as world:
            state = State(model, world)
            with saver.Saver(root, world, keep=Keep(last=1), background=moment % 2 == 0) as to:
                if newest_whole(root / "checkpoints") is None:
                    state.save(to, 1)
                    to.wait()
                sys.addaudithook(hook)
                state.save(to, 1 + moment)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = []
    whole = newest_whole(root / "checkpoints", said.append)
    print(moment, status, whole.name, said)
    assert whole is not None and not said, said
    if status == 0:
        break
    assert status == -signal.SIGKILL
"""


def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_stays(workspace, tmp_path):
    """At every third file operation, in turn; what has a checkpoint's name is whole."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(workspace.model), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) > 5, done.stdout


def test_exports_while_training(workspace):
    run = workspace.root / "exports"
    main(
        workspace.settings(
            "exports", eval_data=workspace.held_out, eval_every=1, steps=4, hf_every=2,
            save_every=1, keep_last=0, hf_best="true", export="true", lr=1e-2, schedule="constant",
        )
    )  # fmt: skip
    names = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert names == ["checkpoints", "hf", "hf-best", "hf-step-00000002", "hf-step-00000004"]
    losses = workspace.metrics("exports", "eval_loss")[1:]
    best = 1 + min(range(4), key=losses.__getitem__)
    for name, step in (("hf-step-00000002", 2), ("hf-best", best), ("hf", 4)):
        exported = load_file(run / name / "model.safetensors")
        assert_equal(
            exported, load_file(run / f"checkpoints/step-{step:08d}/weights-00000.safetensors")
        )
        assert (run / name / "tokenizer.json").is_file()
    with pytest.raises(SystemExit, match="hf_best needs eval_data"):
        main(workspace.settings("never", hf_best="true"))


def test_a_run_needs_no_base_model_to_go_on(workspace, tmp_path):
    base = shutil.copytree(workspace.model, tmp_path / "base")
    settings = workspace.settings("moved", model=base, steps=4, save_every=2)
    main(workspace.settings("stayed", steps=4, save_every=2))
    main([*settings, "steps=2", "schedule=constant"])
    main([*workspace.settings("stayed2", steps=2), "schedule=constant"])
    shutil.rmtree(base)
    before = time.time()
    main([*settings, "resume=auto", "schedule=constant", "export=true"])
    main([*workspace.settings("stayed2", steps=4), "resume=auto", "schedule=constant"])
    assert workspace.metrics("moved", "loss") == workspace.metrics("stayed2", "loss")
    newest = checkpoint.latest(workspace.root / "moved/checkpoints")
    assert checkpoint.facts(newest)["saved_at"] >= before
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        original = (workspace.model / name).read_bytes()
        assert (newest / name).read_bytes() == original
        assert (workspace.root / "moved/hf" / name).read_bytes() == original
