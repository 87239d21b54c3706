"""Measures what providers do in a case: error, memory and time, in turn on one device."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.harness import Record, progress
from bench.timing import quantiles

PATIENCE = 60.0  # seconds in which a provider must have compiled and run once
Run = Callable[[], Any]
Tensors = dict[str, Tensor]


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

    def bandwidth(self, moved: int) -> Record:
        """The copy as a record has it."""
        ms = self.copy(moved)
        return {"bytes": moved, "ms": ms, "bytes_per_second": 1e3 * moved / ms[1]}


ONCE = Effort(rounds=1, total=20.0, least=3, most=20)


class Attempt:
    """What a provider does in a case, and what came out, its failure included."""

    def __init__(self, name: str) -> None:
        self.result: Record = {"name": name}
        self.samples: dict[str, list[float]] = {}
        self.forward: Run | None = None
        self.exact: Tensors = {}  # what the first run is held to

    # What a provider is asked to do, in this order: a first run, which compiles; a run whose memory
    # is measured; the samples of a round; and, after each, to put back what was overwritten
    check = weigh = time = restore = staticmethod(timing.nothing)

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Do `step(*args)`; a provider that raises ends its own attempt and nobody else's."""
        if "error" in self.result:
            return
        try:
            step(*args)
        except Exception as error:
            self.result["error"] = f"{type(error).__name__}: {error}"[:500]
            progress(f"  {self.result['name']}: {self.result['error'][:200]}")
        if "error" in self.result:  # the exception no longer refers to tensors
            self.forward, self.exact = None, {}
            gc.collect()
            torch.cuda.empty_cache()
        self.restore()  # raises if the device is broken, and then nothing can go on

    def sample(self, key: str, times: Sequence[float]) -> None:
        self.samples.setdefault(key, []).extend(times)

    def finish(self) -> Record:
        return self.result | {key: quantiles(times) for key, times in self.samples.items()}


def in_turn(case: str, attempts: Sequence[Attempt], rounds: int) -> list[Record]:
    """Every attempt's figures. They take turns, so that a change of the clock hits all alike."""
    for attempt in attempts:
        progress(f"{case}: {attempt.result['name']}")
        attempt.guarded(attempt.check)
    gc.collect()
    for attempt in attempts:
        attempt.guarded(attempt.weigh)
    for number in range(rounds):
        progress(f"{case}: round {number + 1} of {rounds}")
        for attempt in attempts:
            attempt.guarded(attempt.time)
    return [attempt.finish() for attempt in attempts]


@dataclass
class Provider:
    """One implementation. What a run of it overwrites is restored, untimed, before the next."""

    name: str
    make: Callable[[], Run]  # imports and compiles; the Run is the forward pass
    leaves: Tensors | None = None  # the problem's, if it has no layout of its own
    upstream: tuple[Tensor, ...] | None = None
    overwrites: tuple[Tensor, ...] = ()
    split: Callable[[Tensors], Tensors] = dict  # its results under the truth's names


@dataclass
class Problem:
    """An operator's inputs, the gradients of its outputs, its providers and the truth."""

    leaves: Tensors
    outputs: tuple[str, ...]
    upstream: tuple[Tensor, ...]  # gradients of the outputs; empty for a loss
    truth: Callable[[], Tensors]
    providers: list[Provider]
    references: dict[str, Run] = field(default_factory=dict)  # timed with them, by name
    notes: dict[str, float] = field(default_factory=dict)
    patience: float = PATIENCE


