"""Data, model and kernels side by side before the first step: results and errors as without."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.train.checkpoints import assert_equal
from tests.train.layouts import load_weights
from tigon.settings.load import load
from tigon.train import main, overlap
from tigon.train.build import load_tokenizer
from tigon.train.distributed import start
from tigon.train.tasks import TASKS

LORA = {"lora.rank": 2, "lora.dropout": 0.2}


@pytest.fixture
def side_by_side(monkeypatch, tmp_path):
    """Lets a function train with a process that tokenizes, or without; counts early models."""
    taken: list[bool] = []
    take = overlap.EarlyModel.take

    def noting(self, config):
        model = take(self, config)
        taken.append(model is not None)
        return model

    monkeypatch.setattr(overlap.EarlyModel, "take", noting)

    def run(settings: list[str], *, on: bool) -> bool:
        monkeypatch.setenv("TIGON_CACHE", str(tmp_path / f"cache-{len(taken)}-{on}"))
        monkeypatch.setattr(overlap, "MIN_BYTES", 0 if on else 1 << 60)
        taken.clear()
        main(settings)
        return taken[-1]

    return run


@pytest.mark.parametrize(
    "changes", [{}, LORA | {"lora.merge": "true"}], ids=["all weights", "adapter"]
)
def test_the_same_bits(workspace, side_by_side, changes, request):
    name, found = request.node.callspec.id.replace(" ", "-"), {}
    for on in (False, True):
        run = f"{name}-{on}"
        own = {"steps": 3, "export": "true", "eval_data": workspace.held_out}
        settings = workspace.settings(run, **own | changes)
        assert side_by_side(settings, on=on) == on
        found[on] = load_weights(workspace.root / run / "hf")
        found[on] |= {"loss": torch.tensor(workspace.metrics(run, "eval_loss"))}
    assert_equal(found[True], found[False])


def bad_rows(folder: Path) -> Path:
    path = folder / "bad.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": 3}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, good, bad)))
    return path


WRONG = [(kind, broken) for kind in ("an empty file", "a bad row") for broken in (False, True)]


@pytest.mark.parametrize(("kind", "broken"), [*WRONG, ("good", True)])
def test_errors_are_the_same(workspace, side_by_side, tmp_path, capfd, kind, broken):
    """Those of the data come first; of a model without weights they are said once, too."""
    changes: dict[str, Any] = {"steps": 1}
    if broken:
        changes["model"] = tmp_path / "model"
        changes["model"].mkdir()
        for file in workspace.model.iterdir():
            if file.suffix != ".safetensors":
                (changes["model"] / file.name).write_bytes(file.read_bytes())
    if kind == "a bad row":
        changes["data"] = bad_rows(tmp_path)
    elif kind == "an empty file":
        changes["data"] = tmp_path / "empty.jsonl"
        changes["data"].touch()
    said = {}
    for on in (False, True):
        with pytest.raises(SystemExit) as stop:
            side_by_side(workspace.settings(f"{tmp_path.name}-{on}", **changes), on=on)
        said[on] = str(stop.value.code)
        assert "Traceback" not in capfd.readouterr().err
    assert said[True] == said[False]
    assert ("jsonl" in said[True]) == (kind != "good")
    assert not list(tmp_path.glob("cache-*/data/*/generator")) or kind == "good"


def test_a_token_of_the_data(workspace, side_by_side, tmp_path):
    """The model gets its row, although it was built before the data were known."""
    model = shutil.copytree(workspace.model, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    added = [f"<new_{i}>" for i in range(tokenizer.get_vocab_size(), size + 1)]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(model / "tokenizer.json"))
    data = tmp_path / "data.jsonl"
    row = {"prompt": "a", "completion": f"b{added[-1]}c"}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    settings = workspace.settings("token", model=model, data=data, steps=1, export="true")
    assert not side_by_side(settings, on=True)
    assert len(load_weights(workspace.root / "token/hf")["model.embed_tokens.weight"]) == size + 1


def test_first_kernel_is_launched_side_by_side(monkeypatch):
    """Its end is waited for; what is wrong is said by the run's own launches."""
    begun, end, done = threading.Event(), threading.Event(), list[torch.device]()

    def launch(device: torch.device) -> None:
        begun.set()
        assert end.wait(30)
        done.append(device)
        raise RuntimeError("no driver")

    monkeypatch.setattr(overlap, "has_kernels", launch)
    with overlap.launch_first_kernel(torch.device("cuda", 1)):
        assert begun.wait(30) and not done
        end.set()
    assert done == [torch.device("cuda", 1)]


def test_processes_end_with_the_run(workspace, monkeypatch):
    """At once, as where the settings are wrong, with all that they have started."""
    config = load(None, workspace.settings("ended"))
    read, write = os.pipe()

    def lasts(*_: Any, **__: Any) -> None:
        if os.fork() == 0:
            time.sleep(60)
        os.write(write, b"x")
        time.sleep(60)

    monkeypatch.setattr(overlap, "tokenize_entries", lasts)
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    with start("cpu") as world:
        task = TASKS["sft"](config, world)
        began = time.monotonic()
        with (
            pytest.raises(ValueError, match="stop"),
            overlap.tokenizer_process(task, load_tokenizer(config)),
        ):
            os.read(read, 1)
            os.close(write)
            raise ValueError("stop")
    assert os.read(read, 1) == b""  # nobody has its other end
    assert time.monotonic() - began < 30
    os.close(read)
