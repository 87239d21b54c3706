"""torchrun's agent with two ranks (gloo, FSDP2) against one process."""

import pytest
import torch

import tigon
from tests.small import EXPERTS, write_model
from tests.train.ranks import torchrun, train_on
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


def assert_same_curve(workspace, run: str, start: int = 0) -> None:
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-5), ("eval_loss", 1e-5)):
        expected = workspace.metrics("one", key)
        got = workspace.metrics(run, key)
        assert got == pytest.approx(expected[len(expected) - len(got) :], rel=tolerance), key
    assert workspace.metrics(run, "step")[-1] == SETTINGS["steps"]
    assert (
        workspace.metrics(run, "supervised_tokens")
        == (workspace.metrics("one", "supervised_tokens")[start:])
    )


def test_two_ranks_and_one_have_the_same_curve_and_export(workspace, settings):
    printed = torchrun(2, settings("two", activation_checkpointing="true"))
    assert printed.count("exported to") == 1  # the other rank is silent
    assert_same_curve(workspace, "two")
    one = tigon.from_pretrained(workspace.root / "one/hf").state_dict()
    two = tigon.from_pretrained(workspace.root / "two/hf").state_dict()
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)

    source = workspace.root / "two/checkpoints/step-00000008"
    main(settings("two-then-one", resume=source))
    assert_same_curve(workspace, "two-then-one", start=8)


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_resumes_on_two(workspace, settings):
    source = workspace.root / "one/checkpoints/step-00000004"
    printed = train_on(2, settings("one-then-two", resume=source))
    assert f"resumed from {source}" in printed
    assert_same_curve(workspace, "one-then-two", start=4)


@pytest.mark.slow
def test_experts_that_two_ranks_share(workspace, tmp_path):
    """The same micro-batches have the same balance, whichever rank runs them."""
    model = write_model(tmp_path / "experts", **EXPERTS)
    changes = {"model": model, "router_aux_loss_coef": 0.5, "batch_size": 8, "steps": 3}
    main(workspace.settings("experts-one", **changes))
    train_on(2, workspace.settings("experts-two", **changes, activation_checkpointing="true"))
    for key in ("loss", "grad_norm", "aux_loss", "expert_imbalance"):
        expected = workspace.metrics("experts-one", key)
        assert len(expected) == 3
        assert workspace.metrics("experts-two", key) == pytest.approx(expected, rel=1e-4), key
