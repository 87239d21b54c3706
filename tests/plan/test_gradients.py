"""Plans with sharding=gradients: its memory, its messages, and where the trainer accepts it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plan.test_plan import SIZE
from tests.support.small import EXPERTS, LLAMA
from tigon.plan import Job, Layout, estimate_memory, estimate_step, format_plan, make_plan, read_job
from tigon.plan.cost import fsdp_collectives, sharded_parameters
from tigon.plan.layout import enumerate_meshes
from tigon.plan.search import (
    all_layouts,
    configured_layouts,
    lower_bound,
    mesh_error,
    persistent_bytes,
)
from tigon.settings.config import Config, mesh_sizes
from tigon.train import dry_run, load
from tigon.train.distributed import World
from tigon.train.graph_checks import check_run
from tigon.train.optim import check_ranks
from tigon.train.tasks import TASKS

MOE: dict[str, Any] = EXPERTS | {"num_experts": 8, "num_attention_heads": 8, "head_dim": 16}
MOE |= {"num_key_value_heads": 8}
BF16, FP32, EXACT = ["param_dtype=bfloat16"], ["param_dtype=float32"], ["accumulate_fp32=true"]
TENSOR = Layout(1, 2, 1, 2, rows=2, sharding="gradients")
CONTEXT = Layout(1, 1, 2, 2, rows=2, sharding="gradients")
MANY = replace(TENSOR, rows=1, micro_batches=2, checkpointing=2)
T = 512


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(gpus: int, settings: list[str], rows: int, tokens: int = T, **sizes: Any) -> Job:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA | SIZE | sizes))
        return read_job(str(path), gpus, "h200", tokens, rows * tokens, settings)

    return make


def configured(one: Job, given: str, **changes: Any) -> Config:
    """As `tigon train` reads settings, of a job's model and steps."""
    values = {"init": one.config.init, "tokenizer": "none", "data": "none", "run_dir": "run"}
    values |= {"task": "pretrain", "batch_size": one.batch_rows, "seq_len": one.seq_len} | changes
    return load(None, [*(f"{name}={value}" for name, value in values.items()), *given.split()])


@pytest.mark.parametrize(
    ("layout", "settings"),
    [(TENSOR, BF16), (TENSOR, FP32), (CONTEXT, FP32), (MANY, BF16), (MANY, BF16 + EXACT)],
    ids=["tensor", "tensor fp32", "context", "many", "many exact"],
)
def test_memory_equals_dry_run(job, layout: Layout, settings: list[str]) -> None:
    one = job(4, settings, layout.rows * layout.micro_batches * layout.data)
    found = estimate_memory(one, layout).kinds
    config = configured(one, " ".join([layout.settings, *settings]))
    objective = TASKS["pretrain"](config, World(0, 1, torch.device("cpu")))
    inputs: Any = SimpleNamespace(source=None, task=objective, choice=None)
    assert dry_run.estimate_run(config, inputs, 4).kinds == found
    # By hand: half of the layers, whole in bfloat16, and states of half of that
    numbers, item = one.shapes.counts(2).total, 4 if settings == FP32 else 2
    masters = item * numbers / 2 if item == 4 else 0
    assert found["parameters"] == pytest.approx(2 * numbers + masters, rel=1e-3)
    assert found["optimizer"] == pytest.approx(8 * numbers / 2, rel=1e-3)
    if layout is MANY:
        assert found["gradients"] >= (2 if settings == BF16 else 4) * numbers
    assert persistent_bytes(one, layout) <= sum(found.values())


