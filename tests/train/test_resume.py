"""A run directory has one run, and a run that is stopped, killed or moved goes on exactly."""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.small import CHATML, EXPERTS, LLAMA, write_chats, write_model
from tests.train.checkpoints import saved_steps
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import Ranks
from tigon.train import load, logging, main
from tigon.train.build import load_tokenizer
from tigon.train.logging import RunLog
from tigon.train.resume import claim

STEPS = {"steps": 7, "save_every": 2, "warmup_steps": 2}
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "eval_loss")


@pytest.fixture(scope="module")
def whole(workspace):
    """A run without interruption."""
    main(workspace.settings("whole", eval_data=workspace.held_out, eval_every=3, **STEPS))
    return workspace.root / "whole"


def test_resume_after_signal_is_bitwise_equal(workspace, whole, monkeypatch):
    settings = workspace.settings("stopped", eval_data=workspace.held_out, eval_every=3, **STEPS)
    log = RunLog.log

    def interrupt(self, row, samples=()):
        log(self, row, samples)
        if row["step"] == 3 and "loss" in row:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunLog, "log", interrupt)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        main(settings)
    monkeypatch.undo()
    run = workspace.root / "stopped"
    # It came in the evaluation after step 3, which is left to the run that goes on
    assert saved_steps(run)[-1] == "step-00000003"
    assert workspace.metrics("stopped", "eval_loss") == workspace.metrics("whole", "eval_loss")[:1]
    with (run / "metrics.jsonl").open("a") as file:  # as a kill in the next step leaves it
        file.write('{"step": 4, "loss": 0}\n{"step": 5, "lo')
    main([*settings, "resume=auto"])
    assert len(workspace.metrics("stopped", "loss")) == 7
    assert_same_metrics(workspace, "whole", "stopped", *KEYS, rel=0)
    assert saved_steps(run) == ["step-00000006", "step-00000007"]  # keep_last=2


def test_finished_runs_stay_and_can_be_extended(workspace, capsys):
    settings = workspace.settings("longer", schedule="constant", epochs=1, export="true")
    main(settings)
    steps = len(workspace.metrics("longer", "loss"))
    main([*settings, "resume=auto"])
    assert "is finished: nothing left to do" in capsys.readouterr().out
    main([*settings, "resume=auto", "epochs=2", "lr=1e-3"])
    printed = capsys.readouterr().out
    assert "epochs 1 -> 2" in printed and "lr 0.003 -> 0.001" in printed
    assert workspace.metrics("longer", "step") == list(range(1, 2 * steps + 1))
    assert workspace.metrics("longer", "lr")[-1] == 1e-3
    assert (workspace.root / "longer/hf/model.safetensors").exists()


def test_another_model_is_refused(workspace, tmp_path):
    """Of another type or size; the same one may have moved."""
    settings = workspace.settings("of a model", schedule="constant", steps=1)
    main(settings)
    for name, sizes in (("experts", EXPERTS), ("deep", {"num_hidden_layers": 3})):
        write_model(other := tmp_path / name, **sizes)
        with pytest.raises(SystemExit, match=f", and {other} is a "):
            main([*settings, "resume=auto", "steps=2", f"model={other}"])
    shutil.copytree(workspace.model, moved := tmp_path / "moved")
    main([*settings, "resume=auto", "steps=2", f"model={moved}"])
    assert workspace.metrics("of a model", "step") == [1, 2]


def test_recomputation_may_change(workspace, capsys):
    write_model(experts := workspace.root / "experts", **EXPERTS)
    given = {"model": experts, "schedule": "constant"}
    for run, steps, setting in (("kept", 2, "false"), ("again", 1, "experts"), ("again", 2, "2")):
        more = {"steps": steps, "activation_checkpointing": setting}
        main([*workspace.settings(run, **given, **more), *["resume=auto"] * (setting == "2")])
    assert 'activation_checkpointing "experts" -> 2' in capsys.readouterr().out
    assert_same_metrics(workspace, "kept", "again", rel=0)


