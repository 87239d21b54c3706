"""`activation_checkpointing: auto`: what is computed again is the least that fits a budget."""

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.test_memory import B, tiny
from tigon.layers import activation_offload as offloading
from tigon.train import main, memory
from tigon.train.config_file import load
from tigon.train.distributed import World
from tigon.train.memory import GIB, CheckpointingChoice, spaced_blocks
from tigon.train.tasks import find_task

WORLD = World(0, 1, torch.device("cpu"))
LAYERS = 6
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": LAYERS}


def outlined(**changes: Any) -> Any:
    return tiny("llama", "plain", **SHAPE, max_position_embeddings=4096, **changes)


def weigh(recomputed: Iterable[int], away: bool = False, **changes: Any) -> int:
    """Bytes of a step on a GPU."""
    model = outlined()
    config = load(None, given(**changes))
    model.activation_checkpointing, model.activation_offload = recomputed, away
    objective = find_task("pretrain")(config, WORLD)
    return memory.estimate(model, objective, config, 1, torch.bfloat16).total


def given(**changes: Any) -> list[str]:
    values = {
        "run_dir": "run", "data": "data", "model": "model", "task": "pretrain", "seq_len": 1024,
        "batch_size": B, "micro_batch_size": B, "param_dtype": "bfloat16", "device": "cpu",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in (values | changes).items()]


def decided(
    monkeypatch: pytest.MonkeyPatch, size: float | None, **changes: Any
) -> CheckpointingChoice:
    monkeypatch.setattr(memory, "meta_model", lambda *_: outlined())
    more = {} if size is None else {"memory_budget": size / GIB}
    config = load(None, given(activation_checkpointing="auto", **more, **changes))
    objective = find_task("pretrain")(config, WORLD)
    found = memory.resolve_checkpointing(config, WORLD, objective, None, 1, torch.device("cpu"))
    assert found is not None
    return found


def test_fewest_blocks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [weigh(spaced_blocks(n, LAYERS)) for n in range(LAYERS + 1)]
    assert all(more > less for more, less in pairwise(sizes))
    for n in (0, 3):
        found = decided(monkeypatch, sizes[n])
        assert (found.blocks, found.layers, found.offload) == (n, LAYERS, False)
        assert found.total == sizes[n]
        if n:  # a byte less, and one block more has to be computed again
            assert decided(monkeypatch, sizes[n - 1] - 64).blocks == n


def test_offload_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "MIN_BYTES", 0)
    every, away = weigh(range(LAYERS)), weigh(range(LAYERS), True)
    assert away < every
    found = decided(monkeypatch, away)
    assert (found.blocks, found.offload, found.total) == (LAYERS, True, away)
    assert decided(monkeypatch, every, activation_offload="true").offload
    with pytest.raises(ValueError) as caught:
        decided(monkeypatch, 2**20)
    words = ("a step takes", "with every block computed again", "0.000977 GiB are")
    assert all(word in str(caught.value) for word in words)


def test_spaced_blocks_need_least() -> None:
    assert [sorted(spaced_blocks(n, 5)) for n in range(6)] == [
        [], [0], [0, 2], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert spaced_blocks(3, LAYERS) == set(range(0, LAYERS, 2))
    spread_out = weigh(spaced_blocks(3, LAYERS))
    assert spread_out <= weigh(range(3)) and spread_out < weigh(range(3, LAYERS))


def test_ranks_agree_on_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the choice of the first one, for the GPU with the least memory."""
    rooms = [20 * GIB, 10 * GIB]
    monkeypatch.setattr(memory, "gpu_memory", lambda device: rooms[device.index])
    monkeypatch.setattr(memory, "meta_model", lambda *_: outlined())
    config = load(None, given(activation_checkpointing="auto"))
    objective = find_task("pretrain")(config, WORLD)
    chosen: list[Any] = []

    def on_rank(index: int) -> Any:
        def gather(value: Any) -> list[Any]:
            if isinstance(value, int):
                return rooms
            chosen.append(value)
            return [chosen[0], value]

        here: Any = SimpleNamespace(
            main=index == 0,
            device=torch.device("cuda", index),
            gather=gather,
            raise_on_all_ranks=WORLD.raise_on_all_ranks,
        )
        return memory.resolve_checkpointing(config, here, objective, None, 2, torch.device("cuda"))

    first = on_rank(0)
    assert first == on_rank(1) and first.blocks == 0 and chosen == [first, None]
    assert first.budget == int(10 * GIB * 0.96) - 2 * GIB


def test_run_and_dry_run_print_the_choice(workspace, capsys) -> None:
    """And a run that goes on with another budget gives the same bits."""
    same = {"schedule": "constant", "seq_len": 128}
    main(workspace.settings("plain", steps=2, **same))
    losses = workspace.metrics("plain", "loss")
    sizes = {}
    auto = same | {"activation_checkpointing": "auto", "resume": "auto"}
    with pytest.raises(SystemExit, match="there is no GPU here: give memory_budget="):
        main(workspace.settings("auto", steps=2, data="nowhere.jsonl", **auto))  # before the data
    with pytest.raises(SystemExit, match="and 1e-05 GiB are there: give a smaller micro_batch"):
        main(workspace.settings("auto", steps=2, memory_budget=1e-5, **auto))
    capsys.readouterr()
    main(["--dry-run", *workspace.settings("auto", steps=2, memory_budget=1, **auto)])
    assert "auto: no block computed again; " in capsys.readouterr().out
    config = load(None, workspace.settings("auto", memory_budget=1, **auto))
    objective = find_task(config.task)(config, WORLD)
    for n in (0, 1):
        model = memory.meta_model(config, torch.float32)
        model.activation_checkpointing = spaced_blocks(n, 2)
        sizes[n] = memory.estimate(model, objective, config, 1, torch.float32).total
    few, none = sizes[1] / GIB, sizes[0] / GIB
    main(workspace.settings("auto", steps=1, memory_budget=few, **auto))
    said = capsys.readouterr().out
    assert "auto: 1 of 2 blocks computed again; " in said, (sizes, said)
    main(workspace.settings("auto", steps=2, memory_budget=none, **auto))
    assert "auto: no block computed again; " in capsys.readouterr().out
    assert workspace.metrics("auto", "loss") == losses
