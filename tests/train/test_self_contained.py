"""A run's directory and its checkpoints in place of a model, for every command."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import tigon
from tests.train.checkpoints import assert_equal
from tests.train.ranks import train_on
from tigon.cli import main as command
from tigon.train import main

__all__ = ["tigon"]


@pytest.fixture(scope="module")
def run(workspace, tmp_path_factory) -> Path:
    """A finished run, whose base model and data are gone."""
    base = shutil.copytree(workspace.model, tmp_path_factory.mktemp("base") / "model")
    changes = {"model": base, "steps": 2, "save_every": 1, "lr": 1e-2, "export": "true"}
    main(workspace.settings("self-contained", **changes))
    shutil.rmtree(base)
    return workspace.root / "self-contained"


def test_every_command_takes_a_run_or_a_checkpoint(run, tigon, tmp_path, workspace):
    first = run / "checkpoints/step-00000001"
    for name, *more in (("generate", "the model reads"), ("eval perplexity", workspace.held_out)):
        expected = tigon(*name.split(), run / "hf", *more)
        assert tigon(*name.split(), run, *more) == expected
        assert tigon(*name.split(), run / "checkpoints/step-00000002", *more) == expected
    other = tigon("eval", "perplexity", first, workspace.held_out)
    assert other != expected
    tigon("export", run, tmp_path / "hf")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (run / "hf" / name).read_bytes()
    # That of the run is the checkpoint's file, with what torch reads shards by in its header
    written, linked = (load_file(of / "hf/model.safetensors") for of in (tmp_path, run))
    assert_equal(written, linked)
    tigon("export", first, tmp_path / "first", "--dtype", "bfloat16")
    weights = load_file(first / "weights-00000.safetensors")
    exported = load_file(tmp_path / "first/model.safetensors")
    assert all(torch.equal(exported[name], t.bfloat16()) for name, t in weights.items())

    described, checkpoint = (tigon("info", path, "--check") for path in (run / "hf", run))
    own = ("  files", "  tensors")
    same = [line for line in described.splitlines()[1:] if not line.startswith(own)]
    assert same == [l for l in checkpoint.splitlines()[1:] if not l.startswith(own)]  # noqa: E741
    assert "optimizer in float32 0.6 MiB, weights in float32 0.3 MiB\n" in checkpoint
    assert "files         checkpoint step-00000002, 8 files, " in checkpoint
    assert "parity" in tigon("eval", "parity", run, "--new-tokens", "4")


def test_damaged_weights_are_not_used(run, tmp_path, capfd):
    copy = shutil.copytree(run / "checkpoints/step-00000002", tmp_path / "step-00000002")
    (copy / "optimizer-00000.safetensors").unlink()  # no command needs it
    assert command(["info", str(copy)]) == 0
    assert command(["export", str(copy), str(tmp_path / "hf")]) == 0
    with open(copy / "weights-00000.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    capfd.readouterr()
    assert command(["export", str(copy), str(tmp_path / "other")]) == 1
    assert "weights-00000.safetensors is damaged" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_two_ranks_pass_over_a_damaged_checkpoint_together(workspace):
    settings = workspace.settings("pair-damaged", steps=4, save_every=2, keep_last=0)
    train_on(2, settings)
    path = workspace.root / "pair-damaged/checkpoints/step-00000004/weights-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    losses = workspace.metrics("pair-damaged", "loss")
    printed = train_on(2, [*settings, "resume=auto"])
    assert printed.count("weights-00001.safetensors is damaged") == 1
    assert "step-00000002" in printed
    assert path.read_bytes() == whole
    assert workspace.metrics("pair-damaged", "loss") == losses
