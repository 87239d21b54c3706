"""Runs with few bits, averages and states on the host: interrupted, on other ranks, exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import tigon
from tests.support.small import EXPERTS, write_model
from tests.train.checkpoints import assert_equal
from tests.train.ranks import Ranks
from tigon.train import checkpoint, load, main, prepare, start
from tigon.train.checkpoint.format import full_state
from tigon.train.distributed import World, sync_gradients
from tigon.train.logging import read_metrics
from tigon.train.optim import Ema
from tigon.train.trainer import train

BF16 = {"param_dtype": "bfloat16", "dtype": "bfloat16"}
STEPS = {"steps": 4, "save_every": 2, "keep_last": 0, "ema_decay": 0.75, "schedule": "constant"}
STEPS |= {"batch_size": 2, "seq_len": 64}
CASES = {
    "bf16": {"optimizer": "adamw_bf16", **BF16},
    "8bit": {
        "optimizer": "adamw_8bit",
        "optimizer_offload": "true",
        "parameter_groups": "[{match: 'model.layers.1.*', freeze: true}]",
        "export": "true",
    },
    "fp32-states": {"optimizer": "adamw", **BF16},
}


def tensors(saved: Path) -> dict[str, Tensor]:
    """Of all ranks: whole tensors, as their rows follow each other."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(saved.glob("*.safetensors")):
        for name, rows in load_file(path).items():
            found.setdefault(name, []).append(rows)
    numbers = {name for name in found if name.startswith("optimizer.step.")}
    return {n: rows[0] if n in numbers else torch.cat(rows) for n, rows in found.items()}


def step(run: Path, number: int) -> Path:
    return run / f"checkpoints/step-{number:08d}"


@pytest.fixture(scope="module")
def whole(workspace):
    """A run of each case without interruption, under the case's name."""
    for case, its in CASES.items():
        main(workspace.settings(case, **STEPS, **its))


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise_equal(workspace, whole, case):
    changes = STEPS | CASES[case]
    again = f"{case}-again"
    main(workspace.settings(again, resume=step(workspace.root / case, 2), **changes))
    assert workspace.metrics(again, "loss") == workspace.metrics(case, "loss")[2:]
    expected = tensors(step(workspace.root / case, 4))
    assert_equal(tensors(step(workspace.root / again, 4)), expected)
    dtypes = {name.split(".")[1] if name[0] == "o" else "": t.dtype for name, t in expected.items()}
    assert dtypes[""] == (torch.float32 if case == "8bit" else torch.bfloat16)
    if case == "8bit":
        frozen = {name for name in expected if name.startswith("model.layers.1.")}
        assert not any(name.endswith(tuple(frozen)) for name in expected.keys() - frozen)
        average = load_file(workspace.root / case / "hf-ema/model.safetensors")
        assert average.keys() == {name for name in expected if name.startswith("model.")}
        for name, tensor in average.items():
            assert torch.equal(tensor, expected[name if name in frozen else f"ema.{name}"])
        assert dtypes["exp_avg_codes"] == dtypes["exp_avg_sq_codes"] == torch.uint8
    else:
        assert dtypes["exp_avg"] == (torch.bfloat16 if case == "bf16" else torch.float32)
    assert expected["ema.model.norm.weight"].dtype == torch.float32


def save_again(world: World, settings: list[str], source: Path) -> None:
    """What a run on these ranks has of a checkpoint, before its first step."""
    run = prepare(load(None, [*settings, f"resume={source}"]), world)
    with run.saver as saver:
        saver.save(9, run.model, run.optimizer, run.tokenizer, {"config": {}}, run.ema)


def on_ranks(moved: list[tuple[list[str], Path]], runs: list[list[str]], sums: list) -> None:
    """All that the tests of this file do on two ranks."""
    with start("cpu") as world:
        for settings, source in moved:
            save_again(world, settings, source)
        for settings in runs:
            train(prepare(load(None, settings), world))
        for name, settings in sums:
            for line in gradients(world, settings):
                world.log_rank0(f"{name} {line}")


