"""One case of bench/train_step.py in a process of its own: prints its figures as JSON lines.

In every round each side's model is built, trained for some steps and freed, so that one model is
alive at a time and the sides take turns on the same GPU. `left_mib`, what is still allocated before
a model is built, is near zero.

python -m bench.train_side '{"case": "Llama-3.2-1B 2 x 8192", "rounds": 3, ...}'   # see Request
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import train_limit
from bench.compare_side import laps
from bench.harness import Record, progress
from bench.kinds_of_work import by_kind, intervals, profile_run, windows
from bench.peer_kernels import compile_configs
from bench.peers import imported
from bench.processes import say
from bench.timing import GIB, allocated, deadline, peaks, reset_peaks
from bench.train_cases import CASES, GRAPHS, PEER, Batch, Case, ours, settings, shape_of, updates_of
from bench.train_peer import CHUNKS, Options, case_head_chunks, options_of, peer
from tigon.kernels.attention import backends
from tigon.train.optim import InBackward

FIRST = 3  # steps that are not timed, whose losses are compared
PROFILED = 2
PATIENCE = 75.0  # seconds in which the peer must have compiled and tuned
SLOW = 2000.0  # milliseconds of a step with so many launches that to tell them apart takes minutes


@dataclass(frozen=True)
class Request:
    """What a process is asked to measure."""

    case: str
    rounds: int  # more of them
    liger: bool  # whether it is installed
    options: dict[str, str] | None = None  # of the peer, if they have been chosen
    tried: dict[str, Record] = field(default_factory=dict)  # by the names of others of its options
    profile: tuple[str, ...] = ()  # sides whose kernels are to be told apart
    limit: bool = True
    seconds: float = 4.0  # of timed steps of a side in a round
    tiny: bool = False


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class Training:
    """A model, its optimizer and the step that is measured: forward, backward, update.

    `updates`: with optimizer_in_backward, what makes the update in backward.
    """

    def __init__(
        self, model: Any, optimizer: Any, inputs: dict[str, Any], updates: InBackward | None = None
    ) -> None:
        self.model, self.optimizer, self.inputs, self.updates = model, optimizer, inputs, updates

    def step(self) -> Tensor:
        loss = self.model(**self.inputs).loss
        self.backward(loss)
        self.update()
        return loss.detach()

    def backward(self, loss: Tensor) -> Tensor | None:
        """Returns the norm of the gradients, where they are gone after it."""
        if self.updates is not None:
            return self.updates.backward(loss)
        loss.backward()
        return None

    def update(self) -> None:
        if self.updates is None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def first(self) -> Record:
        """The first steps: losses, the first gradients' norm, and what memory each part takes."""
        parts = {"weights": allocated()}
        losses, norm = [], 0.0
        for number in range(FIRST):
            if number == 1:  # the first step has made the states
                parts["states"] = allocated() - parts["weights"]
                reset_peaks()
            before = allocated()
            loss = self.model(**self.inputs).loss
            losses.append(loss.detach().clone())  # a graph's next run would write over it
            parts["kept"] = allocated() - before
            known = self.backward(loss)
            del loss
            parts["gradients"] = allocated() - before
            if number == 0 and known is not None:
                norm = float(known)
            elif number == 0:
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
                norm = float(torch.stack(norms).norm())
                del gradients
            self.update()
        gib = {name: size / GIB for name, size in parts.items()}
        return {"losses": [float(x) for x in losses], "gradient_norm": norm, "gib": gib}

    def timed(self, seconds: float) -> Record:
        """Milliseconds of a step, from one to the next on the device's clock."""
        one = laps(self.step, 1)[0]
        count = max(1, min(200, round(1e3 * seconds / one)))
        times = laps(self.step, count)
        found = {"ms": median(times), "steps": count, "ms_least": min(times), "ms_most": max(times)}
        return found | peaks()

    def profiled(self) -> dict[str, float]:
        """Milliseconds of a step's kernels by kind; what ran beside other work counts once."""
        events = profile_run(self.step, PROFILED)
        found = by_kind(intervals(events, torch.cuda.is_available()), windows(events))
        return {kind: ms / PROFILED for kind, ms in found.items()}


