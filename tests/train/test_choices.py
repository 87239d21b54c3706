"""What settings leave to auto is chosen by memory: the fastest that fits a budget.

Sizes of GPUs, and steps that do not fit, are made up: nothing here needs a GPU.
"""

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.test_memory import B, tiny
from tigon.layers import activation_offload as offloading
from tigon.parallel import MeshSizes
from tigon.settings.load import load
from tigon.train import checkpoint, choices, main, memory, notes
from tigon.train.choices import StepChoice, Way, choose_step, order_ways, spaced_blocks
from tigon.train.distributed import World
from tigon.train.memory import GIB
from tigon.train.tasks import TASKS

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
    objective = TASKS["pretrain"](config, WORLD)
    return memory.estimate(model, objective, config, 1, torch.bfloat16).total


def given(**changes: Any) -> list[str]:
    values = {
        "run_dir": "run", "data": "data", "model": "model", "task": "pretrain", "seq_len": 1024,
        "batch_size": B, "micro_batch_size": B, "param_dtype": "bfloat16", "device": "cpu",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in (values | changes).items()]


def decided(monkeypatch: pytest.MonkeyPatch, size: float | None, **changes: Any) -> StepChoice:
    monkeypatch.setattr(choices, "meta_model", lambda *_: outlined())
    more = {} if size is None else {"memory_budget": size / GIB}
    config = load(None, given(**more, **changes))
    task = TASKS["pretrain"](config, WORLD)
    cpu = torch.device("cpu")
    config, found = choices.resolve_choices(config, WORLD, task, None, 1, cpu)
    assert found is not None and config.micro_batch_size == found.rows
    return found


def test_fewest_blocks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [weigh(spaced_blocks(n, LAYERS)) for n in range(LAYERS + 1)]
    assert all(more > less for more, less in pairwise(sizes))
    for n in (0, 3):
        found = decided(monkeypatch, sizes[n])
        assert (found.blocks, found.layers, found.offload) == (n, LAYERS, False)
        assert found.total == sizes[n]
        if n:  # a byte less, and one block more has to be recomputed
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
    words = ("a step with micro_batch_size=2 takes", "with every block recomputed")
    assert all(word in str(caught.value) for word in (*words, "0.000977 GiB are"))
    set_to = decided(monkeypatch, 2**20, activation_checkpointing="true")
    assert set_to.blocks == 0 and set_to.total > set_to.budget  # to be tried all the same


def test_spaced_blocks_need_least() -> None:
    assert [sorted(spaced_blocks(n, 5)) for n in range(6)] == [
        [], [0], [0, 2], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert spaced_blocks(3, LAYERS) == set(range(0, LAYERS, 2))
    spread_out = weigh(spaced_blocks(3, LAYERS))
    assert spread_out <= weigh(range(3)) and spread_out < weigh(range(3, LAYERS))


OPTIONS: dict[str, Any] = {"auto": frozenset(choices.BY_MEMORY), "offload": False, "all_rows": 4}
FOUR = [Way(sharding, rows) for sharding in ("gradients", "full") for rows in (4, 2, 1)]


def gigabytes(way: Way, blocks: int, offload: bool) -> int:
    """A model of 8 blocks: weights and states, and for each row 8, of which a recomputed block
    saves seven eighths of its share, and host memory the rest."""
    kept = 8 * way.rows * (1 - (8 if offload else 7) / 8 * blocks / 8)
    return round(GIB * (40 + 4 * (way.sharding == "gradients") + kept))


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (80, 8192, ("gradients", 4, 0)),
        (75, 8192, ("gradients", 2, 0)),  # rather than sharding=full with 4 rows
        (53, 8192, ("gradients", 1, 0)),
        (51, 8192, ("full", 1, 0)),
        (45, 8192, ("full", 1, 4)),
        (51, 2048, ("full", 2, 3)),  # a micro-batch of 2,048 tokens would be too few
        (70, 512, ("full", 4, 1)),  # too few even with 4: there are no more
        (42, 2048, ("full", 2, 8)),
        (41, 2048, ("full", 4, 8)),  # with inputs in host memory
    ],
)
def test_fastest_way_that_fits(budget: int, tokens: int, expected: tuple[str, int, int]) -> None:
    found = choose_step(gigabytes, FOUR, tokens, 8, budget * GIB, **OPTIONS)
    assert (found.sharding, found.rows, found.blocks) == expected
    assert found.offload == (budget == 41)
    assert found.total == gigabytes(Way(*expected[:2]), expected[2], found.offload)
    assert found.total <= budget * GIB
    # A run that goes on is computed in the same way
    way = Way(*expected[:2])
    ways = order_ways(FOUR, way)
    again = choose_step(gigabytes, ways, tokens, 8, budget * GIB, previous=way, **OPTIONS)
    assert again == found


