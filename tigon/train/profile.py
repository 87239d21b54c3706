"""Where the time of a few steps goes: a trace, and a table by kind of work."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tigon.train.config import Profile
from tigon.train.parallel import World

STEP = "tigon step"  # of the trace
TABLE = "table.json"
# By the name of a kernel on a GPU, or of an operation on a CPU; the first that fits. Where several
# run at a time, the time is that of the first in this order too.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|fa[34]_",
    "collectives": r"nccl|all_?gather|reduce_?scatter|all_?reduce|c10d|gloo",
    "optimizer": r"adam|multi_tensor_apply|lpnorm|_squares_kernel|foreach|sgd|muon|newton",
    "matrix products": r"gemm|gemv|cutlass|nvjet|cublas|splitk|wgmma|mkldnn|linear|matmul"
    r"|_grouped_(product|weight_gradient)|::(add)?(b?mm|mv)$",
    "fused kernels": r"^tigon::|^_?[a-z_]+_kernel(_\w+)?$|^_(weight_gradient|rope|sum)_",
    "copies": r"memcpy|memset|copy|[:_]cat|::_to|fill_|zero_|fillfunctor|clone",
}
PASSING = ("collectives", "copies")  # may run beside other work, which then has the time
OTHER, WAITING = "other", "waiting"


class Interval(NamedTuple):
    kind: str
    start: float  # microseconds
    stop: float


class Profiler:
    """Profiles the steps of `profile` on the first rank, if the run makes them."""

    def __init__(self, chosen: Profile | None, run_dir: str, world: World, done: int, steps: int):
        """`done` of the whole run's `steps` are made already."""
        self.world, self.directory = world, Path(run_dir, "profile")
        self.first = self.last = 0
        if chosen is not None and world.main:
            self.first = max(chosen.start, done + 1)
            self.last = min(chosen.start + chosen.steps - 1, steps)
            if self.first > self.last and not (self.directory / TABLE).exists():
                world.say(
                    f"note: nothing is profiled: this run makes the steps {done + 1} to {steps}, "
                    f"none of which profile.start={chosen.start} profile.steps={chosen.steps} name"
                )
        self.running: torch.profiler.profile | None = None
        self.mark: Any = None
        world.closing.callback(self.close)

    def begin(self, step: int) -> None:
        """Before a step, counted from 1."""
        if self.mark is not None:  # of a step that comes again
            self.mark.__exit__(None, None, None)
            self.mark = None
            if step <= self.first:
                self._stop()
        if step == self.first <= self.last:
            activities = [ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize(self.world.device)
            self.running = torch.profiler.profile(activities=activities)
            self.running.start()
        if self.running is not None:
            self.mark = torch.profiler.record_function(STEP)
            self.mark.__enter__()

    def end(self, step: int) -> None:
        """After it."""
        if self.running is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.mark.__exit__(None, None, None)
        self.mark = None
        if step >= self.last and (profiled := self._stop()) is not None:
            try:
                self._write(profiled)
            except OSError as error:  # no profile is worth a run
                self.world.say(f"no profile: {error}")

    def close(self) -> None:
        """However the run ends."""
        if self._stop() is not None:
            self.world.say(f"no profile: the run ended before step {self.last}")

    def _stop(self) -> torch.profiler.profile | None:
        profiled, self.running = self.running, None
        if profiled is not None:
            profiled.stop()
        return profiled

    def _write(self, profiled: torch.profiler.profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A link in their place is not written through
        for name in ("trace.json.gz", TABLE, "table.txt"):
            (self.directory / name).unlink(missing_ok=True)
        profiled.export_chrome_trace(str(self.directory / "trace.json.gz"))
        on_gpu = self.world.device.type == "cuda"
        events = list(profiled.events() or ())
        milliseconds = by_kind(intervals(events, on_gpu), windows(events))
        facts = {"first_step": self.first, "last_step": self.last, "milliseconds": milliseconds}
        (self.directory / TABLE).write_text(json.dumps(facts, indent=2) + "\n")
        where = "GPU" if on_gpu else "CPU"
        title = f"steps {self.first} to {self.last}: milliseconds a step, on the {where} of rank 0"
        text = f"{title}\n{table(milliseconds)}"
        (self.directory / "table.txt").write_text(text + "\n")
        self.world.say(text, f"trace: {self.directory / 'trace.json.gz'}")


def kind_of(name: str) -> str:
    """What a kernel or an operation does, by its name."""
    fits = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(fits, OTHER)


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


def by_kind(
    found: Sequence[Interval], steps: Sequence[tuple[float, float]]
) -> dict[str, dict[str, float]]:
    """Milliseconds a step: "alone", in which each moment of a step counts once, for the first kind
    that was at work, and "in_all", which counts what other work has hidden too."""
    order = [kind for kind in (*KINDS, OTHER) if kind not in PASSING] + [*PASSING]
    in_all, alone = dict.fromkeys(order, 0.0), dict.fromkeys([*order, WAITING], 0.0)
    for begin, end in steps:
        changes: list[tuple[float, int, int]] = []  # time, kind, one more or one less
        for kind, start, stop in found:
            start, stop = max(start, begin), min(stop, end)
            if start < stop:
                in_all[kind] += stop - start
                changes += [(start, order.index(kind), 1), (stop, order.index(kind), -1)]
        running, at = [0] * len(order), begin
        for time, number, change in sorted(changes):
            first = next((i for i, count in enumerate(running) if count), None)
            alone[WAITING if first is None else order[first]] += time - at
            running[number] += change
            at = time
        alone[WAITING] += end - at
    in_all[WAITING] = alone[WAITING]
    scale = 1e-3 / len(steps)
    return {
        kind: {"alone": alone[kind] * scale, "in_all": in_all[kind] * scale}
        for kind in sorted(alone, key=lambda kind: -alone[kind])
    }


def table(milliseconds: dict[str, dict[str, float]]) -> str:
    """The same for people."""
    total = sum(row["alone"] for row in milliseconds.values())
    rows: list[Sequence[str]] = [("", "ms", "share", "with what was hidden")]
    for kind, row in milliseconds.items():
        if row["in_all"]:
            alone, in_all = row["alone"], row["in_all"]
            rows.append((kind, f"{alone:.2f}", f"{alone / total:.1%}", f"{in_all:.2f}"))
    rows.append(("step", f"{total:.2f}", "100.0%", ""))
    return "\n".join(f"  {a:16} {b:>10} {c:>8} {d:>22}".rstrip() for a, b, c, d in rows)
