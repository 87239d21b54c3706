"""The data of a run: mixtures, streams, files, named sets, and `tigon data pack`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.small import chats, write_chats, write_model
from tests.train import preferences
from tests.train.focal import Focal
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import train_on
from tests.train.weights import write_weighted
from tigon.cli import main as command
from tigon.data import Format
from tigon.data.sources import is_held_out
from tigon.settings.data import TASK_ROWS
from tigon.train import load, main
from tigon.train.logging import read_metrics
from tigon.train.tasks import TASKS

KEYS = ("loss", "grad_norm", "tokens", "supervised_tokens")


@pytest.fixture(scope="module")
def other(workspace):
    return write_chats(workspace.root / "other.jsonl", 19, seed=7)


@pytest.fixture(scope="module")
def mixture(workspace, other):
    data = f"[{{path: {workspace.data}, weight: 3}}, {{path: {other}, weight: 1}}]"
    return {"data": data, "shuffle_window": 16, "batch_size": 2, "steps": 8}


def test_streamed_windows_train_as_cached_ones_and_resume(workspace, other, mixture, capsys):
    """With weights: the first epoch."""
    main(workspace.settings("cached", **mixture))
    printed = capsys.readouterr().out
    assert f"75.0% of {workspace.data}: an epoch takes its 43 examples 1.08 times" in printed
    assert f"25.0% of {other}: an epoch takes its 19 examples 0.82 times" in printed
    main(workspace.settings("streamed", **mixture, streaming="true", save_every=3))
    assert_same_metrics(workspace, "cached", "streamed", *KEYS, rel=0)
    source = workspace.checkpoint("streamed", 6)
    resumed = {**mixture, "streaming": "true", "resume": source, "workers": 0}
    main(workspace.settings("streamed-on", **resumed))
    assert_same_metrics(workspace, "cached", "streamed-on", *KEYS, rel=0)
    assert workspace.metrics("streamed-on", "step") == [7, 8]
    train_on(2, workspace.settings("streamed-two", **resumed))
    assert_same_metrics(workspace, "cached", "streamed-two", *KEYS)
    with pytest.raises(SystemExit, match="has another order of the data: shuffle_window 16 -> 8"):
        main(workspace.settings("x", **resumed | {"shuffle_window": 8}))


def test_changed_stream_files_do_not_resume(workspace, tmp_path, capsys):
    data = write_chats(tmp_path / "data.jsonl", 30)
    same = {"data": data, "shuffle_window": 8, "batch_size": 2, "workers": 0, "streaming": "true"}
    settings = workspace.settings("x", run_dir=tmp_path / "run", **same)
    main([*settings, "steps=2", "log_every=1"])
    printed = capsys.readouterr().out
    assert "step 2/2  loss" in printed and "epoch" not in printed  # which nobody knows
    text = data.read_text()
    for changed in (text.replace("model", "medal", 1), text + text):
        data.write_text(changed)
        with pytest.raises(SystemExit, match="step-00000002 was made with other data than"):
            main([*settings, "steps=3", "resume=auto"])
    data.write_text(text)
    main([*settings, "steps=3", "resume=auto"])


def test_pack_makes_the_cache_and_reports(workspace, other, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path))
    settings = [f"model={workspace.model}", "seq_len=128", "device=cpu"]
    assert command(["data", "pack", str(other), *settings]) == 0
    printed = capsys.readouterr().out
    assert "data: 19 examples, " in printed and "of them padding" in printed
    assert "0 cut, 0 left out" in printed and str(tmp_path / "data") in printed
    made = sorted(path for path in (tmp_path / "data").iterdir() if path.is_dir())
    assert len(made) == 1
    config = tmp_path / "config.yaml"
    config.write_text(f"data: [{other}]\nmodel: {workspace.model}\nrun_dir: {tmp_path}/run\n")
    assert command(["data", "pack", str(config), "seq_len=64"]) == 0
    assert sorted(p for p in (tmp_path / "data").iterdir() if p.is_dir()) == made
    assert not (tmp_path / "run").exists()
    assert command(["data", "pack", f"[{{path: {other}}}]", *settings]) == 1
    assert f"write data='[{{path: {other}}}]'" in capsys.readouterr().err
    assert command(["data", "pack", str(config), str(other)]) == 1
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
    main(workspace.settings("fraction-stream", **run, streaming="true"))
    for other in ("fraction-files", "fraction-stream"):
        keys = ("loss", "eval_loss", "supervised_tokens")
        assert_same_metrics(workspace, other, "fraction", *keys, rel=0)
    source = workspace.checkpoint("fraction", 2)
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
        ({"data": "[{path: FILE, take: 0}]"}, "take=0 must be at least 1"),
        ({"data": "[{path: FILE, split: test}]"}, "has no split 'test'"),
        ({"data": "[{path: FILE, weight: 0}]"}, "weight=0 must be above 0"),
        ({"data": "[{path: FILE, weight: -1}]"}, "weight=-1 must be above 0"),
        ({"eval_data": "[{path: FILE, weight: 1}]"}, "eval_data has weights"),
        (
            {"eval_data": "[{path: FILE, name: x}, {path: FILE, name: x}]"},
            "name=x is there 2 times",
        ),
        ({"eval_data": "{'a/b': FILE}"}, "eval_data: name='a/b' may have letters, digits"),
        ({"eval_data": "{x: {split: test}}"}, r"eval_data\[0\] needs 'path'"),
        ({"data": "{path: FILE, name: x}"}, "data has name=x: only entries of eval_data"),
    ],
)
def test_data_that_cannot_be_used(workspace, settings, message):
    settings = {"eval_data": "[]"} | {
        key: str(value).replace("FILE", str(workspace.data)) for key, value in settings.items()
    }
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings("x", **settings))


# Bad rows are skipped if asked, and keys may have other names.


ROWS = [{"messages": messages} for messages in chats(24) if len(messages) == 2]


def losses(workspace: Any, run: Path, data: Path, *more: str) -> list[float]:
    main([*workspace.settings("x", run_dir=run, data=data, steps=2, log_every=1), *more])
    return workspace.metrics(run, "loss")


@pytest.fixture(scope="module")
def expected(workspace, tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected")
    found = losses(workspace, folder / "run", preferences.write(folder / "a.jsonl", ROWS))
    assert len(found) == 2
    return found


def test_bad_rows_are_skipped_and_said(workspace, tmp_path, expected, capsys):
    bad: dict[str, Any] = {"messages": ROWS[0]["messages"][:1]}
    data = preferences.write(tmp_path / "a.jsonl", [bad, *ROWS[:3], bad, *ROWS[3:]])
    with pytest.raises(SystemExit, match=r"a\.jsonl:1: .*no turn of the role 'assistant'"):
        losses(workspace, tmp_path / "run", data)
    assert losses(workspace, tmp_path / "run", data, "bad_rows=skip") == expected
    said = capsys.readouterr().out
    assert f"data: 2 of {len(ROWS) + 2} rows skipped as bad:\n  {data}:1: messages have no" in said


def test_names_of_keys_and_of_a_format(workspace, tmp_path, expected):
    rows = [{"dialog": row["messages"], "prompt": "a", "completion": "b"} for row in ROWS]
    data = preferences.write(tmp_path / "a.jsonl", rows)
    assert losses(workspace, tmp_path / "1", data, "columns={messages: dialog}") == expected
    other = losses(workspace, tmp_path / "2", data, "format=prompt_completion")
    assert other != expected
    with pytest.raises(SystemExit, match="train_on='last': task=pretrain has no use for it"):
        losses(workspace, tmp_path / "3", data, "task=pretrain", "train_on=last")


# Held-out data sets with names: measured apart, in the same pass as all of them.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two that share packed rows, with weights in one of them."""
    root = tmp_path_factory.mktemp("sets")
    first, second = (write_chats(root / f"{n}.jsonl", 9, seed=s) for n, s in (("a", 1), ("b", 2)))
    return first, write_weighted(second)