@pytest.fixture(scope="module")
def two_ranks(workspace, whole) -> str:
    """What they print."""
    changes = STEPS | CASES["bf16"]
    moved = [
        (workspace.settings(f"{case}-moved", **STEPS, **its), step(workspace.root / case, 2))
        for case, its in CASES.items()
    ]
    model = write_model(workspace.root / "experts-model", **EXPERTS)
    its = {"model": model, "optimizer": "adamw_8bit", "steps": 2, "batch_size": 2}
    main(workspace.settings("experts", **its))
    source = step(workspace.root / "experts", 2)
    moved.append((workspace.settings("experts-moved", **its), source))
    half = step(workspace.root / "ranks", 2)
    runs = [
        workspace.settings("ranks", **changes, export="true"),
        workspace.settings("ranks-again", resume=half, **changes),
    ]
    sums = [(name, workspace.settings("sums", **of)) for name, of in SUMS.items()]
    return Ranks(2, on_ranks, moved, runs, sums).finish()


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("case", [*CASES, "experts"])
def test_states_have_the_same_bits_on_two_ranks(workspace, two_ranks, case):
    source = tensors(step(workspace.root / case, 2))
    assert_equal(tensors(step(workspace.root / f"{case}-moved", 9)), source)
    if case == "experts":
        name = "optimizer.exp_avg_sq_{}.model.layers.1.mlp.experts.gate_up_proj"
        assert source[name.format("codes")].shape == (5, 80, 64)
        assert source[name.format("scale")].shape == (5, 80, 1)


def test_two_ranks_go_on_with_the_same_bits(workspace, two_ranks):
    """And draw for each element what one rank draws: their weights differ from one rank's by the
    gradients' last bits alone, which few roundings notice."""
    two = tensors(step(workspace.root / "ranks", 4))
    assert_equal(tensors(step(workspace.root / "ranks-again", 4)), two)
    main(workspace.settings("rank", **STEPS, **CASES["bf16"], accumulate_fp32="true"))
    one = tensors(step(workspace.root / "rank", 4))
    names = [name for name in one if name.startswith("model.")]
    differ = torch.cat([(one[name] != two[name]).flatten() for name in names]).float().mean()
    # Other draws make half of the weights differ
    assert differ < 0.1


def test_two_ranks_export_their_average(workspace, two_ranks):
    run = workspace.root / "ranks"
    found = tensors(step(run, 4))
    saved = load_file(run / "hf-ema/model.safetensors")
    assert_equal(saved, {name: found[f"ema.{name}"] for name in saved})
    assert not torch.equal(saved["model.norm.weight"], found["model.norm.weight"].float())


def test_the_average_is_that_of_its_definition(workspace):
    decay, changes = 0.75, {"steps": 3, "save_every": 1, "keep_last": 0, "export": "true"}
    main(workspace.settings("average", ema_decay=decay, **changes))
    run = workspace.root / "average"
    expected = {n: t.double() for n, t in load_file(workspace.model / "model.safetensors").items()}
    for number in (1, 2, 3):
        found = tensors(step(run, number))
        for name, average in expected.items():
            average.mul_(decay).add_(found[name].double(), alpha=1 - decay)
            torch.testing.assert_close(found[f"ema.{name}"].double(), average, rtol=1e-6, atol=1e-8)
    exported = tigon.from_pretrained(run / "hf-ema").state_dict()
    trained = tigon.from_pretrained(run / "hf").state_dict()
    assert exported.keys() == trained.keys()
    saved = load_file(run / "hf-ema/model.safetensors")
    assert_equal(saved, {name: found[f"ema.{name}"] for name in expected})
    assert (run / "hf-ema/tokenizer.json").is_file()
    # The average has no part in training or its evaluation
    main(workspace.settings("alone", **changes))
    assert workspace.metrics("alone", "loss") == workspace.metrics("average", "loss")
    assert not (workspace.root / "alone/hf-ema").exists()


