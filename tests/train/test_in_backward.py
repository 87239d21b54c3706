"""`optimizer_in_backward`: the bits of updates after backward, without their gradients."""

import gc
import math
import re
import weakref
from typing import Any

import pytest
import torch

import tigon.kernels
from tests.support.small import EXPERTS, LLAMA
from tests.train.checkpoints import assert_equal
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import train_on
from tests.train.test_memory import planned, tiny
from tests.train.test_precision import states
from tests.train.test_precision_runs import step, tensors
from tigon.models import MODELS
from tigon.train import checkpoint, load, main, prepare, train, trainer
from tigon.train.optim import InBackward, build_optimizer, check_ranks, clip, parameter_buckets
from tigon.train.optim.adamw import LowPrecisionOptimizer
from tigon.train.tasks import MicroBatchLoss
from tigon.train.tasks.language_modeling import CrossEntropyTask

ON = {"optimizer_in_backward": "true", "max_grad_norm": 0}
BF16 = {"param_dtype": "bfloat16", "dtype": "bfloat16"}
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the model, and settings
    "float32, tied": ({}, {"weight_decay": 0.1}),
    "bfloat16 states and weights": (UNTIED, {"optimizer": "adamw_bf16", **BF16}),
    "8 bits over float32": ({}, {"optimizer": "adamw_8bit"}),
    "8 bits, to nearest": (
        UNTIED, {"optimizer": "adamw_8bit", "stochastic_rounding": "false", **BF16}
    ),
    "sgd": ({}, {"optimizer": "sgd", "momentum": 0.9, "nesterov": "true"}),
    "experts": (EXPERTS, {"optimizer": "adamw_bf16", **BF16}),
    "groups": (
        UNTIED,
        {
            "parameter_groups": "[{match: ['*.layers.0.*', lm_head*], freeze: true}, "
            "{match: '*.mlp.*', lr: 1.0e-4, weight_decay: 0.3}]"
        },
    ),
}  # fmt: skip
STEPS = 3


def settings(**changes: Any) -> Any:
    values = {"run_dir": "x", "data": "x", "model": "x", "lr": 1e-2, "max_grad_norm": 0} | changes
    return load(None, [f"{key}={value}" for key, value in values.items()])


def learner(changes: dict[str, Any], device: str = "cpu", **its: Any) -> tuple[Any, Any]:
    """A model and its optimizer."""
    config, shape = settings(**its), LLAMA | changes
    torch.manual_seed(0)
    dtype = getattr(torch, config.param_dtype)
    model = MODELS[shape["model_type"]].from_config(shape, dtype=dtype).to(device).train()
    return model, build_optimizer(model, config)


def loss_of(model: Any, number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(320, (2, 24), generator=draw)
    with tigon.kernels.use("reference"):
        return model(ids, labels=ids).loss


def held(model: Any) -> int:
    """Bytes of gradients."""
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_updates_in_backward_equal_updates_after_it(case, recomputed):
    model, optimizer = learner(CASES[case][0], **CASES[case][1])
    its, after = learner(CASES[case][0], **CASES[case][1])
    model.activation_checkpointing = its.activation_checkpointing = recomputed
    updates = InBackward(model, optimizer)
    for number in range(STEPS):
        for group in (*optimizer.param_groups, *after.param_groups):
            group["lr"] = 1e-2 / (1 + number)
        loss, expected = loss_of(model, number), loss_of(its, number)
        norm = updates.backward(loss)
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(norm, clip(its, after, 0)[0]) and norm > 0
        after.step()
        after.zero_grad()
        assert held(model) == 0
    assert_equal(dict(model.named_parameters()), dict(its.named_parameters()))
    assert_equal(states(model, optimizer), states(its, after))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(optimizer.state[p]["step"] == STEPS for p in trained)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("finite", [True, False])
def test_the_kernel_updates_in_backward_too(finite):
    """Under Triton's interpreter. A loss that is not finite changes nothing, on the device."""
    changes = {"optimizer": "adamw_bf16", **BF16}
    model, optimizer = learner({}, **changes)
    its, after = learner({}, **changes)
    updates = InBackward(model, optimizer)
    for number in range(2):
        poison = 1.0 if finite or number == 0 else math.nan
        before = {n: t.clone() for n, t in (dict(model.named_parameters()) | states(
            model, optimizer)).items()}  # fmt: skip
        loss = loss_of(model, number) * poison
        with tigon.kernels.use("triton"):
            norm = updates.backward(loss)
        assert held(model) == 0
        if poison != poison:
            assert norm.isnan()
            updates.undo_step()
            now = dict(model.named_parameters()) | states(model, optimizer)
            assert_equal(now, before)
            continue
        loss_of(its, number).backward()
        with tigon.kernels.use("triton"):
            expected, _ = clip(its, after, 0)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)  # of other partial sums
            after.step()
        after.zero_grad()
    assert_equal(dict(model.named_parameters()), dict(its.named_parameters()))
    assert_equal(states(model, optimizer), states(its, after))
    assert {name for name, _ in updates.optimizer.kernel.tables} >= {
        ((part.number, i), 0) for part in updates.parts for i in part.groups
    }


