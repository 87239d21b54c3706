"""Measures one case of the kernel benchmark: every provider's error, memory and time, in turn."""

import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench import cases, losses, streaming, timing
from bench.cases import Case
from bench.peers import PACKAGES
from bench.problem import Problem, Provider, Tensors, as_tuple
from bench.timing import Run, quantiles

BEGIN = time.perf_counter()
PATIENCE = 60.0  # seconds in which a provider must have compiled and run once
BUILD: dict[str, Callable[[Case], Problem]] = {
    "rms_norm": streaming.rms_norm,
    "rms_norm_residual": streaming.rms_norm_residual,
    "sandwich_norm": streaming.sandwich_norm,
    "gated_act": streaming.gated_act,
    "rope": streaming.rope,
    "qk_norm_rope": streaming.qk_norm_rope,
    "cross_entropy": losses.cross_entropy,
    "linear_cross_entropy": losses.linear_cross_entropy,
}


def progress(line: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Effort:
    """How often: in every round each provider runs for about `total` ms, one after the other."""

    rounds: int
    total: float
    least: int
    most: int

    def times(self, run: Run, before: Run = timing.nothing) -> list[float]:
        return timing.milliseconds(run, before, total=self.total, least=self.least, most=self.most)

    def copy(self, moved: int) -> list[float]:
        """Quantiles of a plain copy that reads and writes `moved` bytes in all."""
        source = torch.empty(moved // 4, dtype=torch.bfloat16, device="cuda").normal_()
        target = torch.empty_like(source)
        return quantiles(self.times(lambda: target.copy_(source)))


STREAMING = Effort(rounds=2, total=50.0, least=5, most=60)
GEMMS = Effort(rounds=2, total=60.0, least=3, most=10)
ONCE = Effort(rounds=1, total=20.0, least=3, most=20)


def build(case: Case, device: str) -> Problem:
    torch.manual_seed(0)
    with torch.device(device):
        return BUILD[case.operator](case)


class Attempt:
    """A provider, what it takes to run it, and what came out, its failure included."""

    def __init__(self, provider: Provider, problem: Problem) -> None:
        self.provider, self.problem = provider, problem
        self.result: dict[str, Any] = {"name": provider.name}
        self.samples: dict[str, list[float]] = {}
        self.leaves = provider.leaves or problem.leaves
        self.upstream = list(provider.upstream or problem.upstream) or None
        self.forward: Run | None = None
        self.pristine = [t.detach().clone() for t in provider.overwrites]

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Do `step(*args)`; a peer that raises ends its own attempt and nobody else's."""
        if "error" in self.result:
            return
        try:
            step(*args)
        except Exception as error:
            self.result["error"] = f"{type(error).__name__}: {error}"[:500]
            self.forward = None
            progress(f"  {self.provider.name}: {self.result['error'][:200]}")
        self.restore()  # raises if the device is broken, and then nothing can go on

    def both(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert self.forward is not None
        out = as_tuple(self.forward())
        return out, torch.autograd.grad(out, list(self.leaves.values()), self.upstream)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, fresh in zip(self.provider.overwrites, self.pristine, strict=True):
            tensor.copy_(fresh)

    def check(self, truth: Tensors) -> None:
        """The first run, which compiles: its error against the truth."""
        start = time.perf_counter()
        with timing.deadline(PATIENCE):
            self.forward = self.provider.make()
            out, grads = self.both()
            timing.wait()
        self.result["first_run_s"] = time.perf_counter() - start
        results = dict(zip(self.problem.outputs, out, strict=False))  # ours returns v too
        results |= {"d" + name: g for name, g in zip(self.leaves, grads, strict=True)}
        results = self.provider.split(results)
        errors = {name: timing.relative_l2(results[name], exact) for name, exact in truth.items()}
        self.result["errors"] = {
            name: e if math.isfinite(e) else str(e) for name, e in errors.items()
        }

    def weigh(self) -> None:
        self.result["peak_mib"] = timing.peak_mib(self.both, self.restore)

    def time(self, mode: str, effort: Effort) -> None:
        run = self.forward if mode == "forward" else self.both
        assert run is not None
        self.samples.setdefault(mode, []).extend(effort.times(run, self.restore))

    def count_host(self) -> None:
        self.forward = self.provider.make()
        for mode, run in (("forward", self.forward), ("both", self.both)):
            run()
            self.result[f"{mode}_us"] = quantiles(timing.host_microseconds(run))

    def finish(self) -> dict[str, Any]:
        return self.result | {f"{mode}_ms": quantiles(s) for mode, s in self.samples.items() if s}


def installed(provider: Provider, versions: dict[str, str | None]) -> bool:
    library = provider.name.split()[0]
    return library not in PACKAGES or versions[library] is not None


def measure(
    case: Case, versions: dict[str, str | None], quick: bool, device: str = "cuda"
) -> dict[str, Any]:
    """All figures of one case but its floor."""
    torch._dynamo.reset()  # more than 8 shapes of one function, and it would stop compiling
    problem = build(case, device)
    attempts = [Attempt(p, problem) for p in problem.providers if installed(p, versions)]
    truth = problem.truth()
    for attempt in attempts:
        progress(f"{case.name}: {attempt.provider.name}")
        attempt.guarded(attempt.check, truth)
    del truth
    gc.collect()
    for attempt in attempts:
        attempt.guarded(attempt.weigh)

    effort = STREAMING if case.against == "floor" else GEMMS
    if quick or case.variant == "peaked":
        effort = ONCE
    gemms: list[float] = []
    for number in range(effort.rounds):
        progress(f"{case.name}: round {number + 1} of {effort.rounds}")
        if problem.gemms:
            gemms += effort.times(lambda: [run() for run in problem.gemms.values()])
        for attempt in attempts:
            for mode in case.modes:
                if mode == "both" or case.against == "floor" or number == 0:
                    attempt.guarded(attempt.time, mode, effort)
    result: dict[str, Any] = {**asdict(case), "notes": problem.notes}
    if gemms:
        result["gemms_ms"] = quantiles(gemms)
        result["gemm_parts_ms"] = {
            name: quantiles(effort.times(run)) for name, run in problem.gemms.items()
        }
    result["providers"] = [attempt.finish() for attempt in attempts]
    return result


def floors(case: Case, bandwidth: float, quick: bool) -> dict[str, Any]:
    """The time of the case's bytes at `bandwidth`, and of a copy that moves as many."""
    effort = ONCE if quick else STREAMING
    return {
        "floor_ms": {mode: 1e3 * moved / bandwidth for mode, moved in case.bytes.items()},
        "copy_ms": {mode: effort.copy(moved) for mode, moved in case.bytes.items()},
    }


def host_time(versions: dict[str, str | None], device: str = "cuda") -> dict[str, Any]:
    """Microseconds of host time per call of rms_norm on an input too small to hide them."""
    case = cases.rms_norm(*cases.HOST_SHAPE)
    problem = build(case, device)
    attempts = [Attempt(p, problem) for p in problem.providers if installed(p, versions)]
    for attempt in attempts:
        progress(f"{cases.HOST}: {attempt.provider.name}")
        attempt.guarded(attempt.count_host)
    return {"shape": case.shape, "providers": [attempt.result for attempt in attempts]}