def test_late_average_begins_with_the_weights(workspace, finished, capsys):
    source = finished / "checkpoints/step-00000002"
    with start("cpu") as world:
        run = prepare(
            load(None, workspace.settings("later", steps=3, ema_decay=0.9, resume=source)), world
        )
        assert "ema_decay 0.0 -> 0.9" in capsys.readouterr().out
        assert isinstance(run.ema, Ema)
        for name, p in run.model.named_parameters():
            assert torch.equal(run.ema.values[name], p)
            run.ema.values[name].zero_()
        state = full_state(run.model, run.optimizer, run.ema)
        assert {name.split(".")[0] for name in state} == {"model", "optimizer", "ema"}
        checkpoint.load(source, run.model, run.optimizer)  # nor does one that is not wanted hinder


@pytest.mark.parametrize(
    ("changes", "was", "now"),
    [
        ({"optimizer": "adamw_8bit"}, "exp_avg, exp_avg_sq, step", "exp_avg, exp_avg_codes"),
        ({"optimizer": "sgd"}, "exp_avg, exp_avg_sq, step", "step"),
    ],
)
def test_states_of_another_optimizer_are_refused(workspace, finished, changes, was, now):
    source = finished / "checkpoints/step-00000002"
    with pytest.raises(SystemExit, match=f"states of another optimizer: {was}; this one has {now}"):
        main(workspace.settings("other", steps=3, resume=source, **changes))


def test_adamws_states_become_bfloat16_and_that_is_said(workspace, finished, capsys):
    source = finished / "checkpoints/step-00000002"
    changes = {"optimizer": "adamw_bf16", "steps": 3, "resume": source}
    main(workspace.settings("fewer", **changes))
    assert 'optimizer "adamw" -> "adamw_bf16"' in capsys.readouterr().out
    loss = [row["loss"] for row in read_metrics(finished / "metrics.jsonl") if "loss" in row][2:]
    assert workspace.metrics("fewer", "loss") == loss  # of weights that are the same
    found = tensors(step(workspace.root / "fewer", 3))
    assert found["optimizer.exp_avg.model.norm.weight"].dtype == torch.bfloat16


SUMS = {"bfloat16": BF16, "float32": {"dtype": "bfloat16"}}  # weights, of a bfloat16 computation


def gradients(world: World, settings: list[str], batches: int = 8) -> list[str]:
    """Relative rms error of the sums of micro-batches' gradients, against fp64."""
    run = prepare(load(None, settings), world)
    draw = torch.Generator().manual_seed(world.rank)
    inputs = [torch.randint(0, 321, (1, 16), generator=draw) for _ in range(batches)]
    plain = tigon.from_pretrained(run.config.model).to(torch.bfloat16).train()
    exact = {name: torch.zeros(p.shape).double() for name, p in plain.named_parameters()}
    for i, ids in enumerate(inputs):
        (plain(ids, labels=ids).loss / 7).backward()
        for name, p in plain.named_parameters():
            exact[name] += p.grad.double()
            p.grad = None
        sync_gradients(run.model, i == batches - 1)
        (run.model(ids, labels=ids).loss / 7).backward()
    found = []
    for name, p in run.model.named_parameters():
        total = world.all_reduce_sum(exact[name])
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found.append(f"{name} {((whole.double() - total).norm() / total.norm()).item()}")
    return found


def errors(lines: list[str]) -> list[float]:
    found = [float(line.split()[-1]) for line in lines]
    assert len(found) > 8
    return found


# One rounding of the sum to bfloat16 has an error of at most 2**-9; that of float32 sums is below
# 2**-20, with as many terms
BOUNDS = {"bfloat16": 2**-9, "float32": 2**-20}


@pytest.mark.parametrize("weights", SUMS)
def test_gradients_of_micro_batches_add_up_in_float32(workspace, world, two_ranks, weights):
    """FSDP2 keeps what a rank adds up in its reduce_dtype, which is float32."""
    settings = workspace.settings("sums", **SUMS[weights])
    one = errors(gradients(world, [*settings, "accumulate_fp32=true"]))
    two = errors([line for line in two_ranks.splitlines() if line.startswith(f"{weights} ")])
    assert max(one + two) < BOUNDS[weights]


def test_sums_are_bfloat16_without_accumulate_fp32(workspace, world):
    found = errors(gradients(world, workspace.settings("sums", **BF16)))
    assert max(found) > 2**-8