@dataclass
class Sides:
    """How the two sides of a case are built."""

    request: Request
    case: Case
    device: str

    @property
    def batch(self) -> Batch:
        vocab = shape_of(self.case, self.request.tiny)["vocab_size"]
        return Batch.of(self.case, vocab, self.device, self.request.tiny)

    def build(self, side: str, options: Options | None) -> Training:
        case, device, tiny = self.case, self.device, self.request.tiny
        if side != PEER:
            made = ours(case, side, device, tiny)
            limit = settings(case, side).logits_bytes
            inputs = self.batch.ours() | ({} if limit is None else {"logits_bytes": limit})
            return Training(*made, inputs, updates_of(case, side, *made))
        if options is None:
            raise ValueError(f"no settings of {PEER} work here")
        inputs = self.batch.theirs(options.rows)
        inputs |= {CHUNKS: options.chunks} if options.chunks else {}
        return Training(*peer(case, options, device, tiny, self.request.liger), inputs)

    def turn(
        self, side: str, options: Options | None, measure: Callable[[Training], Record]
    ) -> Record:
        """What `measure` finds of a model that is made for it, and freed after it."""
        free()
        left = allocated() / 2**20
        began = time.perf_counter()
        training = self.build(side, options)
        free()
        try:
            found = {"left_mib": left, **measure(training)}
        finally:
            if options is not None and options.compiled:
                torch.compiler.reset()  # its graphs keep their memory
        return found | {"seconds": time.perf_counter() - began}


def fastest(sides: Sides) -> Options | None:
    """The peer's best settings, if any work: its attention with the first experts, its experts with
    that attention, its head in wider chunks, and compiled too where ours has CUDA graphs; what each
    of them takes is said."""
    found: dict[Options, float] = {}

    def measure(training: Training) -> Record:
        with deadline(PATIENCE):
            laps(training.step, 4)  # compiles, tunes and captures
        return {"ms": median(laps(training.step, 3))}

    def attempt(options: Options) -> None:
        row = sides.request.tried.get(options.name)
        if row is None:
            progress(f"{sides.request.case}: {PEER}, {options.name}")
            row = guarded(lambda: sides.turn(PEER, options, measure))
            say("tried", name=options.name, **row)
        if "ms" in row:
            found[options] = row["ms"]

    every = options_of(sides.case, sides.device)
    if len(every) == 1:
        return every[0]
    for kind in dict.fromkeys(options.experts for options in every):
        best = min(found, key=found.__getitem__, default=None)
        others = [options for options in every if options.experts == kind]
        for options in [replace(best, experts=kind)] if best else others:
            attempt(options)
    if found and (chunks := case_head_chunks(sides.case)):
        attempt(replace(min(found, key=found.__getitem__), chunks=chunks))
    if found and GRAPHS[0] in sides.case.settings:
        attempt(replace(min(found, key=found.__getitem__), compiled=True))
    return min(found, key=found.__getitem__, default=None)


def compile_peer(sides: Sides) -> None:
    """Compiles what the peer's autotuners try, with the last attention, which is torch's."""
    experts = {options.experts: options for options in options_of(sides.case, sides.device)}
    for options in experts.values():
        progress(f"{sides.request.case}: {PEER}, kernels of {options.name}")
        compile_configs(lambda made=options: sides.build(PEER, made).step())


def guarded(measure: Callable[[], Record]) -> Record:
    """What it finds, or its error: the other side goes on."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def attention_of(side: str, options: Options | None) -> list[str]:
    """Which backends have been used."""
    if side == PEER and options is not None:
        return [options.attention]
    return sorted({line[0] for line in backends._logged})


def measured(sides: Sides) -> None:
    """Rounds, with the kernels of the first one told apart, and the composed limit."""
    request, options = sides.request, None
    if PEER in sides.case.sides and (request.rounds or PEER in request.profile):
        if sides.case.autotuned and sides.device != "cpu":
            compile_peer(sides)
        options = Options(**request.options) if request.options else fastest(sides)
        if options is not None:
            say("options", **asdict(options))
    rounds = max(request.rounds, bool(request.profile))
    for number in range(rounds):
        for side in sides.case.sides:
            if number >= request.rounds and side not in request.profile:
                continue
            progress(f"{request.case}, round {number + 1} of {rounds}: {side}")
            backends._logged.clear()
            backends._select_backend.cache_clear()
            profiles = number == 0 and side in request.profile

            def measure(training: Training, profiles: bool = profiles, side: str = side) -> Record:
                row = training.first() | training.timed(request.seconds)
                row["attention"] = attention_of(side, options)
                if profiles:
                    row["profile"] = training.profiled() if row["ms"] < SLOW else {}
                return row

            row = guarded(lambda s=side, m=measure: sides.turn(s, options, m))
            profile = row.pop("profile", None)
            if number < request.rounds:
                say("round", side=side, **row)
            if profile is not None:
                say("profile", side=side, milliseconds=profile)
    if request.limit:
        progress(f"{request.case}: what limits it")
        free()
        say("limit", **train_limit.composed(sides.case, sides.batch, request.tiny))


def main(text: str) -> None:
    values = json.loads(text)
    request = Request(**values | {"profile": tuple(values.get("profile", ()))})
    device = "cpu" if request.tiny else "cuda"
    if not request.tiny:
        logging: Any = imported("transformers:logging")
        logging.set_verbosity_error()
    measured(Sides(request, CASES[request.case], device))


if __name__ == "__main__":
    main(sys.argv[1])
