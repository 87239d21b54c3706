"""Generation beside transformers and beside the memory's limit, in one run on one machine.

Random weights of the shape of Llama-3.1-8B on a GPU; bench/cpu.py has what a CPU does.
docs/generation.md says what is compared, and how; --write-docs puts the figures there.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import generate_cases as cases
from bench import harness, timing
from bench.generate_cases import CASES, FLASH, LLAMA_8B, OURS, STATIC, THEIRS, Decode, Prefill, Size
from bench.harness import Bench, Job, Record, figure, heading, progress, report, row_of, verdict
from bench.measure import ONCE, Attempt, Effort, in_turn
from bench.timing import quantiles

COPIED = 2**31  # bytes read and written: 1 GiB each
COPY = Effort(rounds=1, total=100.0, least=10, most=60)
LIMIT = Effort(rounds=1, total=300.0, least=5, most=100)  # as long as clocks take to settle
FORWARD = Effort(rounds=2, total=1500.0, least=3, most=6)
PATIENCE = 100.0  # seconds in which a provider must have compiled and generated once
LIBRARIES = {name: name for name in ("transformers", "triton", "flash-attn-4")}
# Case, what is looked at, at least
TARGETS = (
    ("decode 1 x 1024", "share", 0.85),
    ("decode 1 x 1024", "times", 11.0),
    ("decode 64 x 1024", "share", 0.60),
    ("decode 64 x 1024", "times", 5.0),
    ("prefill 8192", "share", 0.88),
    ("prefill 8192", "times", 1.15),
)
MEANINGS = {"share": "share of the bound", "times": f"speed over {THEIRS}"}
ATTENTION = {THEIRS: "sdpa", FLASH: "flash_attention_4"}  # of a prefill
PARTS = {"products": "GEMMs", "passes": "memory-bound kernels"}


def seconds(run: Callable[[], object]) -> float:
    start = timing.now()
    run()
    return timing.now() - start


class Decoding(Attempt):
    """Greedy generation; a round is the time of a step of the whole batch, in ms.

    `moved` are the bytes of a step. `judge` is the model whose logits tell whether tokens are right
    and which may be another side's: its own, where none is given, must not find them wrong.
    """

    def __init__(
        self, name: str, model: Any, ids: Tensor, case: Decode, moved: Record, judge: Any = None
    ) -> None:
        super().__init__(name)
        self.model, self.case, self.lengths = model, case, case.lengths(name)
        self.result["bytes"], self.judge = moved, judge
        self.generate = cases.generating(model, name, ids)

    def check(self) -> None:
        """A wrong answer is not worth timing."""
        tokens: list[Tensor] = []
        new, start = self.lengths[1], time.perf_counter()
        with timing.deadline(PATIENCE):
            self.result["extra_mib"] = timing.peak_mib(lambda: tokens.append(self.generate(new)))
        self.result["first_run_s"] = time.perf_counter() - start
        gaps = cases.choice_gaps(self.judge or self.model, tokens[0], new)
        self.result["worst_choice"] = worst = float(gaps.max())
        self.result["mean_choice"] = float(gaps.mean())
        if self.judge is None and not worst <= cases.DOUBT:
            raise RuntimeError(f"chose a token {worst:.3g} deviations below the best")

    def time(self) -> None:
        short, long = self.lengths
        a, b = (seconds(partial(self.generate, new)) for new in (short, long))
        self.sample("ms", [1e3 * (b - a) / (long - short)])


class Prefilling(Attempt):
    """The forward pass that fills a cache, and generating one token, in ms."""

    def __init__(self, name: str, model: Any, ids: Tensor, effort: Effort) -> None:
        super().__init__(name)
        self.model, self.effort, self.forward = model, effort, cases.forward(model, ids)
        self.first = partial(cases.generating(model, name, ids), 1)

    def set_attention(self) -> None:
        if self.result["name"] in ATTENTION:
            self.model.set_attn_implementation(ATTENTION[self.result["name"]])

    def check(self) -> None:
        self.set_attention()
        with timing.deadline(PATIENCE):
            self.result["extra_mib"] = timing.peak_mib(self.forward)
            self.first()

    def time(self) -> None:
        self.set_attention()
        self.sample("ms", self.effort.times(self.forward))
        one = [1e3 * seconds(self.first) for _ in range(self.effort.least)]
        self.sample("first_token_ms", one)


def prompts(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.randint(1000, LLAMA_8B["vocab_size"], (batch, tokens), device=device)


def decode(case: Decode, models: dict[str, Any], quick: bool) -> Record:
    ids = prompts(case.batch, case.context, models[OURS].device)
    size = Size(LLAMA_8B)
    models = dict.fromkeys(cases.CACHES, models[OURS]) | dict.fromkeys(
        (THEIRS, STATIC), models[THEIRS]
    )
    attempts = [
        Decoding(name, model, ids, case, size.step(case, name)) for name, model in models.items()
    ]
    found = in_turn(case.name, attempts, 1 if quick else case.rounds)
    return {**asdict(case), "kind": "decode", "providers": found}


def prefill(case: Prefill, models: dict[str, Any], quick: bool) -> Record:
    effort = ONCE if quick else FORWARD
    ids = prompts(1, case.context, models[OURS].device)
    if harness.installed("flash-attn-4"):
        models = models | {FLASH: models[THEIRS]}
    attempts = [Prefilling(name, model, ids, effort) for name, model in models.items()]
    found = in_turn(case.name, attempts, effort.rounds)
    return {**asdict(case), "kind": "prefill", "providers": found}


def limit(case: Prefill, bandwidth: float) -> Record:
    """The parts of a prefill, each at the best rate of this machine, one after the other."""
    size, layers = Size(LLAMA_8B), LLAMA_8B["num_hidden_layers"]
    progress(f"{case.name}: its limit")
    alone = cases.products(size, case.context)
    products = {name: quantiles(LIMIT.times(run)) for name, run in alone}
    attention: Record = {}
    for name, run in cases.attentions(size, case.context):
        try:
            with timing.deadline(PATIENCE):
                run()
            attention[name] = quantiles(LIMIT.times(run))
        except Exception as error:
            attention[name] = f"{type(error).__name__}: {error}"[:300]
    parts = {
        "products": layers * sum(ms[1] for ms in products.values()),
        "attention": layers * min(ms[1] for ms in attention.values() if isinstance(ms, list)),
        "passes": 1e3 * size.passes(case.context) / bandwidth,
    }
    total = {"limit_ms": sum(parts.values()), "parts_ms": parts}
    return {**total, "products_ms": products, "attention_ms": attention}


def bound(record: Record, case: Record, row: Record) -> float:
    """Milliseconds that nobody can be below."""
    if case["kind"] == "prefill":
        return float(case["limit_ms"])
    moved = row["bytes"]["parameters"] + row["bytes"]["cache"]
    return float(1e3 * moved / record["copy"]["bytes_per_second"])


def share(record: Record, case: Record, row: Record) -> float | None:
    return bound(record, case, row) / row["ms"][1] if "ms" in row else None


def fastest_peer(case: Record) -> Record:
    """The row of transformers that takes the least time; empty if there is none."""
    rows = [row for row in case["providers"] if row["name"].startswith(THEIRS) and "ms" in row]
    return min(rows, key=lambda row: row["ms"][1], default={})


def times(case: Record, row: Record) -> float | None:
    """How many times as fast as transformers at its fastest."""
    other = fastest_peer(case)
    return other["ms"][1] / row["ms"][1] if other and "ms" in row else None


def rate(case: Record, row: Record) -> str:
    """Tokens per second."""
    tokens = case["batch"] if case["kind"] == "decode" else case["context"]
    return f"{1e3 * tokens / row['ms'][1]:,.0f}"


def table(record: Record, case: Record) -> str:
    decoded = case["kind"] == "decode"

    def cells(row: Record) -> Iterator[str]:
        ms = row["ms"][1]
        yield from (figure(ms), rate(case, row))
        yield from (figure(bound(record, case, row)), figure(share(record, case, row)))
        if decoded:
            moved = row["bytes"]["read"] + row["bytes"]["cache"]
            yield figure(1e3 * moved / record["copy"]["bytes_per_second"] / ms)
        yield from (figure(times(case, row)), figure(row["extra_mib"]))
        yield figure(row["worst_choice"], 2) if decoded else figure(row["first_token_ms"][1])

    head = ["provider", "forward, ms", "tokens/s", "limit, ms", "share of the limit"]
    if decoded:
        head = ["provider", "ms per step", "tokens/s", "bound, ms", "share of the bound"]
        head += ["share, bytes really read"]
    head += [f"speed over {THEIRS}", "extra MiB"]
    head += ["largest logit gap" if decoded else "first token, ms"]
    text = f"### {case['name']}\n\n{harness.provider_table(head, case['providers'], cells)}"
    if not decoded:
        parts = [f"{PARTS.get(name, name)} {figure(ms)}" for name, ms in case["parts_ms"].items()]
        text += f"\n\nThe limit, ms: {', '.join(parts)}."
    return text


def verdicts(record: Record) -> Iterator[str]:
    """The targets, each with what was reached; beside less than transformers' best none is met."""
    for name, key, least in TARGETS:
        if case := row_of(record, name):
            row = row_of(case, OURS)
            reached = share(record, case, row) if key == "share" else times(case, row)
            line = verdict(f"{name}, {MEANINGS[key]}", reached, least)
            best = STATIC if case["kind"] == "decode" else FLASH  # that transformers may have
            if key == "share" or row_of(case, best) or not line.startswith("met"):
                yield line


def show(record: Record) -> str:
    speed = record["copy"]["bytes_per_second"] / 1e12
    title = f"{heading(record)}; a copy of 1 GiB in the same run: {speed:.2f} TB/s."
    tables = (table(record, case) for case in record["cases"])
    return report(record, *tables, verdicts(record), title=title)


def run(job: Job) -> None:
    copy = COPY.bandwidth(COPIED)
    job.record |= {"copy": copy, "config": LLAMA_8B, "cases": []}
    models: dict[str, Any] = {}
    for name, make in {OURS: cases.ours, THEIRS: cases.theirs}.items():
        progress(f"random weights: {name}")
        models[name] = make(LLAMA_8B)
    for case in (case for case in CASES if case.name in job.only):
        if isinstance(case, Decode):
            found = decode(case, models, job.quick)
        else:
            found = prefill(case, models, job.quick) | limit(case, copy["bytes_per_second"])
        job.append("cases", found, table(job.record, found))


NAMES = [case.name for case in CASES]
BENCH = Bench(run, show, NAMES, "docs/generation.md", libraries=LIBRARIES)
