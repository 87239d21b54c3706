"""Where the elements of a rank's part are in the model, and updates that are rounded by that: they
have the bits of one rank's, however the model is divided."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import tigon.kernels
from tests.support.small import EXPERTS, LLAMA
from tests.train.ranks import Ranks as Processes
from tests.train.test_precision import Model, settings
from tigon.distributed.collectives import Ranks
from tigon.kernels.optim import adamw
from tigon.models import MODELS, CausalLM, LoraConfig
from tigon.parallel import Meshes, shard_experts, shard_model
from tigon.settings.config import Parallel
from tigon.train import start
from tigon.train.distributed import World, local
from tigon.train.model import parallelize
from tigon.train.optim import build_optimizer
from tigon.train.optim.positions import MAX_LINE, PositionRun, positions, runs_of
from tigon.weights import ReplicaIndex, RowSpan, ShardSpec, local_rows

CPU = torch.device("cpu")
UNTIED = {"tie_word_embeddings": False}
# By name, what differs from the configuration and of how many ranks; the vocabulary is odd
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "biases": (LLAMA | UNTIED | {"attention_bias": True, "mlp_bias": True}, {}, 2),
    "kv heads on two ranks each": (LLAMA | {"attention_bias": True}, {}, 4),
    "norms over all heads": (LLAMA | {"model_type": "olmo2"}, {}, 4),
    "units of experts": (EXPERTS | {"moe_intermediate_size": 52}, {}, 2),
    "shared experts": (EXPERTS | {"model_type": "qwen2_moe"}, {}, 4),
    "adapters": (LLAMA, {"rank": 3}, 4),
    "adapters of experts": (EXPERTS, {"rank": 3, "targets": ("experts.gate_up_proj",)}, 2),
    "whole experts": (EXPERTS | {"num_experts": 6}, {}, -3),  # of expert parallelism
}


def part(
    config: dict[str, Any], ranks: int, rank: int, lora: dict[str, Any] | None = None
) -> CausalLM:
    """A rank's part of a model, always the same one; of expert parallelism where ranks < 0."""
    torch.manual_seed(0)
    model = MODELS[config["model_type"]].from_config(config)
    if lora:
        model.add_adapter(LoraConfig(**lora))
    share = shard_experts if ranks < 0 else shard_model
    if abs(ranks) > 1:
        share(model, Ranks("", rank, abs(ranks)))
    return model


