"""Callbacks see predictions, metrics and chosen logits of the passes, and change nothing."""

import json
import re
from pathlib import Path

import pytest
import torch

import tigon
from tests.train import watching
from tests.train.layouts import assert_same_metrics, assert_same_tensors
from tigon.train import load, main, prepare, start, train
from tigon.train.callbacks import EvaluationContext, UserCallback

HERE = "tests.train.watching"


@pytest.fixture
def seen():
    watching.SEEN.clear()
    yield watching.SEEN
    watching.SEEN.clear()


def test_what_they_see_is_what_the_model_says(workspace, seen):
    changes = {"steps": 4, "micro_batch_size": 2, "hook_every": 3, "lr": 0, "metrics": "entropy"}
    changes |= {"eval_data": workspace.held_out, "eval_metrics": "[nll]", "eval_every": 2}
    main(workspace.settings("seen", **changes, hooks=f"[{HERE}:keep, {HERE}:FirstAnswers]"))
    calls = [(s.step, s.training, s.index) for s in seen[::2]]
    train_calls = [(3, True, 0), (3, True, 1)]
    evaluations = [(step, False, i) for step in (0, 2, 4) for i in (0, 1)]
    assert calls == [*evaluations[:4], *train_calls, *evaluations[4:]]
    model = tigon.from_pretrained(workspace.model)  # lr=0: it has not changed
    for plain, chosen in zip(seen[::2], seen[1::2], strict=True):
        assert plain.at is plain.logits_at is plain.logits is None
        batch = plain.micro_batch
        with torch.no_grad():
            logits = model(**batch.inputs()).logits
        logp = logits.log_softmax(-1)
        counted = plain.labels != -100
        assert counted.any()
        assert torch.equal(plain.predictions[counted], logits.argmax(-1)[counted])
        assert bool((plain.predictions[~counted] == -100).all())
        name = "entropy" if plain.training else "nll"
        assert list(plain.metrics) == [name]
        values = -(logp.exp() * logp).sum(-1)
        if name == "nll":
            values = -logp.gather(-1, plain.labels.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(plain.metrics[name], values * counted, rtol=1e-4, atol=1e-5)
        mask = watching.FirstAnswers().positions(batch, plain.labels)
        assert torch.equal(chosen.at, mask.flatten().nonzero()[:, 0])
        torch.testing.assert_close(chosen.logits_at, logits[mask], rtol=1e-4, atol=1e-5)
        assert len(plain.micro_batch.origins) == len(batch.spans)
        for origin, (begin, end) in zip(
            plain.micro_batch.origins, batch.spans.tolist(), strict=True
        ):
            file, _, line = origin.rpartition(":")
            row = json.loads(Path(file).read_text().splitlines()[int(line) - 1])
            ids, _ = plain.tokenizer.encode_chat(row["messages"])
            assert batch.input_ids.flatten()[begin:end].tolist() == ids
        assert not plain.loss.requires_grad


def test_metrics_of_a_callback_are_not_logged(workspace, seen):
    changes = {"steps": 2, "hook_every": 2, "eval_data": workspace.held_out, "metrics": "z"}
    main(workspace.settings("metrics", **changes, hooks=f"[{HERE}:keep, {HERE}:Evaluations]"))
    evaluations = [s for s in seen if isinstance(s, EvaluationContext)]
    passes = [s for s in seen if not isinstance(s, EvaluationContext)]
    for context in passes:
        assert set(context.metrics) == {"z", "nll"}
        assert context.run_dir == workspace.root / "metrics"
        counted = context.labels != -100
        assert bool((context.metrics["nll"][counted] > 0).all())
    rows = [json.loads(text) for text in (workspace.root / "metrics/metrics.jsonl").open()]
    assert all("z" in row or "eval_z" in row for row in rows)
    assert not any("nll" in key for row in rows for key in row)
    (evaluation,) = evaluations
    assert (evaluation.step, evaluation.training) == (2, False)
    assert evaluation.metrics == {key: rows[-1][key] for key in evaluation.metrics}
    losses = sum(float(s.loss) for s in passes if not s.training)
    assert evaluation.metrics["eval_loss"] == pytest.approx(losses, rel=1e-6)


def test_all_logits_where_asked_for(workspace, seen):
    changes = {"steps": 1, "packing": "false", "micro_batch_size": 4, "hooks": f"{HERE}:keep"}
    changes |= {"eval_data": workspace.held_out, "return_logits": "true", "logits_to_keep": 5}
    main(workspace.settings("logits", **changes, eval_return_logits="false"))
    step, evaluation = seen[0], seen[-1]
    assert evaluation.logits is None and step.logits.shape == (4, 5, 321)
    assert step.labels.shape == step.predictions.shape == step.micro_batch.input_ids.shape
    counted = step.labels != -100
    per_row = counted.sum(1)
    assert int(per_row.max()) == 4  # of the last five positions, the last one predicts nothing
    found = step.logits.argmax(-1)
    for row in range(4):
        kept = step.predictions[row][counted[row]]
        assert set(kept.tolist()) <= set(found[row].tolist())


def test_nothing_that_a_callback_does_changes_the_run(workspace):
    """Bit for bit: losses, metrics and weights after four steps, with all logits or a few."""
    changes = {"steps": 4, "micro_batch_size": 2, "export": "true", "metrics": "nll"}
    changes |= {"eval_data": workspace.held_out, "eval_every": 2, "export_dtype": "float32"}
    changes["predictions"] = "true"
    main(workspace.settings("unwatched", **changes))
    main(workspace.settings("watched", **changes, hooks=f"[{HERE}:spoil, {HERE}:FirstAnswers]"))
    keys = ("loss", "grad_norm", "accuracy", "nll", "eval_loss", "eval_accuracy", "eval_nll")
    assert_same_metrics(workspace, "unwatched", "watched", *keys, rel=0)
    assert len(workspace.metrics("watched", "eval_nll")) == 3
    for step in (0, 2, 4):
        one, two = (
            (workspace.root / run / f"predictions-step-{step:08d}.jsonl").read_text()
            for run in ("unwatched", "watched")
        )
        assert one == two
    assert_same_tensors(workspace.root / "unwatched/hf", workspace.root / "watched/hf")


def test_predictions_of_each_evaluation_are_written(workspace):
    changes = {"steps": 2, "eval_every": 2, "eval_data": workspace.held_out, "lr": 0}
    main(workspace.settings("predicted", **changes, predictions="true", batch_size=2))
    files = sorted((workspace.root / "predicted").glob("predictions-*"))
    assert [file.name for file in files] == [
        "predictions-step-00000000.jsonl",
        "predictions-step-00000002.jsonl",
    ]
    model = tigon.from_pretrained(workspace.model)
    tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert {row["source"] for row in rows} == {f"{workspace.held_out}:{n}" for n in range(1, 8)}
    correct = [right for row in rows for right in row["correct"]]
    assert workspace.metrics("predicted", "eval_accuracy") == [sum(correct) / len(correct)] * 2
    for row in rows:
        line = int(row["source"].rpartition(":")[2])
        text = workspace.held_out.read_text().splitlines()[line - 1]
        ids, mask = tokenizer.encode_chat(json.loads(text)["messages"])
        positions = [t for t in range(1, len(ids)) if mask[t]]
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0].argmax(-1)
        assert row["positions"] == positions
        assert row["target_ids"] == [ids[t] for t in positions]
        assert row["predicted_ids"] == [int(best[t - 1]) for t in positions]
        pairs = zip(row["target_ids"], row["predicted_ids"], strict=True)
        assert row["correct"] == [a == b for a, b in pairs]
        assert row["target"] == tokenizer.decode(row["target_ids"])
        assert row["predicted"] == tokenizer.decode(row["predicted_ids"])