def test_what_does_not_fit_is_told_of_the_least() -> None:
    """Also in a run that has had it, and so tries it first."""
    for previous in (None, Way("full", 1)):
        with pytest.raises(ValueError, match=r"micro_batch_size=1 takes 48\.00 GiB"):
            choose_step(
                gigabytes,
                order_ways(FOUR, previous),
                8192,
                8,
                30 * GIB,
                previous=previous,
                **OPTIONS,
            )


def test_set_checkpointing_stays() -> None:
    """Rows are then as many as fit, or the fewest."""
    for budget, rows in ((80, 4), (61, 2), (49, 1), (10, 1)):
        options = OPTIONS | {"auto": frozenset({"micro_batch_size"})}
        ways = [way for way in FOUR if way.sharding == "full"]
        found = choose_step(gigabytes, ways, 8192, 8, budget * GIB, **options)
        assert (found.rows, found.blocks) == (rows, 0)
        assert found.total == gigabytes(Way("full", rows), 0, False)


def test_all_rows_at_once_have_no_gradients_to_add_up() -> None:
    """Which may be what fits, though so many rows are not faster."""

    def total(way: Way, blocks: int, offload: bool) -> int:
        return gigabytes(way, blocks, offload) + (GIB * 60 if way.rows < 16 else 0)

    found = choose_step(total, FOUR, 8192, 8, 80 * GIB, **OPTIONS | {"all_rows": 16})
    assert (found.sharding, found.rows, found.blocks) == ("full", 16, 7)
    assert not found.offload and found.total == gigabytes(Way("full", 16), 7, False)