@pytest.mark.parametrize("changes", [UNTIED, {}, EXPERTS], ids=["untied", "tied", "experts"])
def test_gradients_of_one_part_are_alive(changes):
    """Of a block, of the embedding, or of the last norm and the head."""
    model, optimizer = learner(changes | {"num_hidden_layers": 6})
    sizes, alive = [sum(p.nbytes for p in part) for part in parameter_buckets(model)], []
    for p in model.parameters():  # before the hooks that free them
        p.register_post_accumulate_grad_hook(lambda _: alive.append(held(model)))
    updates = InBackward(model, optimizer)
    updates.backward(loss_of(model, 0))
    assert len(alive) == len(list(model.parameters())) and held(model) == 0
    assert max(alive) == max(sizes) < sum(sizes) / 2
    loss_of(model, 1).backward()  # any other backward is as ever
    assert held(model) == sum(sizes)


def test_a_model_that_nobody_keeps_is_freed() -> None:
    def train_one() -> weakref.ref[Any]:
        model, optimizer = learner({})
        updates = InBackward(model, optimizer)
        ids = torch.arange(8)[None]
        updates.backward(model(input_ids=ids, labels=ids).loss)
        return weakref.ref(next(model.parameters()))

    weight = train_one()
    gc.collect()
    assert weight() is None


def test_several_micro_batches_are_refused(workspace):
    config = settings(**ON, batch_size=8, micro_batch_size=2)
    check_ranks(config, 4)
    with pytest.raises(ValueError, match="has 2 on each of 2 ranks: give micro_batch_size=4, or "):
        check_ranks(config, 2)
    said = "batch_size=4 with micro_batch_size=1 has 4 on one rank: give micro_batch_size=4, or "
    for option in ([], ["--dry-run"]):
        with pytest.raises(SystemExit, match=f"optimizer_in_backward=true .*{said}batch_size=1"):
            main([*workspace.settings("several", **ON, micro_batch_size=1), *option])


RUN = {"steps": 6, "batch_size": 2, "micro_batch_size": 2, "save_every": 2, "keep_last": 0}
RUN |= {"ema_decay": 0.75, "max_grad_norm": 0, "eval_every": 3, "weight_decay": 0.1}
FSDP = {"dtype": "bfloat16"}  # over float32 weights, on one rank too


@pytest.fixture(scope="module")
def ordinary(workspace):
    """Runs whose updates come after backward: plain, and by FSDP2."""
    both = {"after": {}, "after-fsdp": FSDP}
    for run, changes in both.items():
        main(workspace.settings(run, **RUN, **changes, eval_data=workspace.held_out))


def same(workspace, run: str, other: str) -> None:
    assert_same_metrics(workspace, other, run, "loss", "grad_norm", "eval_loss", "lr", rel=0)
    final = RUN["steps"]
    assert_equal(
        tensors(step(workspace.root / run, final)), tensors(step(workspace.root / other, final))
    )


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("run", "changes"), [("in", {}), ("in-fsdp", FSDP)])
def test_run_and_resumed_run_equal_updates_after_backward(workspace, ordinary, run, changes):
    its = RUN | ON | changes | {"eval_data": workspace.held_out}
    main(workspace.settings(run, **its, profile="{start: 2, steps: 1}"))
    same(workspace, run, run.replace("in", "after"))
    assert (workspace.root / run / "profile/trace.json.gz").exists()
    source = step(workspace.root / run, 2)
    main(workspace.settings(f"{run}-again", **its, resume=source))
    same(workspace, f"{run}-again", run)


