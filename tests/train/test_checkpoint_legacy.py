"""Checkpoints of earlier versions, which have a pickle."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.small import CHATML
from tests.train.checkpoints import State, assert_equal
from tigon.cli import main as command
from tigon.train import checkpoint, main
from tigon.train.checkpoint import legacy
from tigon.train.parallel import start


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
    # run.json may be anybody's: what it names elsewhere is not exported
    private = tmp_path / "private.jinja"
    private.write_text(CHATML)
    text = (old / "run.json").read_text()
    named = json.loads(text)
    named["config"]["chat_template"] = str(private)
    (old / "run.json").write_text(json.dumps(named))
    capsys.readouterr()
    assert command(["export", str(old), str(tmp_path / "other")]) == 1
    assert (
        "does not have: put a copy of that file there, as private.jinja" in capsys.readouterr().err
    )
    (old / "private.jinja").symlink_to(private)
    assert command(["export", str(old), str(tmp_path / "other")]) == 1
    assert "outside of" in capsys.readouterr().err
    (old / "private.jinja").unlink()
    private.rename(old / "private.jinja")
    assert command(["export", str(old), str(tmp_path / "other")]) == 0
    assert (tmp_path / "other/chat_template.jinja").read_text() == CHATML
    (old / "private.jinja").unlink()
    (old / "run.json").write_text(text)
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
    with pytest.raises(Exception, match=r"Weights only load|UnpicklingError|invalid|cannot be"):
        checkpoint.load(target, state.model)
    assert not sign.exists()
    (target / ".metadata").write_bytes(good)
    for text in (b"cbuiltins\neval\n.", b"ctorch\nload\n.", b"cos\nsystem\n."):
        (target / ".metadata").write_bytes(text)
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            legacy.read_metadata(target)
