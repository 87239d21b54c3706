"""Generation beside transformers and beside the memory's limit, in one run on one machine.

python bench/generate.py [--only CASE,...] [--quick] [--out FILE]     # on a GPU
python bench/generate.py --cpu [--quick] [--out FILE]
python bench/generate.py --table | --write-docs

The first form takes random weights of the shape of Llama-3.1-8B, the second SmolLM2-135M in fp32.
Both print tables and verdicts and write the figures as JSON: a whole run into bench/results, a part
of one into bench/out. The third shows the newest of both as Markdown, or puts it into
docs/generation.md, which says what is compared, and how.
"""

import argparse
import gc
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

import tigon
from bench import generate_cases as cases
from bench import timing
from bench._common import RESULTS, ROOT, save, stamp
from bench.generate_cases import CASES, LLAMA_8B, OURS, THEIRS, Decode, Prefill, Size
from bench.measure import BEGIN, ONCE, Effort, progress
from bench.peers import imported
from bench.report import figure, insert, markdown
from bench.timing import quantiles

Record = dict[str, Any]
COPIED = 2**31  # bytes read and written: 1 GiB each
COPY = Effort(rounds=1, total=100.0, least=10, most=60)
LIMIT = Effort(rounds=1, total=300.0, least=5, most=100)  # as long as clocks take to settle
FORWARD = Effort(rounds=2, total=1500.0, least=3, most=6)
PATIENCE = 100.0  # seconds in which a provider must have compiled and generated once
PACKAGES = ("transformers", "triton", "flash-attn-4")
# Case, what is looked at, at least
TARGETS = (
    ("decode 1 x 1024", "share", 0.85),
    ("decode 1 x 1024", "times", 11.0),
    ("decode 64 x 1024", "share", 0.60),
    ("decode 64 x 1024", "times", 5.0),
    ("prefill 8192", "share", 0.88),
    ("prefill 8192", "times", 1.15),
)
MEANINGS = {"share": "share of the bound", "times": f"times as fast as {THEIRS}"}


def seconds(run: Callable[[], object]) -> float:
    timing.wait()
    start = time.perf_counter()
    run()
    timing.wait()
    return time.perf_counter() - start


class Attempt:
    """What a provider does in a case, and what came out, its failure included."""

    def __init__(self, name: str, model: Any, ids: Tensor) -> None:
        self.row: Record = {"name": name}
        self.model, self.generate = model, cases.generating(model, name, ids)
        self.samples: dict[str, list[float]] = {}

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Do it; whoever raises ends his own row and nobody else's."""
        if "error" in self.row:
            return
        try:
            step(*args)
        except Exception as error:
            self.row["error"] = f"{type(error).__name__}: {error}"[:500]
            progress(f"  {self.row['name']}: {self.row['error'][:200]}")
        if "error" in self.row:  # and nothing of the exception is referred to any more
            gc.collect()
            torch.cuda.empty_cache()

    def finish(self) -> Record:
        return self.row | {name: quantiles(s) for name, s in self.samples.items()}


class Decoding(Attempt):
    def check(self, case: Decode) -> None:
        """The first run, which compiles: a wrong answer is not worth timing."""
        name = self.row["name"]
        progress(f"{case.name}: {name}")
        self.row["bytes"] = Size(LLAMA_8B).step(case, name)
        tokens: list[Tensor] = []
        new, start = case.lengths(name)[1], time.perf_counter()
        with timing.deadline(PATIENCE):
            self.row["extra_mib"] = timing.peak_mib(lambda: tokens.append(self.generate(new)))
        self.row["first_run_s"] = time.perf_counter() - start
        self.row["worst_choice"] = worst = cases.worst_choice(self.model, tokens[0], new)
        if not worst <= cases.DOUBT:
            raise RuntimeError(f"chose a token {worst:.3g} deviations below the best")

    def time(self, case: Decode) -> None:
        """Milliseconds of a step of the whole batch."""
        short, long = case.lengths(self.row["name"])
        a, b = (seconds(partial(self.generate, new)) for new in (short, long))
        self.samples.setdefault("ms", []).append(1e3 * (b - a) / (long - short))


