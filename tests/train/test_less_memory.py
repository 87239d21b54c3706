"""A step that runs out of memory goes on with less, or says what would take less."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.train.test_choices import LAYERS, given, outlined
from tigon.settings.load import load
from tigon.train import build, dry_run, main, trainer
from tigon.train.choices import BY_MEMORY, StepChoice, lessen
from tigon.train.distributed import InputError, World
from tigon.train.less_memory import StepMemoryError, within_memory

CHOICE = StepChoice(frozenset(BY_MEMORY), "full", 6, 0, 10, False, 0, 0)


def test_each_next_choice_takes_less() -> None:
    config = load(None, given(batch_size=24, micro_batch_size="auto"))
    found, steps = CHOICE, []
    while (smaller := lessen(found, config, 2)) is not None:
        found = smaller
        steps.append((found.rows, found.blocks, found.offload))
    expected = [(3, 0, False), (1, 0, False), (1, 3, False), (1, 6, False), (1, 10, False)]
    assert steps == [*expected, (1, 10, True)]
    fixed = StepChoice(frozenset({"sharding"}), "full", 6, 0, 10, False, 0, 0)
    assert lessen(fixed, config, 2) is None


# torch's allocator raises the first; drivers and libraries allocate, too
FULL = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
)


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Micro-batches of more rows than the last number fail in backward, amid their gradients."""
    most, errors = [10**9], itertools.cycle(FULL)
    loss = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **options: Any) -> None:
        loss(self, *args, **options)
        if self.device.type != "meta" and most[-1] < backward.rows:
            raise next(errors)

    def resolve(run: Any, data_step: int) -> Any:
        backward.rows = run.data.micro_batch_size  # type: ignore[attr-defined]
        return forward_backward(run, data_step)

    forward_backward = trainer.forward_backward
    monkeypatch.setattr(trainer, "forward_backward", resolve)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    yield most


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16", "sharding": "gradients"}], ids=["plain", "zero"]
)
def test_a_step_without_memory_is_repeated(workspace, capsys, short_of_memory, changes) -> None:
    """With fewer rows, the bits are those of a run that had so few from the beginning."""
    name = f"less {len(changes)}"
    same = {"schedule": "constant", "batch_size": 4, **changes}
    main(workspace.settings(f"{name} plain", steps=3, micro_batch_size=1, **same))
    capsys.readouterr()
    short_of_memory.append(1)
    auto = same | {"memory_budget": 1, "resume": "auto"}
    main(workspace.settings(name, steps=2, **auto))
    said = capsys.readouterr().out
    assert "chosen: micro_batch_size=4, " in said
    for rows, why in ((2, "CUDA out of memory"), (1, r"Triton Error [CUDA]: out of memory")):
        assert f"step 1: {why}: goes on with micro_batch_size={rows}, " in said
    main(workspace.settings(name, steps=3, **auto))  # as it came to be
    said = capsys.readouterr().out
    assert "chosen: micro_batch_size=1, " in said and "out of memory" not in said
    assert workspace.metrics(name, "loss") == workspace.metrics(f"{name} plain", "loss")
    # Another machine may choose anew
    assert "micro_batch_size: auto\n" in (workspace.root / name / "config.yaml").read_text()


@pytest.mark.parametrize("error", FULL, ids=["tensor", "kernel", "workspace", "driver"])
def test_memory_that_ends_outside_of_passes(workspace, monkeypatch, error) -> None:
    number = FULL.index(error)
    function = ("update_weights", "evaluate")[number % 2]
    monkeypatch.setattr(trainer, function, Mock(side_effect=error))
    with pytest.raises(SystemExit) as caught:
        main(workspace.settings(f"full {number}", steps=1, eval_data=workspace.held_out))
    problem = str(error).split("\n")[0].split(". ")[0]
    assert f"{problem}: give a smaller seq_len, act" in str(caught.value)


def test_other_errors_of_a_step_are_raised(workspace, monkeypatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(trainer, "forward_backward", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(workspace.settings("illegal", steps=1))


def test_a_model_that_does_not_fit(workspace, monkeypatch) -> None:
    monkeypatch.setattr(build, "build_optimizer", Mock(side_effect=FULL[0]))
    with pytest.raises(SystemExit, match="the model: CUDA out of memory: give param_dtype=bfloat"):
        main(workspace.settings("large", steps=1))


def test_a_dry_run_goes_on_with_less(workspace, capsys, monkeypatch, short_of_memory) -> None:
    """As the run does, and says that a step does not fit where that stops."""
    monkeypatch.setattr(dry_run, "forward_backward", trainer.forward_backward)
    given = workspace.settings("dry", batch_size=4, memory_budget=1)
    short_of_memory.append(1)
    main(["--dry-run", *given])
    said = capsys.readouterr().out
    assert "goes on with micro_batch_size=1, " in said and "a step, measured: " in said
    short_of_memory.append(0)
    with pytest.raises(SystemExit, match=r"a step does not fit: step 1: .*\n  less"):
        main(["--dry-run", *given])


def test_nothing_that_takes_less(workspace, short_of_memory) -> None:
    short_of_memory.append(0)
    with pytest.raises(SystemExit, match="step 1: CUDA out of memory: give a smaller seq_len, act"):
        main(workspace.settings("none left", steps=1))


@pytest.mark.parametrize(
    ("ranks", "in_backward", "said"),
    [(2, None, "rank 1: step 3: CUDA out of memory: give a"), (1, "one", "step 3: CUDA out of")],
)
def test_passes_that_cannot_be_repeated(ranks: int, in_backward: Any, said: str) -> None:
    passes = Mock(side_effect=FULL[0])
    world = World(ranks - 1, ranks, torch.device("cpu"))
    config = load(None, given())
    run: Any = SimpleNamespace(
        world=world, in_backward=in_backward, choice=CHOICE, model=outlined(), config=config
    )
    with pytest.raises(InputError, match=said):
        within_memory(run, 3, passes)
    passes.assert_called_once()


@pytest.mark.parametrize(
    ("rows", "recomputed", "offload", "said"),
    [
        ("auto", 2, False, "a smaller micro_batch_size, a smaller seq_len, activation_checkpointi"),
        (1, frozenset(), False, "a smaller seq_len, activation_checkpointing=true, or what"),
        (1, frozenset(range(LAYERS)), False, "a smaller seq_len, activation_offload=true, or what"),
        (1, True, True, "a smaller seq_len, or what"),
    ],
)
def test_advice_names_no_setting_that_is_on(rows, recomputed, offload, said) -> None:
    model = outlined()
    model.activation_checkpointing, model.activation_offload = recomputed, offload
    run: Any = SimpleNamespace(model=model, config=load(None, given(micro_batch_size=rows)))
    assert str(StepMemoryError("full", run)).startswith(f"full: give {said}")
