"""Which layouts fit, the fastest first."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tigon.plan.gpu import GPU
from tigon.plan.layout import Job, Layout, meshes, misfit, variants
from tigon.plan.memory import weigh
from tigon.plan.step import BF16, FP32, Step, step_of
from tigon.train.estimate import Estimate
from tigon.train.estimate.budget import CONTEXT, SHARE
from tigon.train.estimate.gathering import ranks_of
from tigon.train.optim import state_bytes

Weigh = Callable[[Job, Layout], Estimate]
Mesh = tuple[object, ...]
LACKS = "memory"


@dataclass(frozen=True)
class Choice:
    """A layout that fits."""

    layout: Layout
    step: Step
    memory: Estimate
    gpu: GPU


@dataclass(frozen=True)
class Plan:
    job: Job
    choices: list[Choice]  # the fastest first, one of each mesh
    reasons: Counter[str]  # why others are impossible, and of how many meshes
    budget: int  # bytes of tensors that a GPU may hold
    lacking: int | None  # bytes of the mesh that needs least of those that need more


def make_plan(job: Job, most: int = 8, weigh: Weigh = weigh) -> Plan:
    """The `most` fastest meshes, each with the micro-batch and checkpointing that is fastest.

    Times are multiplied out for all; a step is weighed only where it may be one of the fastest.
    """
    budget = int(job.gpu.memory * (1 - SHARE)) - CONTEXT
    reasons, timed = Counter[str](), list[tuple[float, Layout, Step]]()
    least: dict[Mesh, int] = {}  # bytes of meshes that lack memory
    for mesh in meshes(job.gpus, job.shapes.experts):
        if (why := misfit(job, mesh)) is not None:
            reasons[why] += 1
            continue
        for layout in variants(job, mesh):
            if (held := always(job, layout)) > budget:
                least[mesh.mesh] = min(held, least.get(mesh.mesh, held))
            else:
                step = step_of(job, layout)
                timed.append((step.seconds, layout, step))
    choices, done = list[Choice](), set[Mesh]()
    weighed: dict[tuple[object, ...], Estimate] = {}
    failed: dict[tuple[object, ...], tuple[int, int]] = {}  # tokens, and the bytes that they need
    for _, layout, step in sorted(timed, key=lambda entry: entry[0]):
        if len(choices) == most:
            break
        if layout.mesh in done:
            continue
        # Memory does not depend on how many ranks have all weights
        ranks = layout.shards, layout.context, layout.tensor, layout.expert
        kind = *ranks, layout.sharding, layout.checkpointing, layout.micro_batches > 1
        tokens = layout.rows * job.seq_len // layout.context
        if kind in failed and tokens >= failed[kind][0]:
            least.setdefault(layout.mesh, failed[kind][1])
            continue
        if (*kind, tokens) not in weighed:
            weighed[*kind, tokens] = weigh(job, layout)
        memory = weighed[*kind, tokens]
        if memory.total <= budget:
            choices.append(Choice(layout, step, memory, job.gpu))
            done.add(layout.mesh)
        else:
            failed[kind] = tokens, memory.total
            least[layout.mesh] = min(memory.total, least.get(layout.mesh, memory.total))
    if without := least.keys() - done:
        reasons[LACKS] = len(without)
    lacking = min((size for mesh, size in least.items() if mesh not in done), default=None)
    return Plan(job, choices, reasons, budget, lacking)


def always(job: Job, layout: Layout) -> int:
    """Bytes that are there all the time: weights, gradients and states."""
    item = getattr(torch, job.config.param_dtype).itemsize
    ranks = ranks_of(job.shapes.part(layout.tensor, layout.expert), layout.shards)
    states = 0.0 if job.config.optimizer_offload else state_bytes(job.config, hidden=True)
    own = sum(p.numel() / n for p, n in ranks.items()) * (item + states)
    numbers = sum(p.numel() for p in ranks)
    if layout.sharding == "gradients":
        own += numbers * BF16
    elif layout.micro_batches > 1:  # whole gradients add up in float32
        own += numbers * FP32
    return int(own)