def test_from_a_file_and_of_one_kind_only(workspace, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\n"
        "def watch(seen): calls.append((seen.step, seen.training))\n"
        "def check(seen): assert calls[-1] == (2, False) and len(calls) == seen.index + 1\n"
    )
    changes = {"steps": 2, "eval_data": workspace.held_out, "hook_every": 0}
    main(workspace.settings("file", **changes, hooks=f"[{file}:watch, {file}:check]"))
    main(workspace.settings("none", steps=1, hooks=f"{file}:watch", hook_every=2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("watching", "hooks=watching: give module:function or file.py:function"),
        ("bad.py:f", r"bad\.py cannot be imported: ZeroDivisionError"),
        ("tests.nowhere:f", "tests.nowhere cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:f", "cannot be imported: FileNotFoundError: there is no file nowhere.py"),
        (f"{HERE}:kept", "watching has no kept; did you mean 'keep'"),
        (f"{HERE}:not_callable", "int is not callable: name a function"),
        (f"{HERE}:wants_accuracy", "its metric 'accuracy' is not one of entropy, max_logit"),
    ],
)
def test_a_callback_that_is_none(tmp_path, monkeypatch, name, message):
    (tmp_path / "bad.py").write_text("import json\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a file that fails once fails again
        with pytest.raises(ValueError, match=message):
            UserCallback(name)


def test_an_error_in_a_callback_names_it(workspace, tmp_path):
    positions = tmp_path / "positions.py"
    positions.write_text(
        "import torch\n"
        "def a(seen): pass\n"
        "def b(seen): pass\n"
        "a.positions = lambda micro_batch, labels: labels\n"
        "b.positions = lambda micro_batch, labels: labels[0] > 0\n"
    )
    evaluated = {"eval_every": 1, "eval_data": workspace.held_out, "hook_every": 0}
    evaluated |= {"predictions": "true"}
    for hook, changes, error, message in (
        (f"{HERE}:broken", {}, RuntimeError, f"callback {HERE}:broken: KeyError: 'what'"),
        (f"{HERE}:broken", evaluated, RuntimeError, f"callback {HERE}:broken: KeyError: 'what'"),
        (f"{positions}:a", {}, TypeError, r"positions.py:a: positions gave torch.int64, not bool"),
        (f"{positions}:b", {}, ValueError, r"positions.py:b: positions gave a mask \(128,\), not"),
    ):
        with start("cpu") as world:
            settings = workspace.settings("broken", steps=1, hooks=hook, **changes)
            run = prepare(load(None, settings), world)
            with pytest.raises(error, match=message):
                train(run)
        for path in (workspace.root / "broken").iterdir():
            assert "predictions" not in path.name  # which no evaluation has completed
            path.unlink()


def test_the_callback_of_the_documentation(workspace, tmp_path, capfd):
    text = Path(__file__).parents[2].joinpath("docs/loss.md").read_text()
    (code,) = re.findall(r"```python\n(def answers.*?)```", text, flags=re.DOTALL)
    (tmp_path / "watch.py").write_text(code)
    changes = {"steps": 1, "eval_data": workspace.held_out}
    main(workspace.settings("documented", **changes, hooks=f"{tmp_path}/watch.py:answers"))
    lines = [line.split(" ", 3) for line in capfd.readouterr().out.splitlines()]
    printed = [line for line in lines if line[:2] == ["1", "True"]]
    assert len(printed) == 4 and all(0 < float(line[2]) < 1 for line in printed)
    (loss,) = workspace.metrics("documented", "eval_loss")
    assert float((workspace.root / "documented/summary-1.txt").read_text()) == loss
