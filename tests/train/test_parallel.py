"""Ranks in several dimensions of a mesh against one process."""

import pytest
import torch
from safetensors.torch import load_file

from tests.small import EXPERTS, write_model
from tests.train.ranks import train_on
from tigon.parallel import Sizes
from tigon.train import main
from tigon.train.export import convert_checkpoint
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


@pytest.fixture(scope="module", params=["llama", "experts"])
def family(workspace, request) -> tuple[str, dict]:
    """A run on one rank, and the settings that others share with it."""
    steps = STEPS | {"ema_decay": 0.5, "save_every": 3, "keep_last": 0, "batch_size": 8}
    if request.param == "experts":
        model = write_model(workspace.root / "experts", **EXPERTS)
        steps |= {"model": model, "router_aux_loss_coef": 0.5}
    main(workspace.settings(f"{request.param}-one", **steps))
    return request.param, steps


def test_tensor_parallel_runs_are_as_one_rank(workspace, family):
    """Two ranks of it with two of FSDP; a run goes on from there on one rank, and from one rank on
    two of tensor parallelism."""
    name, steps = family
    four = steps | {"parallel": "{fsdp: 2, tensor: 2}", "activation_checkpointing": "true"}
    train_on(4, workspace.settings(f"{name}-four", **four), OMP_NUM_THREADS="1")
    assert_same_run(workspace, f"{name}-one", f"{name}-four", "hf-ema")
    saved = "checkpoints/step-00000003"
    source = workspace.root / f"{name}-four" / saved
    main(workspace.settings(f"{name}-fewer", **steps, resume=source))
    assert_same_run(workspace, f"{name}-one", f"{name}-fewer", "hf-ema")
    two = steps | {"parallel.tensor": 2, "resume": workspace.root / f"{name}-one" / saved}
    said = train_on(2, workspace.settings(f"{name}-two", **two), OMP_NUM_THREADS="1")
    assert " parameters, on 2 x cpu" in said  # none of them frozen
    assert_same_run(workspace, f"{name}-one", f"{name}-two", "hf-ema")
    # The same files as those that the run exported, from its checkpoint
    last = workspace.root / f"{name}-four/checkpoints/step-00000005"
    convert_checkpoint(last, str(workspace.root / f"{name}-converted"))
    exported = load_file(workspace.root / f"{name}-four/hf/model.safetensors")
    converted = load_file(workspace.root / f"{name}-converted/model.safetensors")
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)


def assert_same_run(workspace, one: str, other: str, *exports: str) -> None:
    """The steps that the other has made, and the export of both."""
    for key in ("loss", "grad_norm"):
        expected, got = workspace.metrics(one, key), workspace.metrics(other, key)
        assert got == pytest.approx(expected[len(expected) - len(got) :], rel=1e-5), key
        assert got
    for export in ("hf", *exports):
        files = (workspace.root / run / export / "model.safetensors" for run in (one, other))
        ours, theirs = map(load_file, files)
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5, msg=name)


def test_the_product_is_the_number_of_ranks():
    assert Parallel(replicate=2).sizes(8) == Sizes(2, 4)
    assert Parallel(replicate=2, fsdp=2, tensor=2).sizes(8) == Sizes(2, 2, 1, 2)
    for settings, ranks, said in (
        (
            Parallel(replicate=2, fsdp=3),
            4,
            "replicate 2 x fsdp 3 = 6 is not the number of ranks, 4: start 6 processes",
        ),
        (
            Parallel(replicate=3),
            4,
            "replicate 3 does not divide the number of ranks, 4: start a multiple of 3",
        ),
        (Parallel(fsdp=2), 1, "fsdp 2 is not the number of ranks, 1: start 2 processes"),
    ):
        with pytest.raises(ValueError, match=said):
            settings.sizes(ranks)


def test_a_run_on_another_number_of_ranks_says_so(workspace):
    with pytest.raises(SystemExit, match=r"parallel: replicate 2 does not divide the number"):
        main(workspace.settings("none", **{"parallel.replicate": 2}))
    assert not (workspace.root / "none").exists()


def test_gradients_are_not_sharded_within_groups(workspace):
    with pytest.raises(SystemExit, match=r"parallel\.replicate=2 is not there for sharding"):
        main(workspace.settings("none", **{"parallel.replicate": 2, "sharding": "gradients"}))


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon"}, {"lora.rank": 4}, {"sharding": "gradients"}, {"fp8": "true"}]
)
def test_what_tensor_parallelism_lacks_is_named(workspace, changes):
    (name,) = changes
    with pytest.raises(SystemExit, match=f"{name.partition('.')[0]}.* is not there for parallel"):
        main(workspace.settings("none", **{"parallel.tensor": 2, **changes}))