def evaluated(workspace, run, data, **changes):
    settings = {"steps": 1, "lr": 0, "loss_reduction": "token", "eval_data": data, **changes}
    main(workspace.settings(run, **settings))
    row = read_metrics(workspace.root / run / "metrics.jsonl")[-1]
    return {key: value for key, value in row.items() if key.startswith("eval_")}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("task", "reduction", "packing"),
    [
        ("sft", "token", "true"),
        ("sft", "sequence", "false"),
        ("focal", "token", "true"),
        ("focal", "sequence", "false"),
        ("distill", "token", "true"),
    ],
)
def test_each_is_as_if_it_were_alone(workspace, files, monkeypatch, task, reduction, packing):
    a, b = files
    same = {"loss_reduction": reduction, "packing": packing, "task": task}
    same |= {"micro_batch_size": 2, "metrics": "[nll]"}
    name = f"sets-{task}-{reduction}-{packing}"
    if task == "focal":
        monkeypatch.setitem(TASKS, "focal", Focal)
        monkeypatch.setitem(TASK_ROWS, "focal", "rows of its own")
    else:
        same |= {"eval_label_smoothing": 0.1, "eval_z_loss": 1e-3}
    if task == "distill":
        teacher = write_model(workspace.root / "sets-teacher", initializer_range=0.2)
        same |= {"teacher": teacher, "temperature": 2, "cross_entropy_weight": 0.3}
    whole = evaluated(workspace, f"{name}-0", f"[{a}, {b}]", **same)
    found = evaluated(workspace, f"{name}-1", f"{{x: {a}, 'y.2': {b}}}", **same)
    apart = {key: value for key, value in found.items() if "/" in key}
    assert {key: found[key] for key in found if key not in apart} == whole  # bit for bit
    alone = [evaluated(workspace, f"{name}-{path.stem}", path, **same) for path in files]
    assert list(apart) == [f"eval_{k}/{s}" for s in ("x", "y.2") for k in ("loss", "accuracy")]
    for one, values in zip(("x", "y.2"), alone, strict=True):
        for key in ("loss", "accuracy"):
            assert apart[f"eval_{key}/{one}"] == pytest.approx(values[f"eval_{key}"], rel=1e-5)
    if reduction == "token":
        each = [values["eval_tokens"] for values in alone]
        losses = [apart["eval_loss/x"], apart["eval_loss/y.2"]]
        mean = sum(n * x for n, x in zip(each, losses, strict=True)) / sum(each)
        assert mean == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_named_sets_of_a_file(workspace, files, tmp_path):
    a, b = files
    config = tmp_path / "c.yaml"
    config.write_text(f"eval_data: {{x: {a}, y: {{path: {b}, format: messages}}}}\n")
    x, y = load(config, workspace.settings("sets-yaml")).eval_data
    assert (x.name, x.path, y.name, y.format) == ("x", str(a), "y", "messages")
    config.write_text(f"eval_data: {{x: {a}, x: {b}}}\n")
    with pytest.raises(ValueError, match="line 1: x is also set in line 1"):
        load(config)
