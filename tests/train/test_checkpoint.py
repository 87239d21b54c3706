"""Checkpoints as files: what they hold, how damage and links are found, which of them stay."""

import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import tigon
from tests.support.small import write_model
from tests.train.checkpoints import assert_equal, changed_metadata, put_tensors, saved_steps
from tigon.models import MODELS, build, materialize
from tigon.train import checkpoint, main
from tigon.train.checkpoint import files, format, saver
from tigon.train.checkpoint.files import KeepPolicy, SavedStep
from tigon.train.checkpoint.format import StateBlock
from tigon.train.export import load_checkpoint, meta_model_from_checkpoint
from tigon.train.resume import MIN_STEPS
from tigon.weights import Repository
from tigon.weights.files import read_lock


@pytest.fixture
def target(state, tmp_path, world) -> Path:
    """A checkpoint of `state`."""
    with saver.Saver(tmp_path, world) as to:
        return state.save(to, 1)


def test_files_hold_tensors_by_checkpoint_names(state, workspace, target):
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
    checked = os.popen(f"cd {target} && sha256sum --check --strict SHA256SUMS").read()
    assert checked.count(": OK") == len([*target.iterdir()]) - 1


def test_large_states_are_in_several_files(state, tmp_path, world, monkeypatch):
    """Which threads write side by side; only a tensor that is larger makes a file larger."""
    monkeypatch.setattr(format, "FILE", 40_000)
    expected = state.tensors()
    with saver.Saver(tmp_path, world) as to:
        target = state.save(to, 1)
    parts = [load_file(path) for path in target.glob("*.safetensors")]
    assert len(parts) > 10
    for part in parts:
        assert len(part) == 1 or sum(x.nbytes for x in part.values()) <= 40_000
    assert_equal({name: x for part in parts for name, x in part.items()}, expected)
    state.step(seed=2)
    checkpoint.verify(target)
    checkpoint.load(target, state.model, state.optimizer)
    assert_equal(state.tensors(), expected)


def test_several_slices_of_a_tensor_are_all_written(world, tmp_path):
    """As a rank of a tensor-parallel group has them; DCP's own writer keeps the last one only."""
    whole = torch.arange(24.0).view(8, 3)
    pieces = [
        StateBlock("x", (row, 0), whole[row : row + count])
        for row, count in ((0, 2), (5, 3), (2, 3))
    ]
    (tmp_path / "to").mkdir()
    written = format.write_blocks(tmp_path / "to", pieces, 0)
    assert sorted(written) == [f"weights-00000{n}.safetensors" for n in ("-1", "-2", "")]
    for name, digest in written.items():
        assert files.checksum(tmp_path / "to" / name) == digest
    found = torch.zeros(8, 3)
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "to"))
    dcp.load({"x": found}, storage_reader=reader)
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3, "tie_word_embeddings": False}, "lacks lm_head.weight, .*and"),
        ({"intermediate_size": 128}, "resizes model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(target, tmp_path, changes, message):
    other = tigon.from_pretrained(write_model(tmp_path / "other", **changes))
    with pytest.raises(ValueError, match=f"does not fit the model: it {message}"):
        checkpoint.load(target, other)


def test_changed_tensor_files_are_refused(state, target):
    """By somebody who could write the checksums too."""
    path, name = target / "weights-00000.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    half = len(tensor) // 2

    put_tensors(path, tensors)
    slices = ((0, tensor[:half]), (0, tensor[:half]), (len(tensor) - 1, tensor[-1:]))
    for i, (row, rows) in enumerate(slices, 1):
        put_tensors(target / f"weights-{i:05d}.safetensors", {name: rows.contiguous()}, [row, 0])
    with pytest.raises(ValueError, match=f"lacks rows of {name}"):
        checkpoint.load(target, state.model)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("weights-00000", "model.layers.1.mlp.up_proj.weight", math.nan),
        ("optimizer-00000", "optimizer.exp_avg.model.layers.1.mlp.up_proj.weight", -math.inf),
        ("optimizer-00000", "optimizer.exp_avg_sq.model.norm.weight", math.inf),
        ("optimizer-00000", "optimizer.exp_avg_sq.model.layers.0.mlp.up_proj.weight", -0.25),
        ("optimizer-00000", "optimizer.step.model.norm.weight", -2.0),
    ],
)
def test_values_that_no_run_has_are_named(state, target, file, name, value):
    """Under checksums that are right."""
    checkpoint.load(target, state.model, state.optimizer)  # where a first moment is negative
    path = target / f"{file}.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    put_tensors(path, tensors)
    said = re.escape(f"{target} has {value} in {name} ({path.name}), which no run has: resume from")
    with pytest.raises(ValueError, match=said):
        checkpoint.load(target, state.model, state.optimizer)


