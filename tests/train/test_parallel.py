"""Ranks in several dimensions of a mesh against one process."""

import pytest
import torch

import tigon
from tests.train.ranks import train_on
from tigon.parallel import Sizes
from tigon.train import main
from tigon.train.parallel_settings import Parallel

STEPS = {"steps": 5, "warmup_steps": 2, "export": "true"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_groups_of_two_ranks_are_as_one_rank(workspace, optimizer):
    """And two ranks go on from their checkpoint."""
    steps = STEPS | {"optimizer": optimizer}
    main(workspace.settings(f"one-{optimizer}", **steps))
    changes = steps | {"parallel": "{replicate: 2, fsdp: 2}", "save_every": 3, "keep_last": 0}
    train_on(4, workspace.settings(f"four-{optimizer}", **changes), OMP_NUM_THREADS="1")
    assert_same_run(workspace, f"one-{optimizer}", f"four-{optimizer}")
    source = workspace.root / f"four-{optimizer}/checkpoints/step-00000003"
    train_on(2, workspace.settings(f"two-{optimizer}", **steps, resume=source))
    assert_same_run(workspace, f"one-{optimizer}", f"two-{optimizer}")


def assert_same_run(workspace, one: str, other: str) -> None:
    """The steps that the other has made, and the export of both."""
    for key in ("loss", "grad_norm"):
        expected, got = workspace.metrics(one, key), workspace.metrics(other, key)
        assert got == pytest.approx(expected[len(expected) - len(got) :], rel=1e-5), key
        assert got
    both = [tigon.from_pretrained(workspace.root / run / "hf") for run in (one, other)]
    theirs = dict(both[1].named_parameters())
    for name, weight in both[0].named_parameters():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5, msg=name)


def test_the_product_is_the_number_of_ranks():
    assert Parallel(replicate=2).sizes(8) == Sizes(2, 4)
    assert Parallel(replicate=2, fsdp=2, tensor=2).sizes(8) == Sizes(2, 2, 1, 2)
    for settings, ranks, said in (
        (Parallel(replicate=2, fsdp=3), 4, "replicate 2 x fsdp 3 is 6, which is not"),
        (Parallel(replicate=3), 4, "replicate 3 is 3, which does not divide"),
        (Parallel(fsdp=2), 1, "fsdp 2 is 2, which is not the number of ranks, 1"),
    ):
        with pytest.raises(ValueError, match=said):
            settings.sizes(ranks)


def test_a_run_on_another_number_of_ranks_says_so(workspace):
    with pytest.raises(SystemExit, match=r"parallel: replicate 2 is 2, which does not divide the"):
        main(workspace.settings("none", **{"parallel.replicate": 2}))
    assert not (workspace.root / "none").exists()


def test_gradients_are_not_sharded_within_groups(workspace):
    with pytest.raises(SystemExit, match=r"parallel\.replicate=2 is not there for sharding"):
        main(workspace.settings("none", **{"parallel.replicate": 2, "sharding": "gradients"}))