@pytest.mark.parametrize(("settings", "item"), [(BF16, 2), (FP32, 4), (BF16 + EXACT, 4)])
def test_messages_by_hand(job, settings: list[str], item: int) -> None:
    """Weights once in bfloat16 and gradients once, of a part; over the network where the ranks that
    have the same part are on several hosts."""
    one, numbers = job(16, settings, 16), job(16, settings, 16).shapes.counts(8)
    # On a host all ranks of a part, or one of each of two parts' ranks
    inside, across = Layout(1, 4, 1, 2), Layout(1, 2, 1, 8)
    for layout in (inside, across):
        other = replace(layout, fsdp=1, context=layout.fsdp)
        for way, count in ((layout, 1), (layout, 4), (other, 1)):
            way = replace(way, sharding="gradients", micro_batches=count)
            numbers = one.shapes.counts(way.tensor)
            time, _ = fsdp_collectives(one, way, 0.0)
            received = (2 + item) * numbers.total * (way.shards - 1) / way.shards
            bytes_of = (received, 0) if layout is inside else (0, received)
            assert (time.nvlink_bytes, time.network_bytes) == pytest.approx(bytes_of)
    # Hidden beside a third of the computation, and beside the rest
    way = replace(across, sharding="gradients")
    ((ranks, groups, numel),) = sharded_parameters(one, way)
    gather, reduced = (
        groups * ranks.gather(size * numel, one.gpu, one.constants).network for size in (2, item)
    )
    for compute in (0.0, gather, 3 * gather, 2 * reduced):
        expected = max(0.0, gather - compute / 3) + max(0.0, reduced - 2 / 3 * compute)
        assert fsdp_collectives(one, way, compute)[1] == pytest.approx(expected)
    full = estimate_step(one, replace(across, micro_batches=4)).traffic.network_bytes
    whole = estimate_step(one, replace(way, micro_batches=4)).traffic.network_bytes
    assert full - whole == pytest.approx((8 * 2 + 4 - 2 - item) * one.shapes.counts(8).total / 2)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "settings",
    [
        [], ["optimizer=adamw_8bit"], ["optimizer=muon"], ["cuda_graphs=true", *BF16],
        ["optimizer_in_backward=true", "max_grad_norm=0"],
    ],
    ids=["adamw", "8bit", "muon", "graphs", "in_backward"],
)  # fmt: skip
def test_proposals_are_what_the_trainer_accepts(job, settings: list[str]) -> None:
    """And what it accepts is."""
    one = job(8, settings, 8, **MOE)

    def accepted(layout: Layout) -> bool:
        try:
            config = configured(one, " ".join([layout.settings, *settings]))
            check_run(config, World(0, 8, torch.device("cuda")))
            check_ranks(config, mesh_sizes(config, 8).data)
        except ValueError:
            return False
        return True

    proposed, refused = set(), 0
    for mesh in enumerate_meshes(8, 8):
        layouts = [] if mesh_error(one, mesh) else [*all_layouts(one, mesh)]
        assert all(accepted(layout) for layout in layouts)
        whole = any(layout.sharding == "gradients" for layout in layouts)
        alone = replace(mesh, rows=8 // mesh.data, sharding="gradients")
        if mesh.shards > 1:
            assert whole == (accepted(alone) and mesh_error(one, mesh) is None), mesh
            refused += not whole
        proposed |= {mesh.mesh[:-1]} if whole else set()
    assert refused > 0
    assert all(replicate == expert == 1 for replicate, *_, expert in proposed)
    # In 8 bits states of few columns would be divided within a block
    never = {"cuda_graphs=true", "optimizer_in_backward=true", "optimizer=adamw_8bit"}
    assert ((1, 2, 2, 2, 1) in proposed) == never.isdisjoint(settings)


def test_reasons_and_configured_layouts(job) -> None:
    """Of updates in backward with more rows than a micro-batch may have; of a graph of float32."""
    in_backward = job(2, ["optimizer_in_backward=true", "max_grad_norm=0"], 2**8)
    assert "no micro-batch that the other settings allow" in format_plan(make_plan(in_backward))
    graphs = job(1, ["cuda_graphs=true"], 1)
    assert "give sharding=gradients" in (mesh_error(graphs, Layout()) or "")
    one = job(4, [], 4)  # what a run's own config may say, and `tigon plan` may not
    set_to = replace(one, config=replace(one.config, sharding="gradients"))
    found = {way.mesh for mesh in enumerate_meshes(4) for way in configured_layouts(set_to, mesh)}
    assert {mesh[:4] for mesh in found} == {
        (1, f, c, 4 // f // c) for f in (1, 2, 4) for c in (1, 2, 4) if f * c <= 4
    }


@pytest.mark.parametrize(("sharding", "settings"), [("full", FP32), ("gradients", BF16)])
def test_lower_bound_of_memory(job, sharding: Any, settings: list[str]) -> None:
    """The bound lets a plan skip estimates."""
    for count in (1, 2):
        found = {}
        for shards in (1, 2, 8):
            one = job(shards * 2, settings, shards * count)
            layout = Layout(1, shards, 1, 2, sharding=sharding, micro_batches=count)
            found[shards] = estimate_memory(one, layout)
        for few, memory in found.items():
            for more, exact in found.items():
                if more >= few:
                    bound = lower_bound(memory, few / more)
                    assert 0.5 * exact.total < bound <= exact.total, (few, more, count)
            assert lower_bound(memory, 2.0) == memory.total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("sharding", "settings"), [("full", FP32), ("gradients", BF16)])
def test_lower_bound_for_fewer_tokens(job, sharding: Any, settings: list[str], checkpointing: bool):
    one, layout = job(4, settings, 64, **MOE), Layout(1, 4, checkpointing=checkpointing)
    layout = replace(layout, sharding=sharding)
    found = {
        rows: estimate_memory(one, replace(layout, rows=rows, micro_batches=16 // rows))
        for rows in (8, 4, 1)
    }
    for most, memory in found.items():
        for rows in (rows for rows in found if rows < most):
            bound = lower_bound(memory, 1.0, rows / most)
            shares = bound / found[rows].total, rows / most * memory.total / bound
            assert max(shares) <= 1, (most, rows)