class Prefilling(Attempt):
    def check(self, ids: Tensor) -> None:
        self.forward = cases.forward(self.model, ids)
        with timing.deadline(PATIENCE):
            self.row["extra_mib"] = timing.peak_mib(self.forward)
            self.generate(1)

    def time(self, effort: Effort) -> None:
        """Milliseconds of the forward pass that fills a cache, and of generating one token."""
        self.samples.setdefault("ms", []).extend(effort.times(self.forward))
        one = [1e3 * seconds(partial(self.generate, 1)) for _ in range(effort.least)]
        self.samples.setdefault("first_token_ms", []).extend(one)


def prompts(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.randint(1000, LLAMA_8B["vocab_size"], (batch, tokens), device=device)


def decode(case: Decode, models: dict[str, Any], quick: bool) -> Record:
    ids = prompts(case.batch, case.context, models[OURS].device)
    attempts = [Decoding(name, models[OURS], ids) for name in cases.caches()]
    attempts.append(Decoding(THEIRS, models[THEIRS], ids))
    for attempt in attempts:
        attempt.guarded(attempt.check, case)
    for number in range(1 if quick else case.rounds):  # in turn: other load hits all alike
        progress(f"{case.name}: round {number + 1}")
        for attempt in attempts:
            attempt.guarded(attempt.time, case)
    return {**asdict(case), "kind": "decode", "providers": [a.finish() for a in attempts]}


def prefill(case: Prefill, models: dict[str, Any], quick: bool) -> Record:
    effort = ONCE if quick else FORWARD
    ids = prompts(1, case.context, models[OURS].device)
    attempts = [Prefilling(name, model, ids) for name, model in models.items()]
    for attempt in attempts:
        progress(f"{case.name}: {attempt.row['name']}")
        attempt.guarded(attempt.check, ids)
    for _ in range(effort.rounds):
        for attempt in attempts:
            attempt.guarded(attempt.time, effort)
    return {**asdict(case), "kind": "prefill", "providers": [a.finish() for a in attempts]}


def limit(case: Prefill, bandwidth: float) -> Record:
    """The parts of a prefill, each at the best rate of this machine, one after the other."""
    size, layers = Size(LLAMA_8B), LLAMA_8B["num_hidden_layers"]
    progress(f"{case.name}: its limit")
    products = {
        name: quantiles(LIMIT.times(run)) for name, run in cases.products(size, case.context)
    }
    attention: dict[str, Any] = {}
    for name, run in cases.attentions(size, case.context):
        try:
            with timing.deadline(PATIENCE):
                run()
            attention[name] = quantiles(LIMIT.times(run))
        except Exception as error:
            attention[name] = f"{type(error).__name__}: {error}"[:300]
    best = min(ms[1] for ms in attention.values() if isinstance(ms, list))
    parts = {
        "products": layers * sum(ms[1] for ms in products.values()),
        "attention": layers * best,
        "passes": 1e3 * size.passes(case.context) / bandwidth,
    }
    return {
        "limit_ms": sum(parts.values()),
        "parts_ms": parts,
        "products_ms": products,
        "attention_ms": attention,
    }


def bound(record: Record, case: Record, row: Record) -> float:
    """Milliseconds that nobody can be below."""
    if case["kind"] == "prefill":
        return float(case["limit_ms"])
    moved = row["bytes"]["parameters"] + row["bytes"]["cache"]
    return float(1e3 * moved / record["copy"]["bytes_per_second"])


def share(record: Record, case: Record, row: Record) -> float | None:
    return bound(record, case, row) / row["ms"][1] if "ms" in row else None


def times(case: Record, row: Record) -> float | None:
    """How many times as fast as transformers."""
    other = next((r for r in case["providers"] if r["name"] == THEIRS and "ms" in r), None)
    return other["ms"][1] / row["ms"][1] if other and "ms" in row else None


def table(record: Record, case: Record) -> str:
    tokens = case["batch"] if case["kind"] == "decode" else case["context"]
    head = ["provider", "ms per step", "tokens/s", "bound, ms", "share", "share of bytes read"]
    head += ["times transformers", "extra MiB", "worst choice"]
    if case["kind"] == "prefill":
        head = ["provider", "forward, ms", "tokens/s", "limit, ms", "share"]
        head += ["times transformers", "extra MiB", "first token, ms"]
    rows = []
    for row in case["providers"]:
        if "ms" not in row:
            rows.append([row["name"], row["error"].splitlines()[0][:90], *[""] * (len(head) - 2)])
            continue
        ms = row["ms"][1]
        cells = [row["name"], figure(ms), f"{1e3 * tokens / ms:,.0f}"]
        cells += [figure(bound(record, case, row)), figure(share(record, case, row))]
        if case["kind"] == "decode":
            moved = row["bytes"]["read"] + row["bytes"]["cache"]
            cells.append(figure(1e3 * moved / record["copy"]["bytes_per_second"] / ms))
        cells += [figure(times(case, row)), figure(row["extra_mib"])]
        decoded = case["kind"] == "decode"
        cells.append(
            figure(row["worst_choice"], 2) if decoded else figure(row["first_token_ms"][1])
        )
        rows.append(cells)
    text = f"### {case['name']}\n\n{markdown(head, rows)}"
    if case["kind"] == "prefill":
        parts = ", ".join(f"{name} {figure(ms)}" for name, ms in case["parts_ms"].items())
        text += f"\n\nThe limit, ms: {parts}."
    return text


def verdicts(record: Record) -> Iterator[str]:
    """The targets, each with what was reached."""
    for name, key, least in TARGETS:
        case = next((c for c in record["cases"] if c["name"] == name), None)
        if case is None:
            continue
        row = next(r for r in case["providers"] if r["name"] == OURS)
        reached = share(record, case, row) if key == "share" else times(case, row)
        yield verdict(f"{name}, {MEANINGS[key]}", reached, least)


def verdict(what: str, reached: float | None, least: float) -> str:
    if reached is None:
        return f"not measured: {what}"
    return f"{'met' if reached >= least else 'MISSED'}: {what}: {reached:.3f} for {least:.2f}"


def cpu_table(record: Record) -> str:
    rows = []
    for row in record["results"]:
        where = [f"{row['threads']}", f"{row['batch']}", f"{row['prompt']}"]
        rows.append([*where, *(figure(row[k]) for k in ("ours_ms", "transformers_ms", "ratio"))])
    head = ["threads", "batch", "prompt", "tigon, ms per step", "transformers, ms", "ratio"]
    return markdown(head, rows)


def cpu_verdicts(record: Record) -> Iterator[str]:
    for row in record["results"]:
        what = f"{row['threads']} threads, batch {row['batch']}, prompt {row['prompt']}"
        yield verdict(f"{what}, {MEANINGS['times']}", 1 / row["ratio"], 1.0)


def show(record: Record) -> str:
    libraries = ", ".join(f"{k} {v}" for k, v in record["packages"].items() if v)
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    where = f"{record['machine']}, torch {record['torch']}, {libraries}; commit "
    head = f"{where}{record['commit']}{changes}, {record['date'][:10]}"
    if "results" in record:
        return "\n\n".join([f"{head}.", cpu_table(record), "\n".join(cpu_verdicts(record))])
    rate = record["copy"]["bytes_per_second"] / 1e12
    parts = [f"{head}; a copy of 1 GiB in the same run: {rate:.2f} TB/s."]
    parts += [table(record, case) for case in record["cases"]]
    return "\n\n".join([*parts, "\n".join(verdicts(record))])


def summary(record: Record) -> str:
    """Of a GPU's run, what the README shows."""
    rows = []
    for case in record["cases"]:
        row = next(r for r in case["providers"] if r["name"] == OURS)
        tokens = case["batch"] if case["kind"] == "decode" else case["context"]
        cells = f"{1e3 * tokens / row['ms'][1]:,.0f}", figure(share(record, case, row), 2)
        rows.append([case["name"], *cells, figure(times(case, row), 2)])
    head = "Llama-3.1-8B's shape, bf16", "tokens/s", "share of the limit", "times transformers"
    return f"{record['machine']}; commit {record['commit']}.\n\n{markdown(head, rows)}"


def write_docs(records: Sequence[Record]) -> None:
    insert("\n\n".join(map(show, records)), ROOT / "docs/generation.md", "generate")
    for record in records:
        if "cases" in record:
            insert(summary(record), ROOT / "README.md", "generate")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def begun(machine: str, commit: str | None) -> Record:
    return {
        **stamp("tigon", "bench/*.py", described=commit),
        "machine": machine,
        "packages": {name: installed(name) for name in PACKAGES},
        "complete": False,
    }


def place(machine: str, whole: bool) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return (RESULTS if whole else ROOT / "bench/out") / f"generate-{slug}.json"


def run(only: Sequence[str], quick: bool, out: Path | None, commit: str | None) -> None:
    whole = not quick and len(only) == len(CASES)
    gpu = torch.cuda.get_device_name()
    out = out or place(gpu, whole)
    copied = COPY.copy(COPIED)
    rate = 1e3 * COPIED / copied[1]
    record = begun(gpu, commit) | {
        "copy": {"bytes": COPIED, "ms": copied, "bytes_per_second": rate},
        "config": LLAMA_8B,
        "cases": [],
    }
    models: dict[str, Any] = {}
    for name, make in {OURS: cases.ours, THEIRS: cases.theirs}.items():
        progress(f"random weights: {name}")
        models[name] = make(LLAMA_8B)
    for case in CASES:
        if case.name not in only:
            continue
        if isinstance(case, Decode):
            found = decode(case, models, quick)
        else:
            found = prefill(case, models, quick) | limit(case, rate)
        record["cases"].append(found)
        print(f"\n{table(record, found)}\n", flush=True)
        save(out, record)
        gc.collect()
        torch.cuda.empty_cache()
    record |= {"seconds": time.perf_counter() - BEGIN, "complete": whole}
    save(out, record)
    print("\n".join(verdicts(record)))
    progress(f"wrote {out}")


def run_cpu(quick: bool, out: Path | None, commit: str | None) -> None:
    """Decoding of SmolLM2-135M in fp32: on one thread, and on as many as there are cores."""
    from bench import cpu

    directory = runpy.run_path(str(ROOT / "examples/assets/smollm2.py"))["build"]()
    out = out or place("cpu", not quick)
    record = begun(cpu.processor(), commit) | {"model": directory.name, "results": []}
    ours = tigon.from_pretrained(str(directory), dtype=torch.float32)
    theirs = imported("transformers:AutoModelForCausalLM")
    theirs = theirs.from_pretrained(directory, dtype=torch.float32).eval()
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for batch, prompt in cpu.DECODE[: 1 if quick else None]:
            progress(f"{threads} threads, batch {batch}, prompt {prompt}")
            ids = torch.randint(ours.config.vocab_size, (batch, prompt))
            extra = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
            found = cpu.compare(
                partial(cpu.decoded_token, ours, ids),
                partial(cpu.decoded_token, theirs, ids, **extra),
                1 if quick else 5,
            )
            where = {"threads": threads, "batch": batch, "prompt": prompt}
            record["results"].append(where | found)
            save(out, record)
    record |= {"seconds": time.perf_counter() - BEGIN, "complete": not quick}
    save(out, record)
    print(show(record))
    progress(f"wrote {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="cases, by a part of their names; with commas between")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--cpu", action="store_true", help="SmolLM2-135M on the CPU")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--commit", help="what git describe --always --dirty says, for a copy without git"
    )
    parser.add_argument("--table", action="store_true", help="print the newest runs as Markdown")
    parser.add_argument(
        "--write-docs", action="store_true", help="put them into docs/generation.md, README.md"
    )
    options = parser.parse_args(arguments)
    if options.table or options.write_docs:
        files = sorted(RESULTS.glob("generate-*.json"))
        if not files:
            parser.error(f"no generate-*.json in {RESULTS}")
        records = [json.loads(f.read_text(encoding="utf-8")) for f in files]
        if options.write_docs:
            write_docs(records)
        else:
            print("\n\n".join(map(show, records)))
        return
    if options.cpu:
        run_cpu(options.quick, options.out, options.commit)
        return
    wanted = options.only.split(",") if options.only else [""]
    only = [case.name for case in CASES if any(part in case.name for part in wanted)]
    if not only:
        parser.error(f"--only {options.only}; there are {', '.join(c.name for c in CASES)}")
    if not torch.cuda.is_available():
        parser.error("measuring needs a CUDA GPU, or --cpu; --table needs none")
    run(only, options.quick, options.out, options.commit)


if __name__ == "__main__":
    main()
