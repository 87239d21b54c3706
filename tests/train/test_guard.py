"""Losses, gradients and weights that are not finite, spikes, and runs that no longer improve."""

import json
import math
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.train.layouts import assert_same_metrics, assert_same_tensors
from tests.train.ranks import Ranks
from tigon.cli import main as command
from tigon.kernels.attention.backends import AttentionRequest, choose_backend
from tigon.settings.config import Parallel
from tigon.train import checkpoint, guard, main, start, trainer
from tigon.train.logging import read_metrics
from tigon.train.state import TrainState
from tigon.train.tasks import MicroBatchLoss
from tigon.train.tasks.language_modeling import CrossEntropyTask
from tigon.train.trainer import evaluate, forward_backward


def weights(run: Path) -> dict[str, torch.Tensor]:
    return tigon.from_pretrained(run / "hf").state_dict()


def test_broken_weights_are_an_error(workspace, capsys):
    """They are neither saved nor exported, and the checkpoint before them is named."""
    settings = workspace.settings("ruined", steps=1, export="true", save_every=1)
    said = r"step 1 left weights up to inf \(lr 1e\+38\); its rows are .*train.jsonl:\d+"
    with pytest.raises(SystemExit, match=said + r".* there is no checkpoint"):
        main([*settings, "lr=1e38"])
    run = workspace.root / "ruined"
    assert checkpoint.latest(run / "checkpoints") is None and not (run / "hf").exists()
    main([*settings, "resume=auto"])
    with pytest.raises(SystemExit, match=r"step 2 left weights .*last checkpoint: .*00000001"):
        main([*settings, "resume=auto", "steps=2", "lr=1e38"])
    main([*settings, "resume=auto", "steps=2"])  # the good one is still there
    assert workspace.metrics("ruined", "step") == [1, 2]
    assert all(w.isfinite().all() for w in weights(run).values())


@pytest.mark.parametrize(
    ("policy", "bad", "changes", "message"),
    [
        (
            "stop",
            [2],
            {"steps": 5},
            r"step 3: loss nan, gradient norm nan; its rows are .*train\.jsonl:\d+.*"
            r"step-00000002; nonfinite=skip or rollback would go on$",
        ),
        ("skip", range(1, 40), {"steps": 40}, "The 20 steps before it were skipped too"),
        ("rollback", range(2, 20), {"steps": 6}, "max_rollbacks=3 are used up"),
        ("rollback", [2], {"save_every": 0}, "A rollback needs a checkpoint: save_every"),
    ],
)
def test_bad_steps_end_the_run(workspace, poisoned, policy, bad, changes, message):
    poisoned(*bad)
    same = {"nonfinite": policy, "steps": 4, "save_every": 1, "keep_last": 0}
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings(f"{policy}-{len(bad)}", **same | changes))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_skipped_step_leaves_weights_and_moments(workspace, poisoned, monkeypatch, optimizer):
    poisoned(1, 3)
    skipping = workspace.root / f"skipping-{optimizer}"
    settings = {"optimizer": optimizer, "steps": 5, "nonfinite": "skip", "export": "true"}
    settings = workspace.settings(skipping.name, **settings)
    main(settings)
    rows = read_metrics(skipping / "metrics.jsonl")
    assert [row.get("skipped") for row in rows] == [None, "nonfinite", None, "nonfinite", None]
    assert [row["loss"] is None for row in rows] == [False, True, False, True, False]
    update = trainer.update_weights
    monkeypatch.setattr(trainer, "forward_backward", forward_backward)
    monkeypatch.setattr(
        trainer,
        "update_weights",
        lambda run, step, scale: None if step in (1, 3) else update(run, step, scale),
    )
    left_out = workspace.root / f"left-out-{optimizer}"
    main([*settings, f"run_dir={left_out}"])
    assert_same_tensors(left_out / "hf", skipping / "hf")


@pytest.mark.slow
def test_half_of_the_steps_may_be_skipped(workspace, poisoned):
    """What was skipped before counts when the run goes on."""
    settings = {"nonfinite": "skip", "resume": "auto"}
    for steps, bad in ((3, [1]), (8, [4, 6, 7])):
        poisoned(*bad)
        main(workspace.settings("half", **settings, steps=steps))
    newest = checkpoint.latest(workspace.root / "half/checkpoints")
    assert checkpoint.read_metadata(newest)["state"]["skipped"] == 4
    poisoned(8)
    with pytest.raises(SystemExit, match="With it 5 of 9 steps are skipped"):
        main(workspace.settings("half", **settings, steps=9))