OFFSET = "run.json has offset={} in its state, .* {} steps at most"  # they would be looked for


@pytest.mark.slow(first=3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": [1]}, "its config is no JSON object"),
        ({"state": {"wisdom": 1}}, "a state that no run has"),
        ({"state": {"rollbacks": 2, "offset": 2**39}}, OFFSET.format(2**39, 2 * MIN_STEPS)),
        ({"state": {"offset": 1}}, OFFSET.format(1, 0)),
        ({"state": {"best_loss": "low"}}, "a state that no run has"),
        ({"state": 3}, "its state is no JSON object"),
        ({"config": None}, "its config is no JSON object"),
        ({"step": 2}, "is of step 2: give it its own name back"),
    ],
)
def test_facts_that_no_run_writes(change, message, workspace, finished, tmp_path):
    """Under checksums that are right."""
    source = shutil.copytree(finished / "checkpoints/step-00000003", tmp_path / "step-00000003")
    with changed_metadata(source) as metadata:
        state = metadata["state"]
        metadata |= change
        if isinstance(change.get("state"), dict):
            metadata["state"] = state | change["state"]
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings("x", run_dir=tmp_path / "run", steps=4, resume=source))
    assert not (tmp_path / "run/checkpoints").exists()


def test_states_of_other_parameters_name_the_groups(state, target):
    norm = state.model.model.norm.weight
    others = [p for p in state.model.parameters() if p is not norm]
    norm.requires_grad_(False)
    state.model.zero_grad()
    with pytest.raises(ValueError, match=r"also has optimizer\.exp_avg\.model\.norm.*freeze other"):
        checkpoint.load(target, state.model, torch.optim.AdamW(others))


DAMAGE = {
    "weights-00000.safetensors": "flip",
    "optimizer-00000.safetensors": "truncate",
    "tokenizer.json": "remove",
    "config.json": "flip",
    "run.json": "truncate",
    "SHA256SUMS": "truncate",
    "weights-00001.safetensors": "add",
}


def damage(path: Path, how: str) -> None:
    if how == "remove":
        path.unlink()
    elif how == "add":
        shutil.copy(path.with_name("weights-00000.safetensors"), path)
    elif how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(("name", "how"), DAMAGE.items())
def test_damaged_checkpoint_falls_back_to_earlier_one(name, how, finished, tmp_path):
    directory = shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    newest = directory / "step-00000003"
    damage(newest / name, how)
    with pytest.raises(ValueError, match=rf"{name} is (damaged|missing|not in SHA256SUMS)"):
        checkpoint.verify(newest)
    said: list[str] = []
    assert checkpoint.newest_complete(directory, said.append) == directory / "step-00000002"
    assert len(said) == 1
    assert name in said[0] and "taking the checkpoint before it" in said[0]


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


HOUR = 3600