@pytest.mark.parametrize("case", CASES)
def test_positions_are_those_of_the_whole(case):
    """Of the elements that are left where numbers 0, 1, ... are cut, and divided by rows."""
    config, lora, ranks = CASES[case]
    kinds = set()
    for rank in range(abs(ranks)):
        for name, cut in part(config, ranks, rank, lora).shard_specs.items():
            taken = cut.take(torch.arange(math.prod(cut.shape)).view(cut.shape) + 12345)
            for divided in (1, 2, 3, 7):
                each = -(-len(taken) // divided)
                for begin in range(0, len(taken) or 1, each or 1):
                    expected = taken[begin : begin + each].flatten()
                    runs = runs_of(cut, begin * taken[:1].numel(), expected.numel(), 12345)
                    assert_positions(runs, expected, name)
                    assert len(runs) <= len(cut.pieces), name
                    assert all(run.lines is None for run in runs) or cut.dim > 0, name
                    kinds.add((cut.dim, len(cut.pieces), any(run.lines for run in runs)))
    assert kinds >= {(0, 1, False)}
    if ranks > 0:
        assert kinds >= {(1, 1, True), (0, 3, False)}
    if "units" in case:
        assert (1, 2, True) in kinds and (2, 1, True) in kinds


def spec(shape: tuple[int, ...], dim: int, *spans: tuple[int, int, int]) -> ShardSpec:
    return ShardSpec(shape, dim, tuple((RowSpan(*span), ReplicaIndex()) for span in spans))


def assert_positions(runs: tuple[PositionRun, ...], expected: Tensor, name: str) -> None:
    count = len(expected)
    assert sum(run.length for run in runs) == count, name
    for begin, end in ((0, count), (count // 3, count - count // 4), (count // 2, count // 2 + 1)):
        if begin < end <= count:
            assert torch.equal(positions(runs, begin, end, CPU), expected[begin:end]), name


def test_lines_beyond_32_bits_are_separate_runs():
    cut = spec((3, 4, MAX_LINE), 1, (2, 0, 1))
    runs = runs_of(cut, MAX_LINE, 2 * MAX_LINE, 7)
    assert [run.position for run in runs] == [7 + 6 * MAX_LINE, 7 + 10 * MAX_LINE]
    assert [run.lines for run in runs] == [None, None]


def wide(columns: int, **changes: Any) -> dict[str, Any]:
    """A configuration where o_proj and down_proj have so many columns, in blocks of 8 bits."""
    sizes = {"head_dim": columns // 4, "intermediate_size": columns}
    more = {"hidden_size": 32, "num_experts": 2, "moe_intermediate_size": columns, "vocab_size": 81}
    return EXPERTS | sizes | more | {"attention_bias": True} | changes


def gradients(step: int, model: CausalLM) -> Iterator[tuple[str, Any, Tensor]]:
    """Of each parameter: its name, it, and all of its gradient; the same whatever the rank has."""
    draw = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        shape = model.shard_specs[name].shape if name in model.shard_specs else p.shape
        yield name, p, (torch.randn(shape, generator=draw) * 1e-3).bfloat16()


def stepped(model: CausalLM, **changes: Any) -> tuple[CausalLM, Optimizer]:
    """After two steps."""
    optimizer = build_optimizer(model, settings(**changes))
    for step in range(2):
        for name, p, whole in gradients(step, model):
            given = taken(model, name, whole)
            if isinstance(p, DTensor):
                where = p.device_mesh, p.placements
                size = {"shape": p.shape, "stride": p.stride()}
                given = DTensor.from_local(given, *where, run_check=False, **size)
            p.grad = given
        optimizer.step()
    return model, optimizer


def taken(model: CausalLM, name: str, whole: Tensor) -> Tensor:
    """What the rank has of a whole parameter, or of what is as large."""
    memory, first = local_rows(name, model.get_parameter(name))
    cut = model.shard_specs.get(name)
    mine = whole if cut is None else cut.take(whole)
    return mine[first : first + len(memory)].clone()


def differing(found: tuple[CausalLM, Optimizer], expected: tuple[CausalLM, Optimizer]) -> list[str]:
    """Names of the weights and states of a part that are not those of the whole."""
    (model, optimizer), (whole, its) = found, expected
    wrong = []
    for name, p in model.named_parameters():
        q = whole.get_parameter(name)
        pairs = {"weight": (local(p.detach()), q.detach())}
        kept = optimizer.state[p], its.state[q]
        pairs |= {kind: (kept[0][kind], kept[1][kind]) for kind in kept[1] if kind != "step"}
        for kind, (ours, theirs) in pairs.items():
            block = q.numel() // theirs.numel()  # elements that share a scale
            ours, theirs = (t.repeat_interleave(block, -1) for t in (ours, theirs))
            if not torch.equal(ours, taken(model, name, theirs)):
                wrong.append(f"{kind} of {name}")
    return wrong


@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        *(("adamw_bf16", "reference"), ("adamw_8bit", "reference"), ("sgd", "reference")),
        *(("adamw_bf16", "triton"), ("adamw_8bit", "triton")),
    ],
)
def test_updates_are_those_of_one_rank(optimizer, mode, monkeypatch):
    """Of the definition and of the kernel, with bfloat16 weights."""
    monkeypatch.setattr(adamw, "BLOCK", 1 << 14)  # programs take the interpreter long
    changes, config = {"param_dtype": "bfloat16", "optimizer": optimizer}, wide(512, **UNTIED)
    parts = [(2, 1), (-2, 1)]
    if optimizer == "adamw_bf16":
        parts.append((4, 2))  # with a kv head that another rank has, too
    with tigon.kernels.use(mode):
        expected = stepped(part(config, 1, 0).bfloat16(), **changes)
        for ranks, rank in parts:
            found = stepped(part(config, ranks, rank).bfloat16(), **changes)
            assert not differing(found, expected), (ranks, rank)


# Lines of one element, of more than a program has, and of few; gate and up of experts
CUTS = {
    "a": spec((6, 2), 1, (1, 0, 1)),
    "b": spec((3, 1200), 1, (600, 0, 600)),
    "c": spec((50, 34), 1, (17, 0, 17)),
    "d": spec((4, 10, 16), 1, (2, 0, 3), (7, 3, 3)),
}


@pytest.mark.parametrize("own_launch", [None, 0])
def test_the_kernel_draws_what_the_definition_draws(own_launch, monkeypatch):
    """States of exact values, which nothing but the draws can change; positions of 40 bits."""
    monkeypatch.setattr(adamw, "OWN_LAUNCH", own_launch)
    monkeypatch.setattr(adamw, "BLOCK", 256)
    changes = {"optimizer": "adamw_bf16", "beta1": 0.625, "beta2": 0.75, "param_dtype": "bfloat16"}
    kept: list[list[Tensor]] = []
    for mode in ("reference", "triton"):
        own = {name: tuple(cut.take(torch.empty(cut.shape)).shape) for name, cut in CUTS.items()}
        model = Model(torch.bfloat16, own)
        model.shard_specs = CUTS
        optimizer = build_optimizer(model, settings(**changes))
        assert all(run.lines for runs in optimizer.runs.values() for run in runs)
        for p, runs in optimizer.runs.items():
            optimizer.runs[p] = tuple(r._replace(position=r.position + (1 << 40)) for r in runs)
        draw = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = (torch.randint(-200, 200, p.shape, generator=draw) * 2.0**-8).to(p)
        with tigon.kernels.use(mode):
            optimizer.step()
        kept.append([s for state in optimizer.state.values() for s in state.values()])
    assert all(map(torch.equal, *kept))


WAYS = {
    2: [{"fsdp": 2}, {"tensor": 2}],
    4: [{"tensor": 4}, {"tensor": 2, "fsdp": 2}, {"expert": 2}],
}


def on_ranks(directory: Any) -> None:
    torch.set_num_threads(1)
    with start("cpu") as world:
        wrong = []
        for optimizer in ("adamw_bf16", "adamw_8bit"):
            changes = {"param_dtype": "bfloat16", "optimizer": optimizer}
            expected = stepped(part(wide(1024), 1, 0).bfloat16(), **changes)
            for way in WAYS[world.size]:
                wrong += [(way, name) for name in differing(divided(world, way, changes), expected)]
        (directory / str(world.rank)).write_text(str(wrong))


def divided(
    world: World, way: dict[str, int], changes: dict[str, Any]
) -> tuple[CausalLM, Optimizer]:
    sizes = Parallel(**way).sizes(world.size)
    own = replace(world, meshes=Meshes.of("cpu", sizes))
    model = part(wide(1024), 1, 0).bfloat16()
    parallelize(model, settings(**changes, micro_batch_size=1), own)
    return stepped(model, **changes)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("count", WAYS)
def test_ranks_make_the_updates_of_one(count, tmp_path):
    Processes(count, on_ranks, tmp_path).finish()
    found = [(tmp_path / str(rank)).read_text() for rank in range(count)]
    assert found == ["[]"] * count