class Operation(Attempt):
    """Forward and backward of one operator by one provider."""

    def __init__(self, provider: Provider, problem: Problem, effort: Effort, modes: Any) -> None:
        super().__init__(provider.name)
        self.provider, self.problem, self.effort, self.modes = provider, problem, effort, modes
        self.leaves = provider.leaves or problem.leaves
        self.upstream = list(provider.upstream or problem.upstream) or None
        self.pristine = [t.detach().clone() for t in provider.overwrites]

    def both(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert self.forward is not None
        out = as_tuple(self.forward())
        return out, torch.autograd.grad(out, list(self.leaves.values()), self.upstream)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, fresh in zip(self.provider.overwrites, self.pristine, strict=True):
            tensor.copy_(fresh)

    def check(self) -> None:
        """The first run, which compiles: its error against the truth."""
        exact, self.exact = self.exact, {}
        start = time.perf_counter()
        with timing.deadline(self.problem.patience):
            self.forward = self.provider.make()
            out, grads = self.both()
            timing.wait()
        self.result["first_run_s"] = time.perf_counter() - start
        results = dict(zip(self.problem.outputs, out, strict=False))  # ours returns v too
        results |= {"d" + name: g for name, g in zip(self.leaves, grads, strict=True)}
        results = self.provider.split(results)
        errors = {name: timing.relative_l2(results[name], value) for name, value in exact.items()}
        self.result["errors"] = {
            name: e if math.isfinite(e) else str(e) for name, e in errors.items()
        }

    def weigh(self) -> None:
        self.result["peak_mib"] = timing.peak_mib(self.both, self.restore)

    def time(self) -> None:
        for mode in self.modes:
            run = self.forward if mode == "forward" else self.both
            assert run is not None
            self.sample(f"{mode}_ms", self.effort.times(run, self.restore))

    def count_host(self) -> None:
        self.forward = self.provider.make()
        for mode, run in (("forward", self.forward), ("both", self.both)):
            run()
            self.result[f"{mode}_us"] = quantiles(timing.host_microseconds(run))


def measure(
    case: str, problem: Problem, effort: Effort, modes: Sequence[str] = ("forward", "both")
) -> Record:
    """The figures of all providers of a problem, and of its references."""
    operations = [Operation(provider, problem, effort, modes) for provider in problem.providers]
    exact = problem.truth()
    for operation in operations:
        operation.exact = exact
    del exact  # gone when the last has been checked
    beside = Attempt("references")
    beside.time = lambda: [
        beside.sample(key, effort.times(run)) for key, run in problem.references.items()
    ]
    *found, references = in_turn(case, [*operations, beside], effort.rounds)
    del references["name"]
    return {"notes": problem.notes, "references": references, "providers": found}


def host_time(case: str, problem: Problem) -> list[Record]:
    """Microseconds of host time per call, by every provider."""
    attempts = [Operation(provider, problem, ONCE, ()) for provider in problem.providers]
    for attempt in attempts:
        progress(f"{case}: {attempt.result['name']}")
        attempt.guarded(attempt.count_host)
    return [attempt.result for attempt in attempts]


def training_steps(
    makers: dict[str, Callable[[], Any]], inputs: Tensors, effort: Effort, optimizer: Any = None
) -> dict[str, Record]:
    """Of each model: forward, backward, and a step of `optimizer(parameters)` if it is given.

    Without an optimizer also how far the head's gradient is from that of the first model.
    """
    rows: dict[str, Record] = {}
    truth: list[Tensor] = []

    def run(attempt: Attempt, make: Callable[[], Any]) -> None:
        torch.manual_seed(0)
        model = make().train()
        updates = optimizer(model.parameters()) if optimizer else None

        def step() -> Tensor:
            if updates is None:
                model.zero_grad(set_to_none=True)
            loss: Tensor = model(**inputs).loss
            loss.backward()
            if updates is not None:
                updates.step()
                updates.zero_grad(set_to_none=True)
            return loss.detach()

        step()
        if updates is None:
            truth.append(model.lm_head.weight.grad.clone())
            attempt.result["gradient_off"] = timing.relative_l2(truth[-1], truth[0])
            del truth[1:]
        attempt.result["loss"] = float(step())
        attempt.sample("ms", effort.times(step))
        attempt.result["peak_mib"] = timing.peak_mib(step)

    for name, make in makers.items():
        progress(name)
        attempt = Attempt(name)
        attempt.guarded(run, attempt, make)
        gc.collect()
        torch.cuda.empty_cache()
        rows[name] = attempt.finish()
        del rows[name]["name"]
    return rows


def truth(
    define: Callable[..., Any],  # (rows' tensors and then the shared ones) -> output or outputs
    rows: Tensors,
    shared: Tensors,
    outputs: tuple[str, ...],
    upstream: tuple[Tensor, ...],
    *,
    step: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensors:
    """Outputs and gradients of `define` by autograd, computed in `dtype`, `step` rows at a time.

    Tensors of integers, such as targets, have no gradient.
    """
    results: dict[str, list[Tensor]] = {}
    wide = {name: t.detach().to(dtype).requires_grad_() for name, t in shared.items()}
    first = next(iter(rows.values()))
    step = step or max(1, 2**25 * len(first) // first.numel())
    for start in range(0, len(first), step):
        at = slice(start, start + step)
        parts = {
            name: t.detach()[at].to(dtype).requires_grad_() if t.is_floating_point() else t[at]
            for name, t in rows.items()
        } | wide
        leaves = {name: t for name, t in parts.items() if t.requires_grad}
        out = as_tuple(define(*parts.values()))
        given = [u[at].to(dtype) for u in upstream] or None
        grads = torch.autograd.grad(out, list(leaves.values()), given)
        found = dict(zip(outputs, out, strict=True))
        for name, value in (
            found | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
        ).items():
            before = results.setdefault(name, [])
            if value.dim() == 0 or name[1:] in shared:  # adds up over the rows
                before[:] = [sum(before) + value.detach()]
            else:
                before.append(value.detach().float())
    return {
        name: (parts[0] if parts[0].dim() == 0 else torch.cat(parts)).float()
        for name, parts in results.items()
    }


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale).add_(shift)


def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return randn(*shape, scale=scale, shift=shift).requires_grad_()