def test_which_checkpoints_stay():
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 4.0}
    saved = [(step, step * HOUR / 10, losses.get(step)) for step in range(10, 61, 10)]
    assert KeepPolicy(last=2).choose(saved) == {50, 60}
    assert KeepPolicy(last=0).choose(saved) == {10, 20, 30, 40, 50, 60}
    assert KeepPolicy(last=1, best=2).choose(saved) == {20, 30, 60}
    assert KeepPolicy(last=1, best=9).choose(saved) == {10, 20, 30, 50, 60}
    assert KeepPolicy(last=1, hours=2.5).choose(saved) == {10, 40, 60}
    put_back = [(step, hour * HOUR, None) for step, hour in enumerate((900, 0, 1, 2))]
    assert KeepPolicy(last=1, hours=1).choose(put_back) == {0, 1, 2, 3}  # a clock
    left: list[SavedStep] = []  # pruned after each save: the same ones stay for ever
    for s in saved:
        chosen = KeepPolicy(last=1, hours=2.5).choose([*left, s])
        left = [kept for kept in [*left, s] if kept[0] in chosen]
    assert [kept[0] for kept in left] == [10, 40, 60]


def test_retention_spares_best_locked_and_last_good(workspace, tmp_path):
    main(
        workspace.settings(
            "kept", eval_data=workspace.held_out, eval_every=1, steps=5, save_every=1,
            keep_last=1, keep_best=1, lr=1e-2, schedule="constant",
        )
    )  # fmt: skip
    evaluated = dict(zip(range(6), workspace.metrics("kept", "eval_loss"), strict=True))
    best = min(range(1, 5), key=evaluated.__getitem__)  # the last is saved before it is evaluated
    assert saved_steps(workspace.root / "kept") == sorted({f"step-{best:08d}", "step-00000005"})

    for step in (1, 2, 3, 9):
        (tmp_path / f"step-{step:08d}").mkdir()
    with read_lock(tmp_path / "step-00000001"):
        files.prune(tmp_path, 3, KeepPolicy(last=1), {})
        assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "3", "9"]  # 9 is no news
    files.prune(tmp_path, 3, KeepPolicy(last=1), {})
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "9"]


def test_files_of_the_user_in_checkpoints_stay(workspace):
    """It is not removed when newer ones are there, and keeps them when it is written again."""
    run = workspace.root / "noted"
    settings = workspace.settings("noted", steps=3, save_every=1, keep_last=0)
    main(settings)
    for step in (1, 3):
        (run / f"checkpoints/step-0000000{step}/notes").mkdir()
        (run / f"checkpoints/step-0000000{step}/notes/mine.md").write_text("mine")
    (run / "checkpoints/step-00000003/run.json").write_text("damaged")
    main([*settings, "resume=auto", "steps=4", "keep_last=1"])
    assert saved_steps(run) == ["step-00000001", "step-00000003", "step-00000004"]
    for step in (1, 3):
        assert (run / f"checkpoints/step-0000000{step}/notes/mine.md").read_text() == "mine"
        checkpoint.verify(run / f"checkpoints/step-0000000{step}")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "run.json", "weights-00000.safetensors", "new.json"]
)
@pytest.mark.parametrize("pipe", [False, True])
def test_nothing_in_a_checkpoint_leads_out_of_it(workspace, finished, tmp_path, name, pipe):
    """One that somebody gave away reads nothing but its own files."""
    source = shutil.copytree(finished / "checkpoints/step-00000003", tmp_path / "step-00000003")
    private = tmp_path / name
    if (source / name).exists():
        (source / name).rename(private)
    else:
        private.write_text("{}")
    if pipe:
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to(private)
    match = f"{source / name} is no file but a pipe" if pipe else f"{name} is a link to {private}"
    model = build(Repository(workspace.model), MODELS, dtype=torch.float32)[0]
    materialize(model, torch.device("cpu"))
    for read in (
        lambda: checkpoint.verify(source),
        lambda: load_checkpoint(source),
        lambda: meta_model_from_checkpoint(source),
        lambda: checkpoint.load(source, model),
    ):
        with pytest.raises(ValueError, match=match):
            read()
