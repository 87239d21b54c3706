"""Ranks in several dimensions of a mesh against one process."""

import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.support.small import write_model
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import TORCHRUN, Ranks, train_on
from tigon.parallel import MeshSizes
from tigon.settings.config import Parallel, mesh_sizes
from tigon.train import load, main, prepare, start, train
from tigon.train.model import check_sizes


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("changes", "wrapped"),
    [({}, False), ({"dtype": "bfloat16"}, True), ({"param_dtype": "bfloat16"}, False)],
)
def test_fsdp_casts_where_it_divides_nothing(workspace, changes, wrapped):
    """Weights in float32 that are computed with in bfloat16 need it, as on one rank."""
    run = f"casts-{'-'.join(changes)}"
    same = {"steps": 2, "lr": 1e-3, **changes}
    main(workspace.settings(f"{run}-one", **same))
    settings = workspace.settings(f"{run}-two", **same, **{"parallel.tensor": 2})
    said = Ranks(2, train_and_say, settings).finish()
    assert said.count(f"wrapped: {wrapped}") == 2
    assert_same_metrics(workspace, f"{run}-one", f"{run}-two", rel=3e-2 if changes else 1e-5)


def test_layout_is_printed(workspace):
    """With the parameters, which say how many of them are frozen, and what is new of it."""
    frozen = {"parameter_groups": "[{match: '*.layers.0.*', freeze: true}]", "steps": 1}
    main(workspace.settings("printed", **frozen))
    source = workspace.checkpoint("printed", 1)
    two = {"steps": 2, "parallel.tensor": 2, "resume": source}
    said = train_on(2, workspace.settings("printed-two", **frozen | two))
    assert " of them frozen, on 2 x cpu: tensor 2\n" in said
    assert "step-00000001: parallel.tensor 1 -> 2\n" in said


def test_blocks_that_ranks_would_divide(workspace):
    settings = workspace.settings("none", **{"optimizer": "adamw_8bit", "parallel.tensor": 2})
    with pytest.raises(AssertionError, match=r"blocks of 64 columns, and this rank has the 32 of"):
        train_on(2, settings)


def train_and_say(settings: list[str]) -> None:
    torch.set_num_threads(1)
    with start("cpu", parallel=Parallel(tensor=2)) as world:
        run = prepare(load(None, settings), world)
        train(run)
        print("wrapped:", isinstance(run.model, FSDPModule))


def test_the_product_is_the_number_of_ranks():
    assert Parallel(replicate=2).sizes(8) == MeshSizes(2, 4)
    assert Parallel(replicate=2, fsdp=2, tensor=2).sizes(8) == MeshSizes(2, 2, 1, 2)
    for settings, ranks, said in (
        (Parallel(replicate=2, fsdp=3), 4, "2 x fsdp 3 is for 6 ranks, and there are 4: start 6"),
        (Parallel(replicate=3), 4, "3 is for 3 ranks, and there are 4: start a multiple of 3"),
        (Parallel(fsdp=2), 1, "fsdp 2 is for 2 ranks, and there are 1: start 2 processes"),
        (Parallel(expert=2), 1, r"expert=2 must divide .*, 1 \(.*: start more processes \(--nproc"),
    ):
        with pytest.raises(ValueError, match=said):
            settings.sizes(ranks)


def test_wrong_sizes_are_named_once(workspace, monkeypatch):
    with pytest.raises(SystemExit, match=r"parallel: replicate 2 is for 2 ranks"):
        main(workspace.settings("none", **{"parallel.replicate": 2}))
    assert not (workspace.root / "none").exists()
    monkeypatch.setattr(sys.modules["tigon.train.launch"], "elastic_launch", pytest.fail)
    given = workspace.settings("none", **{"parallel.tensor": 3})
    with pytest.raises(SystemExit, match="tensor 3 is for 3 ranks, and there are 2"):
        main(["--nproc", "2", *given])
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="rank 1: parallel: tensor 3 is for 3 ranks"):
        main(given)  # started by hand: nobody else says it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for rank, said in (("0", "tensor 3 is for 3 ranks"), ("1", "^1$")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match=said):
            main(given)
        with pytest.raises(
            SystemExit, match="optimizer='nope' is not one" if said != "^1$" else said
        ):
            main([*given, "optimizer=nope"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.tensor": 8}, "8 ranks cannot share 4 heads with 2 kv heads"),
        ({"parallel.expert": 8}, "LlamaForCausalLM has no experts for 8 ranks"),
    ],
)
def test_unsharable_model_is_named_before_data(workspace, changes, said):
    given = workspace.settings("none", data="hf://nowhere", batch_size=8, device="auto", **changes)
    with pytest.raises(SystemExit, match=said):
        main(["--dry-run", "--nproc", "8", *given])
    config = load(None, given)
    with pytest.raises(ValueError, match=said):
        check_sizes(config, mesh_sizes(config, 8))


def test_columns_without_draws_are_named(workspace):
    """The first rank's would do: 60 units on 4 ranks begin at 0, 15, 30 and 45."""
    thin = write_model(workspace.root / "thin", intermediate_size=60)
    (weights,) = thin.glob("*.safetensors")
    weights.unlink()
    lora = {"lora.rank": 2, "lora.dropout": 0.1}
    given = workspace.settings("none", model=thin, data="hf://nowhere", device="auto", **lora)
    said = r"dropout=0.1 does not work where a rank's columns begin at 15 \(.*down_proj"
    with pytest.raises(SystemExit, match=said):
        main(["--dry-run", "--nproc", "4", *given, "parallel.tensor=4"])
    # Those of other layers begin where draws do
    config = load(None, [*given, "lora.targets=[q_proj, gate_proj]"])
    check_sizes(config, MeshSizes(tensor=4))