@pytest.mark.slow
def test_mostly_skipped_short_run_fails(workspace, poisoned):
    """Also each time that it is asked to go on."""
    poisoned(1, 2, 3, 4)
    settings = {"steps": 5, "nonfinite": "skip", "save_every": 1, "keep_last": 0}
    with pytest.raises(SystemExit, match="With it 3 of 5 steps are skipped"):
        main(workspace.settings("short", **settings))
    poisoned(1, 2)
    main(
        workspace.settings("short", **settings | {"resume": "auto"})
    )  # from step 3, the others good
    shorter = workspace.settings("shorter", **settings | {"steps": 3, "export": "true"})
    for _ in "ab":
        source = workspace.checkpoint("short", 3)
        with pytest.raises(SystemExit, match=r"2 of 3 steps were skipped.* nothing is exported"):
            main([*shorter, f"resume={source}"])
    assert not (workspace.root / "shorter/hf").exists()


def poison_losses(settings: list[str], first: int, last: int) -> None:
    """On rank 1 the losses of these micro-batches are NaN, counted from 1."""
    if os.environ["RANK"] == "1":
        loss, calls = CrossEntropyTask.loss, []

        def bad(self, model, inputs, sums):
            part = loss(self, model, inputs, sums)
            calls.append(1)
            wrong = first <= len(calls) <= last
            return MicroBatchLoss(part.loss * math.nan, part.metrics) if wrong else part

        CrossEntropyTask.loss = bad
    with suppress(SystemExit):
        main(settings)
    print(f"rank {os.environ['RANK']} has ended")


