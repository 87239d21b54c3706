"""Which layouts fit, the fastest first, and of those that are as fast what needs least memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tigon.train.estimate import Estimate
from tigon.train.estimate.budget import CONTEXT, SHARE
from tigon.train.model import sum_dtype
from tigon.train.optim import state_bytes
from tigon.train.plan.gpu import GPU
from tigon.train.plan.layout import Job, Layout, meshes, misfit, variants
from tigon.train.plan.memory import weigh
from tigon.train.plan.step import BF16, FP32, Step, step_of
from tigon.train.plan.work import tokens_of

Weigh = Callable[[Job, Layout], Estimate]
Mesh = tuple[object, ...]
LACKS = "memory"
TIE = 0.01  # of the time: the model of time is not so exact
# Over the ranks, at most
DIVIDED = ("parameters", "gradients", "optimizer", "average of weights", "reference")


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
    choices: list[Choice]  # the fastest first, of a tie what needs least memory; one of each mesh
    reasons: Counter[str]  # why others are impossible, and of how many meshes
    budget: int  # bytes of tensors that a GPU may hold
    lacking: int | None  # bytes of the mesh that needs least of those that fit in no way


class Weighed:
    """What steps take, each weighed once, and none that needs more than one which is too large."""

    def __init__(self, job: Job, weigh: Weigh, budget: int) -> None:
        self.job, self.weigh, self.budget = job, weigh, budget
        self.found: dict[tuple[object, ...], Estimate] = {}
        self.too_large: list[tuple[tuple[object, ...], tuple[float, ...], int, Estimate]] = []

    def of(self, layout: Layout) -> tuple[Estimate | None, int]:
        """The memory of a layout if it fits, and the bytes that it needs at least."""
        # It does not depend on how many ranks have all weights
        kind = layout.tensor, layout.expert, layout.sharding, layout.micro_batches > 1
        tokens = tokens_of(layout.rows, self.job.seq_len, layout.context)
        # All the larger, the less memory it takes
        lean, shards = (layout.again, -layout.context, -tokens), layout.shards
        for other, leaner, fewer, memory in self.too_large:
            if kind == other and all(a <= b for a, b in zip(lean, leaner, strict=True)):
                size = at_least(memory, fewer / shards)
                if size > self.budget:
                    return None, size
        if (*kind, *lean, shards) not in self.found:
            self.found[*kind, *lean, shards] = self.weigh(self.job, layout)
        memory = self.found[*kind, *lean, shards]
        if memory.total <= self.budget:
            return memory, memory.total
        self.too_large.append((kind, lean, shards, memory))
        return None, memory.total


def at_least(memory: Estimate, share: float) -> int:
    """Bytes where each rank has this share of the rows that it has in `memory`: of what more ranks
    divide that share is left, and of messages perhaps nothing."""
    if share >= 1:
        return memory.total
    divided = sum(memory.kinds.get(kind, 0) for kind in DIVIDED)
    sent = memory.kinds.get("communication", 0)
    return int(memory.total - sent - (1 - share) * divided)


def make_plan(
    job: Job,
    most: int = 8,
    weigh: Weigh = weigh,
    ways: Callable[[Job, Layout], Iterable[Layout]] = variants,
    of: Iterable[Layout] | None = None,
    budget: int | None = None,
) -> Plan:
    """The `most` fastest meshes, each in the fastest of its `ways`: micro-batch, checkpointing.

    Times are multiplied out for all; a step is weighed only where it may be one of the fastest.
    Times within 1 % of the fastest, or of the first beyond that, and so on, are ties, in which what
    needs least memory comes first.
    `of`: the meshes, if not all; `budget`: bytes of tensors, if not all of a GPU.
    """
    budget = int(job.gpu.memory * (1 - SHARE)) - CONTEXT if budget is None else budget
    reasons, timed = Counter[str](), list[tuple[float, Layout, Step]]()
    least: dict[Mesh, int] = {}  # bytes of meshes that lack memory
    for mesh in meshes(job.gpus, job.shapes.experts) if of is None else of:
        if (why := misfit(job, mesh)) is not None:
            reasons[why] += 1
            continue
        layouts = [*ways(job, mesh)]
        if not layouts:
            reasons["no micro-batch that the other settings allow"] += 1
        for layout in layouts:
            if (held := always(job, layout)) > budget:
                least[mesh.mesh] = min(held, least.get(mesh.mesh, held))
            else:
                step = step_of(job, layout)
                timed.append((step.seconds, layout, step))
    choices, ranked, done = list[Choice](), list[float](), set[Mesh]()
    weighed = Weighed(job, weigh, budget)
    queue = iter(sorted(timed, key=lambda entry: entry[0]))
    # What is tied with the first may be the first
    while (entry := next(queue, None)) is not None:
        seconds, layout, step = entry
        if ranked and len(choices) >= most and seconds > ranked[0] * (1 + TIE):
            done.add(layout.mesh)
            break
        if layout.mesh in done:
            continue
        memory, size = weighed.of(layout)
        if memory is not None:
            choices.append(Choice(layout, step, memory, job.gpu))
            ranked.append(seconds)
            done.add(layout.mesh)
        else:
            least[layout.mesh] = min(size, least.get(layout.mesh, size))
    done |= {layout.mesh for _, layout, _ in queue}  # a slower way of these may fit
    without = {mesh: size for mesh, size in least.items() if mesh not in done}
    if without:
        reasons[LACKS] = len(without)
    choices = by_memory(choices, ranked)[:most]
    return Plan(job, choices, reasons, budget, min(without.values(), default=None))


def by_memory(choices: Sequence[Choice], seconds: Sequence[float]) -> list[Choice]:
    """In each tie, what needs least memory first. `seconds` ascend; the fastest begins a tie."""
    keyed, fastest = list[tuple[float, int, Choice]](), 0.0
    for choice, time in zip(choices, seconds, strict=True):
        if time > fastest * (1 + TIE):
            fastest = time
        keyed.append((fastest, choice.memory.total, choice))
    return [choice for *_, choice in sorted(keyed, key=lambda entry: entry[:2])]


def always(job: Job, layout: Layout) -> int:
    """Bytes that are there all the time, or at once in each step: weights, gradients, states."""
    item = getattr(torch, job.config.param_dtype).itemsize
    numbers, several = job.shapes.numbers(layout.tensor, layout.expert), layout.micro_batches > 1
    states = 0.0 if job.config.optimizer_offload else state_bytes(job.config, hidden=True)
    rows = sum(count for _, count in numbers.owned(layout.shards))
    held = rows * (item + states)
    if layout.sharding == "gradients":
        held += numbers.total * BF16
        if several:
            held += numbers.total * sum_dtype(job.config).itemsize
            # Rows of weights are part of the whole ones, where these have their dtype
            held -= rows * item if item == BF16 else 0
    elif several:  # whole gradients add up in float32
        held += numbers.total * FP32
    return int(held)
