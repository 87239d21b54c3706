"""Held-out data sets with names: measured apart, in the same pass as all of them."""

import json

import pytest

from tests.small import write_chats
from tests.train.ranks import train_on
from tigon.train import load, main
from tigon.train.logging import read_metrics


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two that share packed rows, with weights in one of them."""
    root = tmp_path_factory.mktemp("sets")
    first, second = (write_chats(root / f"{n}.jsonl", 9, seed=s) for n, s in (("a", 1), ("b", 2)))
    rows = [json.loads(text) for text in second.read_text().splitlines()]
    weighted = [row | {"weight": 0.5 + i % 3} for i, row in enumerate(rows)]
    second.write_text("\n".join(map(json.dumps, weighted)) + "\n")
    return first, second


def evaluated(workspace, run, data, **changes):
    settings = {"steps": 1, "lr": 0, "loss_reduction": "token", "eval_data": data, **changes}
    main(workspace.settings(run, **settings))
    return last(workspace, run)


def last(workspace, run):
    row = read_metrics(workspace.root / run / "metrics.jsonl")[-1]
    return {key: value for key, value in row.items() if key.startswith("eval_")}


@pytest.mark.parametrize(("reduction", "packing"), [("token", "true"), ("sequence", "false")])
def test_each_is_as_if_it_were_alone(workspace, files, reduction, packing):
    a, b = files
    same = {"loss_reduction": reduction, "packing": packing, "eval_label_smoothing": 0.1}
    same |= {"eval_z_loss": 1e-3, "micro_batch_size": 2, "metrics": "[nll]"}
    name = f"sets-{reduction}-{packing}"
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


def test_two_ranks_and_entries_without_a_name(workspace, files):
    a, b = files
    data = f"[{{path: {a}}}, {{path: {b}, name: second}}]"
    settings = {"steps": 1, "lr": 0, "eval_data": data, "eval_logits_to_keep": 5}
    settings |= {"packing": "false"}
    main(workspace.settings("sets-one", **settings))
    train_on(2, workspace.settings("sets-two", **settings))
    one, two = last(workspace, "sets-one"), last(workspace, "sets-two")
    assert [key for key in one if "/" in key] == ["eval_loss/second", "eval_accuracy/second"]
    assert one == pytest.approx(two, rel=1e-6)
    alone = evaluated(workspace, "sets-second", b, eval_logits_to_keep=5, packing="false")
    assert one["eval_loss/second"] == pytest.approx(alone["eval_loss"], rel=1e-5)


def test_names_are_checked(workspace, files, tmp_path):
    a, b = files
    for data, message in (
        (f"[{{path: {a}, name: x}}, {{path: {b}, name: x}}]", "eval_data: name=x is there 2 times"),
        (f"{{'a/b': {a}}}", "eval_data: name='a/b' may have letters, digits"),
        ("{x: {split: test}}", r"eval_data\[0\] needs 'path'"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(workspace.settings("sets-bad", eval_data=data))
    with pytest.raises(SystemExit, match="data has an entry with name=x: only those of eval_data"):
        main(workspace.settings("sets-bad", data=f"{{path: {a}, name: x}}"))
    config = tmp_path / "c.yaml"
    config.write_text(f"eval_data: {{x: {a}, y: {{path: {b}, format: messages}}}}\n")
    x, y = load(config, workspace.settings("sets-yaml")).eval_data
    assert (x.name, x.path, y.name, y.format) == ("x", str(a), "y", "messages")
    config.write_text(f"eval_data: {{x: {a}, x: {b}}}\n")
    with pytest.raises(ValueError, match="line 1: x is also set in line 1"):
        load(config)
