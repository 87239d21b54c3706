"""The data of a run from its settings: mixtures, streams, `tigon data pack`."""

import json

import pytest

from tests.small import write_chats
from tests.train.ranks import train_on
from tigon.cli import main as tigon
from tigon.data import Format
from tigon.data.selection import is_held_out
from tigon.train import main

KEYS = ("loss", "grad_norm", "tokens", "supervised_tokens")


@pytest.fixture(scope="module")
def other(workspace):
    return write_chats(workspace.root / "other.jsonl", 19, seed=7)


def assert_same(workspace, run: str, whole: str) -> None:
    for key in KEYS:
        expected = workspace.metrics(whole, key)
        got = workspace.metrics(run, key)
        assert got == expected[len(expected) - len(got) :], (run, key)


def test_streamed_windows_train_as_cached_ones_and_resume(workspace, other, capsys):
    """With weights: the first epoch."""
    mixture = f"[{{path: {workspace.data}, weight: 3}}, {{path: {other}, weight: 1}}]"
    same = {"data": mixture, "shuffle_window": 16, "batch_size": 2, "steps": 8}
    main(workspace.settings("cached", **same))
    printed = capsys.readouterr().out
    assert f"75.0% of {workspace.data}: an epoch takes its 43 examples 1.08 times" in printed
    assert f"25.0% of {other}: an epoch takes its 19 examples 0.82 times" in printed
    main(workspace.settings("streamed", **same, streaming="true", save_every=3))
    assert_same(workspace, "streamed", "cached")
    source = workspace.root / "streamed/checkpoints/step-00000006"
    resumed = {**same, "streaming": "true", "resume": source, "workers": 0}
    main(workspace.settings("streamed-on", **resumed))
    assert_same(workspace, "streamed-on", "cached")
    assert workspace.metrics("streamed-on", "step") == [7, 8]
    train_on(2, workspace.settings("streamed-two", **resumed))
    for key in KEYS:
        expected = workspace.metrics("cached", key)[-2:]
        assert workspace.metrics("streamed-two", key) == pytest.approx(expected, rel=1e-5), key
    with pytest.raises(SystemExit, match="with another order of the data: shuffle_window 16 -> 8"):
        main(workspace.settings("x", **resumed | {"shuffle_window": 8}))


def test_files_of_a_stream_may_not_change_before_it_is_resumed(workspace, tmp_path, capsys):
    data = write_chats(tmp_path / "data.jsonl", 30)
    same = {"data": data, "shuffle_window": 8, "batch_size": 2, "workers": 0, "streaming": "true"}
    settings = workspace.settings("x", run_dir=tmp_path / "run", **same)
    main([*settings, "steps=2", "log_every=1"])
    printed = capsys.readouterr().out
    assert "step 2/2  loss" in printed and "epoch" not in printed  # which nobody knows
    text = data.read_text()
    for changed, message in (
        (
            text.replace("model", "medal", 1),
            r"tigon\.train: .*step-00000002 was made with other data than",
        ),
        (text + text, r"tigon\.train: .*step-00000002 was made with other data than"),
    ):
        data.write_text(changed)
        with pytest.raises(SystemExit, match=message):
            main([*settings, "steps=3", "resume=auto"])
    data.write_text(text)
    main([*settings, "steps=3", "resume=auto"])


def test_bad_mixtures(workspace):
    for weight in (0, -1):
        entry = f"[{{path: {workspace.data}, weight: {weight}}}]"
        with pytest.raises(SystemExit, match=f"weight={weight} of .* must be above 0"):
            main(workspace.settings("x", data=entry))
    entry = f"[{{path: {workspace.held_out}, weight: 1}}]"
    with pytest.raises(SystemExit, match="eval_data has weights"):
        main(workspace.settings("x", eval_data=entry))


def test_pack_makes_the_cache_and_reports(workspace, other, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path))
    settings = [f"model={workspace.model}", "seq_len=128", "device=cpu"]
    assert tigon(["data", "pack", str(other), *settings]) == 0
    printed = capsys.readouterr().out
    assert "data: 19 examples, " in printed and "of them padding" in printed
    assert "0 cut, 0 left out" in printed and str(tmp_path / "data") in printed
    made = sorted(path for path in (tmp_path / "data").iterdir() if path.is_dir())
    assert len(made) == 1
    config = tmp_path / "config.yaml"
    config.write_text(f"data: [{other}]\nmodel: {workspace.model}\nrun_dir: {tmp_path}/run\n")
    assert tigon(["data", "pack", str(config), "seq_len=64"]) == 0
    assert sorted(p for p in (tmp_path / "data").iterdir() if p.is_dir()) == made
    assert not (tmp_path / "run").exists()
    assert tigon(["data", "pack", f"[{{path: {other}}}]", *settings]) == 1
    assert f"write data='[{{path: {other}}}]'" in capsys.readouterr().err
    assert tigon(["data", "pack", str(config), str(other)]) == 1
    assert "give one config file, or data files" in capsys.readouterr().err


def test_eval_fraction_holds_out_rows_of_data(workspace, tmp_path, capsys):
    """The run equals one with the same rows in two files."""
    parts = {True: [], False: []}
    for line in workspace.data.read_text().splitlines():
        parts[is_held_out(json.loads(line), Format(), 0.3)].append(line)
    for held_out, lines in parts.items():
        (tmp_path / f"{held_out}.jsonl").write_text("\n".join(lines))
    same = {"steps": 2, "batch_size": 2, "eval_every": 1}
    files = {"data": tmp_path / "False.jsonl", "eval_data": tmp_path / "True.jsonl"}
    main(workspace.settings("fraction-files", **same, **files))
    run = {**same, "data": workspace.data, "eval_data": "[]", "eval_fraction": 0.3}
    main(workspace.settings("fraction", **run))
    for key in ("loss", "eval_loss", "supervised_tokens"):
        assert workspace.metrics("fraction", key) == workspace.metrics("fraction-files", key)
    main(workspace.settings("fraction-stream", **run, streaming="true"))
    for key in ("loss", "eval_loss", "supervised_tokens"):
        assert workspace.metrics("fraction-stream", key) == workspace.metrics("fraction", key)
    source = workspace.root / "fraction/checkpoints/step-00000002"
    resumed = {**run, "steps": 3, "resume": source}
    with pytest.raises(SystemExit, match=r"eval_fraction 0\.3 -> 0\.2"):
        main(workspace.settings("x", **resumed | {"eval_fraction": 0.2}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_fraction": 1}, "eval_fraction=1 must be below 1"),
        ({"data": "[{path: FILE, columns: {text: x}}]"}, "columns: 'text' is no key of the format"),
        ({"eval_fraction": 1e-9}, "eval_fraction=1e-09 holds out no row of data"),
        ({"eval_fraction": 0.999999999}, "leaves no row for training"),
        ({"data": "[{path: FILE, take: 0}]"}, "take=0 must be numbers of rows"),
        ({"data": "[{path: FILE, split: test}]"}, "has no split 'test'"),
    ],
)
def test_selections_that_leave_nothing(workspace, settings, message):
    settings = {"eval_data": "[]"} | {
        key: str(value).replace("FILE", str(workspace.data)) for key, value in settings.items()
    }
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings("x", **settings))
