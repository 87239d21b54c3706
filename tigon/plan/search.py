"""Search over layouts: which are possible, which of those fit, and which of those are fastest."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tigon.data.examples import format_count
from tigon.parallel import check_context
from tigon.plan.cost import BF16, FP32, Job, Step, estimate_step
from tigon.plan.layout import Layout, divisors, enumerate_meshes
from tigon.train.choices import MOST_TOKENS, leanest_sharding, useful_rows
from tigon.train.distributed import World
from tigon.train.graph_checks import check_run
from tigon.train.memory import Estimate, estimate, memory_budget
from tigon.train.model import sum_dtype
from tigon.train.optim import check_local_model, check_ranks, state_bytes
from tigon.train.tasks import TASKS

Mesh = tuple[object, ...]
# Values of activation_checkpointing: no block, every second one, all
CHECKPOINTING: tuple[bool | int, ...] = (False, 2, True)
LACKS = "memory"
TIE = 0.01  # of the time; the model of time is less exact
# Kinds of memory that ranks shard
SHARDED = ("parameters", "gradients", "optimizer", "average of weights", "reference")
OF_TOKENS = ("activations", "logits and loss", "other")  # grow with a micro-batch at most
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class LayoutChoice:
    """Holds a layout that fits, with its estimated step and memory."""

    layout: Layout
    step: Step
    memory: Estimate


@dataclass(frozen=True)
class LayoutPlan:
    """Holds the best layouts of a job, ranked, and why others are left out."""

    job: Job
    choices: list[LayoutChoice]  # one per mesh: the fastest first, ties by memory
    reasons: Counter[str]  # why meshes are impossible, and how many
    budget: int  # bytes for the tensors of a GPU
    lacking: int | None  # bytes that the smallest mesh which never fits needs


def mesh_error(job: Job, mesh: Layout) -> str | None:
    """Returns why the job cannot use this mesh with any micro-batch, or None."""
    host = job.gpu.host
    if mesh.tensor > host:
        return f"tensor is above {host}, the number of GPUs that NVLink connects"
    if (refusal := settings_error(job, mesh)) is not None:
        return refusal
    try:
        shard = job.shapes.shard(mesh.tensor, mesh.expert)
        check_context(shard, mesh.context)
        check_local_model(shard, job.config)
    except ValueError as error:
        return str(error)
    if job.batch_rows % mesh.data:
        rows, tokens = format_count(job.batch_rows, "row"), job.batch_rows * job.seq_len
        why = "is more than" if job.batch_rows < mesh.data else "does not divide"
        return (
            f"replicate x fsdp={mesh.data:,} {why} the {rows} of a step ({tokens:,} tokens): "
            "each rank needs equally many"
        )
    return None


def settings_error(job: Job, layout: Layout) -> str | None:
    """Returns why the trainer refuses the settings in this layout, or None."""
    try:
        config = layout.config(job.config)
        check_ranks(config, layout.data)
        check_run(config, World(0, job.gpus, CUDA))
    except ValueError as error:
        return str(error)
    return None


def configured_layouts(job: Job, mesh: Layout) -> Iterator[Layout]:
    """Yields a mesh with the micro-batch, checkpointing and sharding of the job's settings."""
    c, batch = job.config, job.batch_rows // mesh.data
    setting: Any = c.activation_checkpointing
    for rows in useful_rows(c, mesh, 0):
        for checkpointing in CHECKPOINTING if setting == "auto" else (setting,):
            layout = replace(mesh, rows=rows, micro_batches=batch // rows)
            layout = replace(layout, checkpointing=checkpointing, sharding=leanest_sharding(c))
            if batch % rows == 0 and settings_error(job, layout) is None:
                yield layout


def all_layouts(job: Job, mesh: Layout) -> Iterator[Layout]:
    """Yields a mesh with every micro-batch, sharding and checkpointing that is possible."""
    batch = job.batch_rows // mesh.data
    shardings = ("full", "gradients") if mesh.shards > 1 else ("full",)
    for rows in divisors(batch):
        if rows > 1 and replace(mesh, rows=rows).tokens(job.seq_len) > MOST_TOKENS:
            break
        for sharding in shardings:
            layout = replace(mesh, rows=rows, micro_batches=batch // rows, sharding=sharding)
            if settings_error(job, layout) is None:
                yield from (replace(layout, checkpointing=value) for value in CHECKPOINTING)


def estimate_memory(job: Job, layout: Layout) -> Estimate:
    """Returns the memory of a GPU in this layout, as `tigon train --dry-run` estimates it."""
    config = replace(layout.config(job.config), seq_len=job.seq_len)
    model = job.shapes.build()
    model.activation_checkpointing = layout.checkpointing
    task = TASKS[config.task](config, World(0, 1, CPU))
    return estimate(model, task, config, job.gpus, torch.bfloat16)


def persistent_bytes(job: Job, layout: Layout) -> int:
    """Returns a lower bound of a GPU's bytes of weights, gradients and states in a step."""
    item = getattr(torch, job.config.param_dtype).itemsize
    counts, several = job.shapes.counts(layout.tensor, layout.expert), layout.micro_batches > 1
    states = 0.0 if job.config.optimizer_offload else state_bytes(job.config, hidden=True)
    shard = sum(count for _, count in counts.per_shard(layout.shards))
    size = shard * (item + states)
    if layout.sharding == "gradients":
        size += counts.total * BF16
        if several:
            size += counts.total * sum_dtype(job.config).itemsize
            # Shards of weights are views of the whole ones of the same dtype
            size -= shard * item if item == BF16 else 0
    elif several:  # whole gradients accumulate in float32
        size += counts.total * FP32
    return int(size)


class MemorySearch:
    """Estimates layouts once each, and none above the budget as a leaner one is."""

    def __init__(self, job: Job, budget: int) -> None:
        self.job, self.budget = job, budget
        self.known: dict[tuple[object, ...], Estimate] = {}
        self.too_large: list[tuple[tuple[object, ...], tuple[float, ...], int, Estimate]] = []

    def fit(self, layout: Layout) -> tuple[Estimate | None, int]:
        """Returns the memory of a layout, None if it does not fit, and a lower bound in bytes."""
        # Replicas do not matter
        kind = layout.tensor, layout.expert, layout.sharding, layout.micro_batches > 1
        # The larger each number, the less memory
        tokens = layout.tokens(self.job.seq_len)
        lean = (layout.recomputed, -layout.context, -tokens)
        for other, leaner, shards, memory in self.too_large:
            if kind == other and all(a <= b for a, b in zip(lean[:2], leaner[:2], strict=True)):
                size = lower_bound(memory, shards / layout.shards, tokens / -leaner[2])
                if size > self.budget:
                    return None, size
        key = (*kind, *lean, layout.shards)
        if key not in self.known:
            self.known[key] = estimate_memory(self.job, layout)
        memory = self.known[key]
        if memory.total <= self.budget:
            return memory, memory.total
        self.too_large.append((kind, lean, layout.shards, memory))
        return None, memory.total


def lower_bound(memory: Estimate, share: float, tokens: float = 1.0) -> int:
    """Returns the least bytes where a rank holds `share` of the shards that it has in `memory`, and
    a micro-batch has `tokens` times as many: what ranks shard shrinks, what is computed shrinks in
    proportion at most, and communication may vanish."""
    share, tokens = min(share, 1.0), min(tokens, 1.0)
    if share == tokens == 1:
        return memory.total
    sharded = sum(memory.kinds.get(kind, 0) for kind in SHARDED)
    computed = sum(memory.kinds.get(kind, 0) for kind in OF_TOKENS)
    sent = memory.kinds.get("communication", 0)
    return int(memory.total - sent - (1 - share) * sharded - (1 - tokens) * computed)


def make_plan(
    job: Job,
    limit: int = 8,
    variants: Callable[[Job, Layout], Iterable[Layout]] = all_layouts,
    meshes: Iterable[Layout] | None = None,
) -> LayoutPlan:
    """Returns the `limit` fastest of `meshes` (default: all), each in its fastest variant that fits
    into the memory of a GPU.

    Every variant is timed; memory is estimated only for those that may be among the fastest.
    """
    budget = memory_budget(job.config, job.gpu.memory)
    reasons, timed = Counter[str](), list[tuple[Layout, Step]]()
    least: dict[Mesh, int] = {}  # bytes of meshes that do not fit

    def lack(mesh: Mesh, size: int) -> None:
        least[mesh] = min(size, least.get(mesh, size))

    for mesh in enumerate_meshes(job.gpus, job.shapes.experts) if meshes is None else meshes:
        if (error := mesh_error(job, mesh)) is not None:
            reasons[error] += 1
            continue
        layouts = [*variants(job, mesh)]
        if not layouts:
            reasons["no micro-batch that the other settings allow"] += 1
        for layout in layouts:
            if (size := persistent_bytes(job, layout)) > budget:
                lack(mesh.mesh, size)
            else:
                timed.append((layout, estimate_step(job, layout)))
    choices, done = list[LayoutChoice](), set[Mesh]()
    memories = MemorySearch(job, budget)
    queue = iter(sorted(timed, key=lambda entry: entry[1].seconds))
    for layout, step in queue:
        # A tie with the fastest may become the first
        if len(choices) >= max(1, limit) and step.seconds > choices[0].step.seconds * (1 + TIE):
            done.add(layout.mesh)
            break
        if layout.mesh in done:
            continue
        memory, size = memories.fit(layout)
        if memory is None:
            lack(layout.mesh, size)
        else:
            choices.append(LayoutChoice(layout, step, memory))
            done.add(layout.mesh)
    done |= {layout.mesh for layout, _ in queue}  # a slower variant of these may fit
    lacking = [size for mesh, size in least.items() if mesh not in done]
    if lacking:
        reasons[LACKS] = len(lacking)
    choices = rank_ties(choices)[:limit]
    return LayoutPlan(job, choices, reasons, budget, min(lacking, default=None))


def rank_ties(choices: Iterable[LayoutChoice]) -> list[LayoutChoice]:
    """Returns choices by time; those within TIE of their group's fastest by memory."""
    keyed, fastest = list[tuple[float, int, LayoutChoice]](), 0.0
    for choice in choices:
        if choice.step.seconds > fastest * (1 + TIE):
            fastest = choice.step.seconds
        keyed.append((fastest, choice.memory.total, choice))
    return [choice for *_, choice in sorted(keyed, key=lambda entry: entry[:2])]
