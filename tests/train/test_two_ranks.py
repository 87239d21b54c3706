"""Two ranks (gloo, FSDP2) against one process."""

import pytest

from tests.train.layouts import assert_same_metrics, assert_same_tensors
from tests.train.ranks import train_on
from tigon.train import main

SETTINGS = {"steps": 11, "save_every": 4, "keep_last": 0, "eval_every": 4, "warmup_steps": 2}


@pytest.fixture(scope="module")
def settings(workspace):
    """17 rows in batches of 4: the last batch of an epoch leaves one rank without rows."""

    def make(run: str, **changes) -> list[str]:
        return workspace.settings(
            run, eval_data=workspace.held_out, export="true", **(SETTINGS | changes)
        )

    main(make("one"))
    return make


def assert_same_curve(workspace, run: str) -> None:
    assert_same_metrics(workspace, "one", run, "loss", "grad_norm", "eval_loss")
    assert_same_metrics(workspace, "one", run, "supervised_tokens", rel=0)
    assert workspace.metrics(run, "step")[-1] == SETTINGS["steps"]


def test_two_ranks_match_one(workspace, settings):
    printed = train_on(2, settings("two", activation_checkpointing="true"))
    assert printed.count("exported to") == 1  # the other rank is silent
    assert_same_curve(workspace, "two")
    assert_same_tensors(workspace.root / "one/hf", workspace.root / "two/hf", atol=1e-5)
    main(settings("two-then-one", resume=workspace.root / "two/checkpoints/step-00000008"))
    assert_same_curve(workspace, "two-then-one")


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_resumes_on_two(workspace, settings):
    source = workspace.root / "one/checkpoints/step-00000004"
    printed = train_on(2, settings("one-then-two", resume=source))
    assert f"resumed from {source}" in printed
    assert_same_curve(workspace, "one-then-two")