def test_values_beyond_the_export_dtype(workspace, tmp_path, capsys):
    """They are not exported as infinity."""
    model = Path(shutil.copytree(workspace.model, tmp_path / "model"))
    path = model / "model.safetensors"
    values = load_file(path)
    values["model.norm.weight"][0] = 1e5
    save_file(values, path, {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"dtype": "float16"}
    (model / "config.json").write_text(json.dumps(config))
    settings = workspace.settings("half-range", model=model, steps=1, export="true", resume="auto")
    said = r"hf was not written: not finite in torch.float16: model.norm.weight"
    with pytest.raises(SystemExit, match=said):
        main(settings)
    run = workspace.root / "half-range"
    assert not (run / "hf").exists()
    assert command(["export", str(run), str(tmp_path / "hf")]) == 1
    assert "model.norm.weight has values that are infinite in float16" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    main([*settings, "export_dtype=bfloat16"])
    assert weights(run)["model.norm.weight"][0] > 9e4


def test_a_rollback_goes_on_with_the_rows_behind(workspace, poisoned, monkeypatch, capsys):
    """From step 2, with the rows of steps 5, 6 ...: as a run that never saw those in between."""
    poisoned(4)
    settings = {"steps": 7, "save_every": 2, "nonfinite": "rollback", "keep_last": 0}
    settings |= {"export": "true"}
    main(workspace.settings("back", schedule="constant", **settings))
    assert "Back to" in (printed := capsys.readouterr().out)
    assert re.search(r"step 5: loss nan.*step-00000004: step 5 takes the rows after", printed)
    assert workspace.metrics("back", "step") == [1, 2, 3, 4, 5, 6, 7]
    assert workspace.metrics("back", "rollbacks") == [1, 1, 1]  # in the rows after it
    report = (workspace.root / "back/report.html").read_text()
    assert "<td>Rollbacks</td><td>1</td>" in report and "finished · 7 steps" in report
    taken = []

    def jump(run, data_step, **options):
        taken.append(data_step if data_step < 4 else data_step + 1)
        return forward_backward(run, taken[-1], **options)

    monkeypatch.setattr(trainer, "forward_backward", jump)
    main(workspace.settings("jumped", schedule="constant", **settings))
    assert taken == [0, 1, 2, 3, 5, 6, 7]
    assert_same_metrics(workspace, "back", "jumped", "loss", rel=0)
    assert_same_tensors(workspace.root / "back/hf", workspace.root / "jumped/hf")


def test_rollbacks_end_and_a_resumed_run_remembers_them(workspace, poisoned):
    settings = {"steps": 6, "save_every": 1, "nonfinite": "rollback", "keep_last": 0}
    poisoned(2)
    main(workspace.settings("once", **settings))
    newest = workspace.checkpoint("once", 3)
    state = TrainState.of(checkpoint.read_metadata(newest))
    assert (state.offset, state.rollbacks) == (1, 1)
    whole = workspace.metrics("once", "loss")
    main(workspace.settings("once-more", **settings, resume=newest))
    assert workspace.metrics("once-more", "loss") == whole[3:]


@pytest.mark.slow
def test_rolled_back_stream_resumes_with_its_rows(workspace, poisoned):
    """Step 6 has the rows of data step 7: its cursor is that of the data, not of the step."""
    poisoned(2)
    settings = {"steps": 8, "batch_size": 2, "save_every": 1, "keep_last": 0}
    settings |= {"nonfinite": "rollback", "schedule": "constant"}
    settings |= {"streaming": "true", "shuffle_window": 4, "workers": 0}
    main(workspace.settings("rolled-stream", **settings))
    for step in (3, 5, 6):
        source = workspace.checkpoint("rolled-stream", step)
        main(workspace.settings(f"rolled-on-{step}", **settings, resume=source))
        expected = workspace.metrics("rolled-stream", "loss")[step:]
        assert workspace.metrics(f"rolled-on-{step}", "loss") == expected


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
def test_a_spike(workspace, poisoned, monkeypatch, policy):
    monkeypatch.setattr(guard, "WINDOW", 8)
    poisoned(6, factor=100.0)
    settings = workspace.settings(
        f"spike-{policy}", steps=8, save_every=1, spike_sigma=6, spike=policy
    )
    said = (
        r"step 7: loss \d+\.?\d* is above \d+.* 6 standard deviations above the mean of the last 6"
    )
    if policy == "stop":
        with pytest.raises(SystemExit, match=said + r".*train\.jsonl:\d+"):
            main(settings)
        return
    main(settings)
    rows = read_metrics(workspace.root / f"spike-{policy}/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row.get("skipped") for row in rows].index("spike") == 6 if policy == "skip" else True
    if policy == "rollback":
        assert all("skipped" not in row for row in rows)


@pytest.mark.parametrize(
    ("parts", "largest", "said"),
    [
        ((1.5,), True, ""),
        ((1.5, 3.25, 0.5), True, " (the largest part of the loss, 3.25, is on rank 1)"),
        ((1.5, 3.25), False, ""),
        ((1.0, math.nan), False, " (rank 1: its part is nan)"),
        (
            (1.0, 1.0, math.inf, math.inf),
            False,
            " (rank 2: its part is inf; rank 3: its part is inf)",
        ),
        ((math.nan, math.nan), False, " (on all ranks)"),
    ],
)
def test_faulty_ranks_are_named(parts, largest, said):
    world = SimpleNamespace(size=len(parts), gather=lambda _: [*map(str, parts)])
    assert guard.describe_ranks(world, parts[0], largest=largest) == said


def test_the_bound_is_that_of_the_window():
    past = [float(x) for x in np.random.default_rng(0).normal(2.0, 0.1, 128)]
    expected = np.mean(past) + 6 * np.std(past, ddof=1)
    assert guard.spike_bound(past, 6.0) == pytest.approx(expected, rel=1e-12)
    assert guard.spike_bound(past[:63], 6.0) == math.inf
    state = TrainState()
    for x in [*past, math.nan, 3.0]:
        state.note_step(x, x)
    assert state.losses == [*past[1:], 3.0]
    assert TrainState.of(json.loads(json.dumps(state.facts()))) == state


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
def test_weights_that_no_model_computes_with(workspace, bad):
    with start("cpu") as world:
        model = tigon.from_pretrained(workspace.model)
        assert not guard.is_broken(guard.largest_weight(model, world))
        with torch.no_grad():
            model.model.norm.weight[3] = bad
        assert guard.is_broken(guard.largest_weight(model, world))


def test_model_with_nan_is_named(workspace, tmp_path):
    shutil.copytree(workspace.model, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    values = load_file(path)
    values["model.norm.weight"][0] = math.nan
    save_file(values, path)
    said = "step 1: loss nan, .* with weights up to nan when the run began.* look at the files of "
    with pytest.raises(SystemExit, match=said + str(tmp_path / "model")):
        main(workspace.settings("nan", model=tmp_path / "model"))


def test_ranks_decide_alike_and_name_the_faulty(workspace):
    settings = {"steps": 4, "save_every": 1, "nonfinite": "rollback", "keep_last": 0}
    printed = Ranks(2, poison_losses, workspace.settings("blame", **settings), 5, 5).finish()
    assert re.search(r"step 3: loss nan.*\(rank 1: its part is nan\).*Back to .*00002", printed)
    assert workspace.metrics("blame", "step") == [1, 2, 3, 4]


def test_a_run_that_no_longer_improves_ends(workspace, monkeypatch, capsys):
    losses = iter([5.0, 4.0, 4.5, 4.0, 3.0])

    def scripted(run, step):
        return evaluate(run, step) | {"eval_loss": next(losses)}

    monkeypatch.setattr(trainer, "evaluate", scripted)
    changes = {"eval_data": workspace.held_out, "eval_every": 2, "patience": 2, "steps": 20}
    settings = workspace.settings("patient", **changes, export="true", resume="auto")
    main(settings)
    assert workspace.metrics("patient", "step")[-1] == 6
    assert re.search(
        r"after step 6: no eval loss in 2 evaluations was below 4.0000, of step 2",
        capsys.readouterr().out,
    )
    run = workspace.root / "patient"
    assert (run / "hf/model.safetensors").exists()
    facts = checkpoint.read_metadata(run / "checkpoints/step-00000006")["state"]
    assert (facts["best_step"], facts["best_loss"]) == (2, 4.0)
    (run / "report.html").unlink()  # as if it had been killed before that
    (run / ".exported").unlink()
    main([*settings, "export=false"])
    said = capsys.readouterr().out
    assert "is finished: nothing left to do" in said and "report: " in said
    assert "ended early · step 6" in (run / "report.html").read_text()
    main([*settings, "export=false"])
    assert "report" not in capsys.readouterr().out


@pytest.mark.slow
def test_interrupted_evaluation_counts_on_resume(workspace, monkeypatch):
    changes = {"eval_data": workspace.held_out, "eval_every": 2, "patience": 1, "steps": 8, "lr": 0}
    settings = workspace.settings("impatient", **changes, resume="auto")

    def interrupted(run, step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", interrupted)
        with pytest.raises(SystemExit, match="143"):
            main(settings)
    main(settings)  # with lr=0, no loss is below that of step 0
    assert workspace.metrics("impatient", "step") == [0, 1, 2, 2]


@pytest.mark.slow
def test_deterministic_operations_are_demanded_for_the_run_alone(workspace, monkeypatch):
    update, seen = trainer.update_weights, []

    def noted(*given):
        seen.append(torch.are_deterministic_algorithms_enabled())
        update(*given)

    monkeypatch.setattr(trainer, "update_weights", noted)
    main(workspace.settings("fixed", steps=1, deterministic="true"))
    main(workspace.settings("free", steps=1))
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
    assert workspace.metrics("fixed", "loss") == workspace.metrics("free", "loss")
    with pytest.raises(ValueError, match="'cudnn' cannot do this: its backward pass is not det"):
        choose_backend(
            AttentionRequest(dtype=torch.bfloat16, grad=True, deterministic=True), "cudnn"
        )


@pytest.mark.slow
def test_evaluation_counts_once_in_another_directory(workspace):
    changes = {"eval_data": workspace.held_out, "eval_every": 2, "save_every": 2, "lr": 0}
    main(workspace.settings("here", steps=4, **changes))
    source = workspace.checkpoint("here", 2)
    main(workspace.settings("there", steps=3, **changes, resume=source))  # evaluates 2 again, and 3
    state = checkpoint.read_metadata(workspace.checkpoint("there", 3))["state"]
    assert workspace.metrics("there", "eval_loss")
    assert (state["evaluated"], state["evaluations_since"]) == (2, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", 10**80),
        ("skips", -2),
        ("rollbacks", "2"),
        ("best_loss", math.nan),
        ("losses", [[]]),
    ],
)
def test_impossible_state_is_refused(name, value):
    assert TrainState.of(TrainState(offset=3, losses=[1.0, 2]).facts()) == TrainState(
        offset=3, losses=[1.0, 2]
    )
    with pytest.raises(ValueError, match=f"a state that no run has: {name}"):
        TrainState.of({"state": {name: value}})


def decide() -> None:
    rank = int(os.environ["RANK"])
    with start("cpu", parallel=Parallel(tensor=2)) as world:

        def agreed(*losses: float) -> float:
            return float(world.same_loss(torch.tensor(losses[rank], dtype=torch.double)))

        assert agreed(1.0, 1.0) == 1.0
        assert agreed(1.0, 1e6) == 1e6  # a spike on one
        assert agreed(-1.0, -2.0) == -1.0  # rewards are negative
        assert math.isnan(agreed(1.0, math.nan)) and not math.isfinite(agreed(math.inf, 1.0))
        assert agreed(math.inf, math.inf) == math.inf


def test_ranks_decide_by_one_loss() -> None:
    Ranks(2, decide).finish()
