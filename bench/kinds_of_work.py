"""Times of a step by kind of work, from the events of a torch profile."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from bench import timing

STEP = "tigon step"  # names the steps in a trace
# By the name of a kernel on a GPU, or of an operation on a CPU; the first that fits. Where several
# run at a time, the time is that of the first in this order too.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|fa[34]_",
    "collectives": r"nccl|all_?gather|reduce_?scatter|all_?reduce|c10d|gloo",
    "optimizer": r"adam|multi_tensor_apply|lpnorm|_squares_kernel|foreach|sgd|muon|newton",
    "matrix products": r"gemm|gemv|cutlass|nvjet|cublas|splitk|wgmma|mkldnn|linear|matmul"
    r"|_grouped_(product|weight_gradient)|::(add)?(b?mm|mv)$"
    r"|^_fused_(up|down)_proj_|^_moe_bwd_",  # of Liger's experts
    "fused kernels": r"^tigon::|^\w+_kernel(_\w+)?$|^_(weight_gradient|rope|sum)_",
    "copies": r"memcpy|memset|copy|[:_]cat|::_to|fill_|zero_|fillfunctor|clone",
}
PASSING = ("collectives", "copies")  # may run beside other work, which then has the time
OTHER, WAITING = "other", "waiting"


class Interval(NamedTuple):
    kind: str
    start: float  # microseconds
    stop: float


def kind_of(name: str) -> str:
    """What a kernel or an operation does, by its name."""
    fits = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(fits, OTHER)


def profile_run(run: timing.Run, count: int = 1) -> list[Any]:
    """The events of so many runs, which are one window, until the device has done them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * torch.cuda.is_available()
    profile = torch.profiler.profile(activities=activities)
    with profile as profiler, torch.profiler.record_function(STEP):
        for _ in range(count):
            run()
        timing.wait()
    return list(profiler.events() or ())


def intervals(events: Iterable[Any], on_gpu: bool) -> list[Interval]:
    """When which kind of work was done: by kernels on the GPU, or by the innermost operations of
    the CPU, whose time is theirs alone."""
    if on_gpu:
        return [
            Interval(kind_of(e.name), e.time_range.start, e.time_range.end)
            for e in events
            if e.device_type == DeviceType.CUDA and not is_annotation(e)
        ]
    found = []
    for e in events:
        if e.device_type != DeviceType.CPU or e.name == STEP:
            continue
        at, inner = e.time_range.start, sorted(e.cpu_children, key=lambda c: c.time_range.start)
        edges = [(c.time_range.start, c.time_range.end) for c in inner]
        for start, stop in [*edges, (e.time_range.end, e.time_range.end)]:
            if start > at:
                found.append(Interval(kind_of(outer_name(e)), at, start))
            at = max(at, stop)
    return found


def outer_name(event: Any) -> str:
    """Of the operation that this one is a part of, if that has a kind and this one has none."""
    while event is not None and kind_of(event.name) == OTHER and event.cpu_parent is not None:
        if event.cpu_parent.name == STEP:
            break
        event = event.cpu_parent
    return event.name


def is_annotation(event: Any) -> bool:
    """Whether an event of the GPU only says what range of the program its kernels are from."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name == STEP


def windows(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Begin and end of each step, in microseconds."""
    steps = [e for e in events if e.name == STEP and e.device_type == DeviceType.CPU]
    return [(e.time_range.start, e.time_range.end) for e in steps]


def by_kind(found: Sequence[Interval], steps: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds a step; a moment counts once, for the first kind that was at work."""
    order = [kind for kind in (*KINDS, OTHER) if kind not in PASSING] + [*PASSING]
    alone = dict.fromkeys([*order, WAITING], 0.0)
    for begin, end in steps:
        changes: list[tuple[float, int, int]] = []  # time, kind, one more or one less
        for kind, start, stop in found:
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                changes += [(start, order.index(kind), 1), (stop, order.index(kind), -1)]
        running, at = [0] * len(order), begin
        for time, number, change in sorted(changes):
            first = next((i for i, count in enumerate(running) if count), None)
            alone[WAITING if first is None else order[first]] += time - at
            running[number] += change
            at = time
        alone[WAITING] += end - at
    ordered = sorted(alone.items(), key=lambda row: -row[1])
    return {kind: 1e-3 * total / len(steps) for kind, total in ordered}