@pytest.mark.parametrize(
    ("changes", "sizes", "block", "expected"),
    [
        ({"batch_size": 12, "seq_len": 4096}, {}, 2**26, [4, 3, 2, 1]),
        ({"batch_size": 12, "seq_len": 4096}, {}, 2**24, [6, 4, 3, 2, 1]),
        ({"batch_size": 32, "seq_len": 4096}, {}, 2**20, [16, 8, 4, 2, 1]),
        ({"batch_size": 12, "seq_len": 4096}, {"fsdp": 3}, 2**26, [4, 2, 1]),
        ({"batch_size": 12, "seq_len": 65536}, {}, 2**26, [1]),
        ({"batch_size": 4, "seq_len": 32768}, {"context": 4}, 2**26, [2, 1]),
        ({"batch_size": 12, "micro_batch_size": 3}, {}, 2**26, [3]),
        ({"batch_size": 12, "optimizer_in_backward": "true", "max_grad_norm": 0}, {}, 1, [12]),
    ],
)
def test_rows_that_help(changes: Any, sizes: Any, block: int, expected: list[int]) -> None:
    config = load(None, given(**{"micro_batch_size": "auto", **changes}))
    assert choices.useful_rows(config, MeshSizes(**sizes), block) == expected


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({"param_dtype": "float32"}, {}, ["gradients", "full"]),  # weights are cast
        ({"param_dtype": "float32"}, {"fsdp": 2}, ["gradients", "full"]),
        ({"param_dtype": "float32", "sharding": "full"}, {}, ["full"]),
        ({"param_dtype": "float32", "dtype": "float32"}, {}, ["full"]),
        ({"param_dtype": "bfloat16"}, {}, ["full"]),
        ({"param_dtype": "bfloat16"}, {"fsdp": 2}, ["full"]),  # sums would be in bfloat16
        ({"accumulate_fp32": "true"}, {}, ["gradients", "full"]),
        ({"param_dtype": "float32", "lora.rank": 4}, {"fsdp": 2}, ["full"]),
        ({"param_dtype": "float32", "parallel.replicate": 2}, {"replicate": 2}, ["full"]),
    ],
)
def test_shardings_that_are_possible(changes: Any, sizes: Any, expected: list[str]) -> None:
    config = load(None, given(**changes))
    compute = getattr(torch, "bfloat16" if config.dtype == "auto" else config.dtype)
    assert choices.possible_shardings(config, MeshSizes(**sizes), compute) == expected


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the choice of the first one, for the GPU with the least memory."""
    rooms = [20 * GIB, 10 * GIB]
    monkeypatch.setattr(choices, "gpu_memory", lambda device: rooms[device.index])
    monkeypatch.setattr(choices, "held_by_others", lambda _: 0)
    monkeypatch.setattr(choices, "meta_model", lambda *_: outlined())
    config = load(None, given(batch_size=4 * B, micro_batch_size="auto"))
    task = TASKS["pretrain"](config, WORLD)
    made: list[Any] = []

    def on_rank(index: int) -> Any:
        def gather(value: Any) -> list[Any]:
            if isinstance(value, int):
                return rooms
            made.append(value)
            return [made[0], value]

        here: Any = SimpleNamespace(
            main=index == 0,
            device=torch.device("cuda", index),
            gather=gather,
            raise_on_all_ranks=WORLD.raise_on_all_ranks,
            share=lambda find: World.share(here, find),
        )
        return choices.resolve_choices(config, here, task, None, 2, torch.device("cuda"))[1]

    first = on_rank(0)
    assert first == on_rank(1) and made == [first, None]
    assert (first.blocks, first.rows) == (0, 2 * B)
    assert first.budget == int(10 * GIB * 0.96) - 2 * GIB


def test_without_a_gpu_nothing_is_chosen(capsys) -> None:
    """A CPU has one row in a micro-batch, as ever; a plan for GPUs says what it needs."""
    for device, said in (("cpu", ""), ("cuda", "give memory_budget=, in GiB\n")):
        config = load(None, given(micro_batch_size="auto", batch_size=8))
        task = TASKS["pretrain"](config, WORLD)
        args = config, WORLD, task, None, 1, torch.device(device)
        config, choice = choices.resolve_choices(*args)
        assert choice is None and (config.micro_batch_size, config.sharding) == (1, "full")
        assert capsys.readouterr().out.endswith(said)
    every = {"micro_batch_size": 1, "sharding": "full", "activation_checkpointing": "true"}
    config = load(None, given(**every, memory_budget=9))
    with pytest.raises(ValueError, match=r"memory_budget=9 limits .* are all set: set one of them"):
        choices.resolve_choices(config, *args[1:])


def test_run_and_dry_run_print_the_choice(workspace, capsys) -> None:
    """And a run that goes on with another budget gives the same bits."""
    same = {"schedule": "constant", "seq_len": 128, "micro_batch_size": 1}
    main(workspace.settings("plain", steps=2, **same))
    losses = workspace.metrics("plain", "loss")
    sizes = {}
    auto = same | {"resume": "auto"}
    with pytest.raises(SystemExit, match="and 1e-05 GiB are there: give a smaller seq_len"):
        main(workspace.settings("auto", steps=2, memory_budget=1e-5, **auto))
    capsys.readouterr()
    main(["--dry-run", *workspace.settings("auto", steps=2, memory_budget=1, **auto)])
    assert "chosen: sharding=full, no block recomputed; " in capsys.readouterr().out
    config = load(None, workspace.settings("auto", memory_budget=1, **auto))
    objective = TASKS[config.task](config, WORLD)
    for n in (0, 1):
        model = choices.meta_model(config, torch.float32)
        model.activation_checkpointing = spaced_blocks(n, 2)
        sizes[n] = memory.estimate(model, objective, config, 1, torch.float32).total
    few, none = sizes[1] / GIB, sizes[0] / GIB
    main(workspace.settings("auto", steps=1, memory_budget=few, **auto))
    said = capsys.readouterr().out
    assert ", 1 of 2 blocks recomputed; " in said, (sizes, said)
    main(workspace.settings("auto", steps=2, memory_budget=none, **auto))
    assert ", no block recomputed; " in capsys.readouterr().out
    assert workspace.metrics("auto", "loss") == losses


def test_choices_change_no_more_than_rounding(workspace) -> None:
    """Neither casts of float32 weights once a step, whose bits are those of FSDP2, nor rows."""
    same = {"dtype": "bfloat16", "schedule": "constant", "steps": 3}
    ways: dict[str, dict[str, Any]] = {
        "fsdp": {"micro_batch_size": 1, "sharding": "full"},
        "zero": {"micro_batch_size": 1, "sharding": "gradients"},
        "auto": {"memory_budget": 1},
    }
    losses = {}
    for name, changes in ways.items():
        main(workspace.settings(f"same {name}", **same, **changes))
        losses[name] = workspace.metrics(f"same {name}", "loss")
    assert losses["zero"] == losses["fsdp"]
    assert losses["auto"] == pytest.approx(losses["fsdp"], rel=2e-3)
    saved = checkpoint.read_metadata(workspace.checkpoint("same auto", 3))
    chosen = saved["config"]["micro_batch_size"], saved["config"]["sharding"]
    assert chosen == (4, "gradients")


def test_missed_backend_is_told_where_it_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(_: Any, head_dim: int, *, packed: bool) -> str:
        return f"head_dim {head_dim}, packed: {packed}"

    monkeypatch.setattr(notes, "missed_speed", missed)
    model, bare = outlined(), outlined()
    bare.model.layers = bare.model.layers[:0]  # as one whose layers are all recurrent
    (dim,) = {layer.self_attn.head_dim for layer in model.model.layers}
    for changes, said in (
        ({}, [f"attention=auto: head_dim {dim}, packed: True"]),
        ({"packing": "false"}, [f"attention=auto: head_dim {dim}, packed: False"]),
        ({"attention": "flash"}, []),
        ({"param_dtype": "float32", "dtype": "float32"}, []),
    ):
        config = load(None, given(device="auto", **changes))
        assert notes.find_slow_attention(config, model) == said
        assert notes.find_slow_attention(config, bare) == []


# Steps that run out of memory


def test_a_run_keeps_rows_beyond_use(workspace, capsys, monkeypatch) -> None:
    """With and without a budget, though a new run would take fewer."""
    monkeypatch.setattr(choices, "USEFUL_TOKENS", 1)
    monkeypatch.setattr(choices, "USEFUL_WORK", 0)
    same = {"batch_size": 4, "export": "false", "schedule": "constant"}
    main(workspace.settings("rows", steps=1, micro_batch_size=4, **same))
    for budget in ({}, {"memory_budget": 100}):
        main(workspace.settings("rows", steps=1 + 1 + len(budget), resume="auto", **same, **budget))
        step = 2 + len(budget)
        saved = checkpoint.read_metadata(workspace.checkpoint("rows", step))
        assert saved["config"]["micro_batch_size"] == 4
    assert "micro_batch_size 4 ->" not in capsys.readouterr().out


def test_memory_of_other_processes_is_not_there(monkeypatch, capsys) -> None:
    """A context of one's own is no other process."""
    gpu = torch.device("cuda", 0)
    device = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    for free, left in ((69, 80), (39, 49)):  # GiB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, n=free: (n * GIB, 80 * GIB))
        assert memory.gpu_memory(gpu) == left * GIB
    monkeypatch.setattr(choices, "meta_model", lambda *_: outlined())
    config, world = load(None, given()), World(0, 1, gpu)
    task = TASKS["pretrain"](config, WORLD)
    _, found = choices.resolve_choices(config, world, task, None, 1, gpu)
    assert found is not None and found.budget == int(49 * GIB * 0.96) - 2 * GIB
    assert capsys.readouterr().out == "note: other processes hold 31.00 GiB of the GPU\n"
