"""Ranks in several dimensions of a mesh against one process."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from tests.numbers import relative_error
from tests.small import EXPERTS, write_model
from tests.train.layouts import assert_same_metrics, assert_same_tensors
from tests.train.ranks import TORCHRUN, Ranks, train_on
from tigon.parallel import MeshSizes
from tigon.train import load, main, prepare, start, train
from tigon.train.config import Parallel, mesh_sizes
from tigon.train.export import convert_checkpoint
from tigon.train.model import check_sizes

# Adam divides a gradient by its size: where that is near eps, as of a few weights in each run, its
# rounding errors are as large as the step. They are not with a larger eps.
STEPS = {"steps": 5, "warmup_steps": 2, "export": "true", "eps": 1e-6}


@pytest.mark.slow(first=1)
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


@pytest.mark.slow
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
    assert " parameters, on 2 x cpu: tensor 2\n" in said  # none of them frozen
    assert "step-00000003: parallel.tensor 1 -> 2\n" in said
    assert_same_run(workspace, f"{name}-one", f"{name}-two", "hf-ema")
    # The same files as those that the run exported, from its checkpoint
    last, converted = f"{name}-four/checkpoints/step-00000005", workspace.root / f"{name}-converted"
    convert_checkpoint(workspace.root / last, str(converted))
    assert_same_tensors(workspace.root / f"{name}-four/hf", converted)


@pytest.mark.slow
def test_ranks_that_share_layers_alone(workspace):
    """FSDP2 divides nothing there, and is left out: frozen weights, micro-batches, clipping, the
    average of the weights, and a run that goes on are as on one rank."""
    steps = STEPS | {"ema_decay": 0.5, "max_grad_norm": 0.1, "micro_batch_size": 1, "batch_size": 2}
    steps |= {"parameter_groups": "[{match: '*.layers.0.*', freeze: true}]"}
    main(workspace.settings("alone-one", **steps))
    two = steps | {"parallel.tensor": 2, "save_every": 3, "keep_last": 0}
    assert "frozen" in train_on(2, workspace.settings("alone-two", **two))
    assert_same_run(workspace, "alone-one", "alone-two", "hf-ema")
    source = workspace.root / "alone-two/checkpoints/step-00000003"
    for run, count, settings in (("fewer", 1, steps), ("same", 2, two)):
        train_on(count, workspace.settings(f"alone-{run}", **settings, resume=source))
        assert_same_run(workspace, "alone-one", f"alone-{run}", "hf-ema")
    assert_same_tensors(*(workspace.root / f"alone-{run}/hf" for run in ("two", "same")))


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


@pytest.mark.slow
def test_states_of_eight_bits(workspace):
    """Their blocks are those of whole rows, and go from one layout to another. What is rounded
    otherwise may have another code."""
    model = write_model(workspace.root / "wide", head_dim=128, intermediate_size=512)
    same = STEPS | {"optimizer": "adamw_8bit", "model": model, "save_every": 3, "keep_last": 0}
    main(workspace.settings("eight-one", **same))
    two = same | {"parallel.tensor": 2}
    train_on(2, workspace.settings("eight-two", **two))
    assert_near(workspace, "eight-one", "eight-two")
    for run, count, source, settings in (
        ("fewer", 1, "eight-two", same),
        ("more", 2, "eight-one", two),
        ("four", 4, "eight-one", two),
        ("same", 2, "eight-two", two),
    ):
        resume = workspace.root / source / "checkpoints/step-00000003"
        more = {"OMP_NUM_THREADS": "1"} if count == 4 else {}
        train_on(count, workspace.settings(f"eight-{run}", **settings, resume=resume), **more)
        assert_near(workspace, "eight-one", f"eight-{run}")
    assert_same_tensors(*(workspace.root / f"eight-{run}/hf" for run in ("two", "same")))


def assert_near(workspace, one: str, other: str) -> None:
    assert_same_metrics(workspace, one, other, "loss", rel=1e-4)
    files = (workspace.root / run / "hf/model.safetensors" for run in (one, other))
    expected, found = map(load_file, files)
    for name, weight in expected.items():
        assert relative_error(found[name], weight) < 1e-3, name


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


def assert_same_run(workspace, one: str, other: str, *exports: str) -> None:
    """The steps that the other has made, and the export of both."""
    assert_same_metrics(workspace, one, other)
    for export in ("hf", *exports):
        assert_same_tensors(*(workspace.root / run / export for run in (one, other)), atol=1e-5)


def test_the_product_is_the_number_of_ranks():
    assert Parallel(replicate=2).sizes(8) == MeshSizes(2, 4)
    assert Parallel(replicate=2, fsdp=2, tensor=2).sizes(8) == MeshSizes(2, 2, 1, 2)
    for settings, ranks, said in (
        (Parallel(replicate=2, fsdp=3), 4, "2 x fsdp 3 = 6 is not the number of ranks, 4: start 6"),
        (Parallel(replicate=3), 4, "3 does not divide the number of ranks, 4: start a multiple"),
        (Parallel(fsdp=2), 1, "fsdp 2 is not the number of ranks, 1: start 2 processes"),
        (Parallel(expert=2), 1, r"expert=2 must divide .*, 1 \(.*: start more processes \(--nproc"),
    ):
        with pytest.raises(ValueError, match=said):
            settings.sizes(ranks)


def test_a_run_on_another_number_of_ranks_says_so(workspace):
    with pytest.raises(SystemExit, match=r"parallel: replicate 2 does not divide the number"):
        main(workspace.settings("none", **{"parallel.replicate": 2}))
    assert not (workspace.root / "none").exists()


def test_wrong_sizes_are_told_once_and_before_ranks_start(workspace, monkeypatch):
    monkeypatch.setattr(sys.modules["tigon.train.launch"], "elastic_launch", pytest.fail)
    given = workspace.settings("none", **{"parallel.tensor": 3})
    with pytest.raises(SystemExit, match="tensor 3 does not divide the number of ranks, 2"):
        main(["--nproc", "2", *given])
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="rank 1: parallel: tensor 3 does not divide"):
        main(given)  # started by hand: nobody else says it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for rank, said in (("0", "tensor 3 does not divide"), ("1", "^1$")):
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
def test_what_ranks_cannot_share_is_told_before_data_are_read(workspace, changes, said):
    given = workspace.settings("none", data="nowhere.jsonl", batch_size=8, device="auto", **changes)
    with pytest.raises(SystemExit, match=said):
        main(["--dry-run", "--nproc", "8", *given])
    config = load(None, given)
    with pytest.raises(ValueError, match=said):
        check_sizes(config, mesh_sizes(config, 8))


def test_columns_without_draws_are_told_before_data_are_read(workspace):
    """The first rank's would do: 60 units on 4 ranks begin at 0, 15, 30 and 45."""
    thin = write_model(workspace.root / "thin", intermediate_size=60)
    (weights,) = thin.glob("*.safetensors")
    weights.unlink()
    lora = {"lora.rank": 2, "lora.dropout": 0.1}
    given = workspace.settings("none", model=thin, data="nowhere.jsonl", device="auto", **lora)
    said = r"dropout=0.1 does not work where a rank's columns begin at 15 \(.*down_proj"
    with pytest.raises(SystemExit, match=said):
        main(["--dry-run", "--nproc", "4", *given, "parallel.tensor=4"])
    # Those of other layers begin where draws do
    config = load(None, [*given, "lora.targets=[q_proj, gate_proj]"])
    check_sizes(config, MeshSizes(tensor=4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.tensor": 2, "lora.quantize": "nf4"}, "lora.quantize=nf4 .* parallel.tensor=2"),
        (
            {"parallel.replicate": 2, "sharding": "gradients"},
            r"parallel\.replicate=2 does not work",
        ),
    ],
)
def test_combinations_without_support(workspace, changes, said):
    with pytest.raises(SystemExit, match=said):
        main(workspace.settings("none", **changes))