def test_two_ranks_update_in_backward_as_one_does(workspace):
    """17 rows: the second rank has none in the last step. FSDP2 reduces before the hooks run."""
    its = {"steps": 9, "batch_size": 2, "max_grad_norm": 0, "optimizer": "adamw_8bit"}
    train_on(2, workspace.settings("two", **its))
    train_on(2, workspace.settings("two-in", **its, optimizer_in_backward="true"))
    main(workspace.settings("one-in", **its | ON, micro_batch_size=2))
    assert_same_metrics(workspace, "two", "two-in", rel=0)
    assert_same_metrics(workspace, "one-in", "two-in", rel=1e-3)
    assert_equal(
        tensors(step(workspace.root / "two-in", 9)), tensors(step(workspace.root / "two", 9))
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Makes the loss of the steps counted from 0 NaN, or its gradients alone."""

    def poison(number: int, *, gradients: bool) -> None:
        loss, calls = CrossEntropyTask.loss, []

        def bad(self, model, inputs, sums):
            part = loss(self, model, inputs, sums)
            calls.append(model.training)
            if not model.training or len(calls) != number + 1:
                return part
            if gradients:
                part.loss.register_hook(lambda g: g * math.nan)
                return part
            return MicroBatchLoss(part.loss * math.nan, part.metrics)

        monkeypatch.setattr(CrossEntropyTask, "loss", bad)

    return poison


def test_a_loss_that_is_not_finite_is_skipped(workspace, poisoned, monkeypatch):
    its = RUN | {"nonfinite": "skip", "eval_every": 0, "steps": 4}
    poisoned(1, gradients=False)
    main(workspace.settings("skipping", **its))
    monkeypatch.undo()
    poisoned(1, gradients=False)
    main(workspace.settings("skipping-in", **its, optimizer_in_backward="true"))
    for run in ("skipping", "skipping-in"):
        assert len(workspace.metrics(run, "skipped")) == 1
    found = tensors(step(workspace.root / "skipping-in", 4))
    assert_equal(found, tensors(step(workspace.root / "skipping", 4)))
    assert found["optimizer.step.model.norm.weight"] == 3


@pytest.mark.slow
def test_nonfinite_gradients_stop_or_roll_back(workspace, poisoned, monkeypatch):
    its = RUN | ON | {"eval_every": 0, "steps": 4}
    poisoned(2, gradients=True)
    with pytest.raises(SystemExit) as error:
        main(workspace.settings("bad", **its, nonfinite="skip"))
    assert re.search(
        r"step 3: loss \d.*, gradient norm nan; its rows are .* The weights were changed in "
        r"backward, and not saved; last checkpoint: .*02; nonfinite=rollback would go on",
        str(error.value),
    )
    assert checkpoint.latest(workspace.root / "bad/checkpoints").name == "step-00000002"
    runs = {"back": {"optimizer_in_backward": "false"}, "back-in": {}}
    for run, changes in runs.items():
        monkeypatch.undo()
        poisoned(2, gradients=True)
        main(workspace.settings(run, **its | changes, nonfinite="rollback"))
        assert workspace.metrics(run, "rollbacks") == [1, 1]
    assert_equal(
        tensors(step(workspace.root / "back-in", 4)), tensors(step(workspace.root / "back", 4))
    )


def on_update(monkeypatch, number: int, act: Any) -> None:
    """Calls `act` before the update of a part, of all that the run makes."""
    update, calls = LowPrecisionOptimizer.update, []

    def counted(self, *given, **more):
        calls.append(1)
        if len(calls) == number:
            act()
        update(self, *given, **more)

    monkeypatch.setattr(LowPrecisionOptimizer, "update", counted)


def interrupt() -> None:
    raise KeyboardInterrupt


# A step updates four parts: embedding with head, two blocks, the last norm
def test_partly_updated_weights_are_not_saved(workspace, ordinary, monkeypatch, world):
    its = workspace.settings("broken-off", **RUN | ON, eval_data=workspace.held_out)
    on_update(monkeypatch, 3 * 4 + 2, interrupt)
    run = prepare(load(None, its), world)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    said = "weights of which some have its update and some have not: begin again, from a checkpoint"
    with pytest.raises(RuntimeError, match=said):
        trainer.save(run, 4, None, {}, last=False)
    with run.prefetcher, pytest.raises(RuntimeError, match=said):
        trainer.forward_backward(run, 3)
    assert checkpoint.latest(run.saver.directory).name == "step-00000002"
    world.closing.close()  # and with it the claim on the directory
    monkeypatch.undo()
    train(prepare(load(None, [*its, "resume=auto"]), world))
    same(workspace, "broken-off", "after")


@pytest.mark.parametrize("gpus", [1, 2])
def test_estimate_counts_gradients_of_one_part(gpus):
    changes: dict[str, Any] = {"max_grad_norm": 0.0, "optimizer": "adamw_bf16"}
    changes |= {"batch_size": 2 * gpus, "seq_len": 8, "activation_checkpointing": True}
    shape: Any = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
    shape |= {"tie_word_embeddings": False, "vocab_size": 256}
    model = tiny("llama", "tied", **shape)
    every = sum(2 * p.numel() for p in model.parameters()) // gpus
    largest = max(sum(2 * p.numel() for p in part) for part in parameter_buckets(model)) // gpus
    after = planned(model, gpus, **changes)
    its = planned(tiny("llama", "tied", **shape), gpus, **changes, optimizer_in_backward=True)
    assert after.kinds["gradients"] > 0.9 * every
    # Before they are reduced, a block's gradients are whole
    assert its.kinds.get("gradients", 0) <= 1.1 * gpus * largest < 0.2 * every
    assert after.total - its.total > 0.75 * every
