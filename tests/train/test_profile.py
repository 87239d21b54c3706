"""Traces of a run's steps."""

import gzip
import json

import pytest

from tests.train.layouts import assert_same_metrics
from tigon.settings.config import Profile
from tigon.train import main
from tigon.train.profile import Profiler


def test_profiled_run_has_the_same_bits(workspace):
    settings = {"steps": 5, "eval_data": workspace.held_out, "eval_every": 2}
    main(workspace.settings("unprofiled", **settings))
    main(workspace.settings("profiled", profile="{start: 2, steps: 2}", **settings))
    keys = ("loss", "grad_norm", "eval_loss")
    assert_same_metrics(workspace, "unprofiled", "profiled", *keys, rel=0)
    with gzip.open(workspace.root / "profiled/profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert {name for name in names if name.startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    assert "aten::mm" in names


@pytest.mark.parametrize(
    ("start", "steps", "done", "of", "said"),
    [
        (5, 2, 0, 4, "nothing is profiled"),
        (2, 3, 4, 8, "nothing is profiled"),
        (2, 3, 0, 2, "profile: "),  # the run ends with the second of three
        (2, 4, 3, 8, "profile: "),  # 4 and 5 are left after a kill
    ],
)
def test_profile_of_the_steps_left(world, tmp_path, capsys, start, steps, done, of, said):
    made = Profiler(Profile(start=start, steps=steps), str(tmp_path), world, done, of)
    for step in range(done + 1, of + 1):
        made.step(step)
    made.close()
    assert said in capsys.readouterr().out
    assert (tmp_path / "profile/trace.json.gz").exists() == (said == "profile: ")


def test_profile_that_cannot_be_written(world, tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    made = Profiler(Profile(start=1, steps=1), str(tmp_path), world, 0, 4)
    made.step(1)
    assert "no profile: [Errno 17]" in capsys.readouterr().out


def test_early_end_is_reported(world, tmp_path, capsys):
    made = Profiler(Profile(start=1, steps=3), str(tmp_path), world, 0, 4)
    made.step(1)
    made.close()
    assert capsys.readouterr().out == "no profile: the run ended before step 3\n"