@pytest.mark.parametrize("kind", ["muse_glimmer", "gemma3"])
def test_text_models_of_multimodal_configs(workspace, tmp_path, kind):
    """Random weights for a config.json around the text's, as Muse's checkpoints have it."""
    text = {**LLAMA, "model_type": f"{kind}_text", "vocab_size": 320, "head_dim": 16}
    config = {"model_type": kind, "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = {"model": "", "init": tmp_path / "config.json", "tokenizer": workspace.model}
    settings = workspace.settings(kind, save_every=1, schedule="constant", **start)
    main([*settings, "steps=1"])
    main([*settings, "steps=2", "resume=auto"])
    assert workspace.metrics(kind, "step") == [1, 2]


def test_tokenizer_outlives_its_checkpoint(workspace, whole, tmp_path, monkeypatch):
    """And leaves nothing elsewhere, as ranks may end without cleaning up."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    source = shutil.copytree(sorted((whole / "checkpoints").iterdir())[-1], tmp_path / "step-7")
    config = load(None, workspace.settings("whole", **STEPS))
    tokenizer = load_tokenizer(config, source)
    expected = (source / "tokenizer.json").read_bytes()
    shutil.rmtree(source)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == expected
    assert not list((tmp_path / "tmp").iterdir())


def test_another_data_stream_is_refused(workspace, whole, tmp_path):
    settings = workspace.settings("whole", **STEPS)
    with pytest.raises(SystemExit, match=r"another order of the data: batch_size 4 -> 2"):
        main([*settings, "resume=auto", "batch_size=2"])
    other = write_chats(tmp_path / "other.jsonl", 43, seed=9)
    with pytest.raises(SystemExit, match=r"made with other data than .*other\.jsonl"):
        main([*settings, "resume=auto", f"data={other}"])
    (template := tmp_path / "chat.jinja").write_text(CHATML + "{# another #}")
    message = r"or by an earlier version of Tigon \(settings that differ: chat_template .* -> "
    with pytest.raises(SystemExit, match=message):
        main([*settings, "resume=auto", f"chat_template={template}"])


def test_an_existing_run_is_never_overwritten(workspace, whole, tmp_path):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    settings = workspace.settings("whole", **STEPS)
    with pytest.raises(SystemExit, match="whole is not empty: give resume=auto"):
        main(settings)
    main([*settings, "resume=auto", "export=false"])  # all steps are done
    first = whole / "checkpoints/step-00000006"
    with pytest.raises(SystemExit, match=r"already has step-00000007: to go on from .*00006"):
        main([*settings, f"resume={first}"])
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        main([*workspace.settings("fresh"), f"resume={tmp_path}"])
    assert not (workspace.root / "fresh").exists()
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert {path.name for path in changed} <= {".lock"}


# A run directory has one run, and a run that was killed gets its directory back.


def hold(settings: list[str]) -> None:
    with claim(load(None, settings)):
        print("held")
        time.sleep(600)


def killed_before_its_first_row(settings: list[str]) -> None:
    def killed(self, step):
        os.kill(os.getpid(), signal.SIGKILL)

    logging.RunLog.rewind = killed
    main(settings)


def test_run_dir_is_locked_while_its_run_lives(workspace, tmp_path):
    """A second run is told of the first, and removes nothing of what that one writes."""
    run = tmp_path / "run"
    settings = workspace.settings("x", run_dir=run, steps=1)
    first = Ranks(1, hold, settings)
    try:
        until = time.monotonic() + 200
        while first.printed != "held\n":
            assert time.monotonic() < until and first.codes == [None], first.errors
            time.sleep(0.01)
        who = f"is in use by process {first.processes[0].pid} on {socket.gethostname()}: wait until"
        for resume in ("false", "auto"):
            with pytest.raises(SystemExit, match=who):
                main([*settings, f"resume={resume}"])
            assert (resume == "auto") == (run / LEFT[0]).exists()
            leave(run)
        assert all((run / name).exists() for name in (*LEFT, *LEFT_FILES))
    finally:
        first.kill()
    main([*settings, "resume=auto"])  # the lock died with its holder
    assert (run / "metrics.jsonl").read_text() and not (run / LEFT[0]).exists()


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("resume", ["false", "auto"])
def test_run_killed_before_its_first_row_restarts(workspace, tmp_path, resume):
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=1, resume=resume)
    killed = Ranks(1, killed_before_its_first_row, settings)
    assert killed.one_ended(200) and killed.codes == [-signal.SIGKILL], killed.errors
    assert (tmp_path / "run/config.yaml").exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()
    main(settings)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


def test_what_is_not_a_runs_is_left_alone(workspace, tmp_path):
    """Nor does a claim that fails leave anything behind."""
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    settings = workspace.settings("x", run_dir=tmp_path, resume="auto")
    with pytest.raises(SystemExit, match="is not empty, and holds no run: choose another run_dir"):
        main(settings)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    config = load(None, workspace.settings("x", run_dir=tmp_path / "a/b/c"))
    with claim(config):
        assert (tmp_path / "a/b/c/.lock").exists()
    assert not (tmp_path / "a").exists()
    with claim(config):
        Path(config.run_dir, "config.yaml").write_text("")
    assert (tmp_path / "a/b/c/.lock").exists()


LEFT = (
    f"checkpoints/.step-00000003.tmp-{'0a' * 8}",
    f"checkpoints/.step-00000002.tmp-{'0a' * 8}",
    f".hf.tmp-{'0a' * 8}",
    f".adapter-step-00000002.old-{'0a' * 8}",
    f".hf-best.tmp-{'1b' * 8}",
)
LEFT_FILES = (
    f".report.html.{'2c' * 8}",
    f".config.yaml.{'2c' * 8}",
    f"..exported.{'2c' * 8}",
    f".predictions-step-00000004.jsonl.{'2c' * 8}",
    ".rank-3-0123abcd",
    ".hf.lock",
)
MINE = (
    ".report.html.swp",
    ".report.html.mine",
    f"report.html.{'2c' * 8}",
    ".notes.partial",
    ".rank-mine-1",
    "checkpoints/.step-mine/notes.md",
    "checkpoints/.step-1.tmp-bak/notes.md",
    ".hf.tmp-mine/notes.md",
    f".other.tmp-{'0a' * 8}/notes.md",
)


def leave(run: Path) -> None:
    """What a killed run leaves, and files of the user's that are named nearly so."""
    for name in LEFT:
        (run / name).mkdir(parents=True, exist_ok=True)
        (run / name / "half").touch()
    (run / "adapter-step-00000002").mkdir(exist_ok=True)
    for name in (*LEFT_FILES, *MINE):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("process 1 on nowhere" if name.endswith("lock") else "mine")
    (run / "metrics.jsonl").touch()


def test_what_a_killed_run_left_is_removed(workspace, tmp_path):
    run = tmp_path / "run"
    config = load(None, workspace.settings("x", run_dir=run, resume="auto"))
    leave(run)
    (tmp_path / "page").write_text("mine")
    (run / f".report.html.{'3d' * 8}").symlink_to(tmp_path / "page")
    (run / f".hf.tmp-{'3d' * 8}").symlink_to(tmp_path)
    with claim(config):
        for name in (*LEFT, *LEFT_FILES):
            assert not os.path.lexists(run / name), name
        for name in MINE:
            assert (run / name).read_text() == "mine", name
        for name in LEFT:  # a live run's own
            (run / name).mkdir()
        with claim(config):
            assert all((run / name).is_dir() for name in LEFT)
    assert (tmp_path / "page").read_text() == "mine"


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "name", ["hf", "checkpoints", "adapter", "hf-best", "report.html", "metrics.jsonl", "profile"]
)
def test_links_in_run_dir_are_refused(workspace, tmp_path, name):
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    (run / ".lock").touch()
    (run / "data").symlink_to(tmp_path)  # not the run's
    mine.mkdir()
    (mine / "notes.md").write_text("mine")
    (run / name).symlink_to(mine)
    settings = workspace.settings("x", run_dir=run, resume="auto", steps=1)
    said = f"{run / name} is a link to {mine}, and the run would write there: remove the link"
    with pytest.raises(SystemExit, match=said):
        main(settings)
    assert [path.name for path in mine.iterdir()] == ["notes.md"]
    (run / name).unlink()
    (tmp_path / "named").symlink_to(run)  # the user's own name for it
    main([*settings, f"run_dir={tmp_path}/named"])
    assert (run / "metrics.jsonl").read_text()
