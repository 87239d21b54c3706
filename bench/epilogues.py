"""What a layer gains if a product's epilogue does what a pass does after it: at 8B's sizes.

SwiGLU and its backward, the residual addition and sums of dX: cuBLAS and Tigon's pass after it,
cuBLAS with beta = 1, QuACK's products and a Triton kernel, with errors beside fp32. Each way runs
for a second, in turns, back to back, since products in a step run at the power limit. QuACK has
gate and up in pairs of columns, so its rows also count its products for dX and dW.

    python bench/epilogues.py                # a minute and a half
    python bench/epilogues.py --write-docs   # needs no GPU
"""

import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import harness
from bench.epilogues_side import ALONE, BETA, CASES, CUBLAS, QUACK, Request
from bench.harness import Bench, Job, Record, figure, heading, installed, markdown, progress
from bench.train_step import spawn

SIDE = Path(__file__).with_name("epilogues_side.py")
LAYERS = 32
PAIRS = ("gate_up", "down, backward", "gate_up, dX", "gate_up, dW")  # that share a layout
GATED, SUMS = PAIRS[:2], ("down, residual", "o, residual")
LIBRARIES = {"QuACK": "quack-kernels", "CUTLASS DSL": "nvidia-cutlass-dsl", "triton": "triton"}


def run(job: Job) -> str:
    """Measures the cases in a process, and in a new one those after a case that ended it."""
    options, left = job.options, list(job.only)
    until = time.monotonic() + options.limit
    job.add(machine=job.record.get("gpu", "CPU"))
    job.add(libraries={k: installed(v) for k, v in LIBRARIES.items()}, cases={})
    while left and (seconds := until - time.monotonic()) > 5:
        request = Request(tuple(left), 0.01 if options.tiny else options.seconds, options.tiny)
        for line in spawn(request, seconds, SIDE):
            if line["kind"] == "case":
                left.remove(line["case"])
                add(job, line["case"], line["ways"])
            elif line["kind"] == "ended":
                add(job, left.pop(0), {CUBLAS: {"error": line["error"]}})
    return show(job.record)


def add(job: Job, case: str, ways: Record) -> None:
    """Puts a case into the record."""
    progress(f"{case}: " + ", ".join(f"{k} {figure(v.get('ms'))}" for k, v in ways.items()))
    job.add(cases=job.record["cases"] | {case: ways})


def best(record: Record, case: str, of: str) -> float | None:
    """The least milliseconds of the ways whose names begin so."""
    ways = record["cases"].get(case, {})
    return min((w["ms"] for k, w in ways.items() if k.startswith(of) and "ms" in w), default=None)


def saved_ms(record: Record, cases: tuple[str, ...], of: str) -> float | None:
    """Milliseconds that a step of all layers is shorter if these cases are computed so."""
    total = 0.0
    for case in cases:
        base, other = best(record, case, CUBLAS), best(record, case, of)
        if base is None or other is None:
            return None
        total += LAYERS * (base - other)
    return total


def show(record: Record) -> str:
    rows = []
    for case, ways in record["cases"].items():
        base = ways.get(CUBLAS, {}).get("ms")
        for name, way in ways.items():
            if "error" in way:
                rows.append([case, name, harness.failure(way)])
                continue
            ratio = figure(way["ms"] / base) if base else ""
            errors = ", ".join(f"{k} {v:.2e}" for k, v in way["errors"].items())
            rows.append([case, name, figure(way["ms"]), ratio, errors])
    head = ("case", "way", "ms", "over the first", "relative error")
    table = markdown(head, rows)
    sums = [
        (f"{QUACK}, all four products of gate and up", saved_ms(record, PAIRS, QUACK)),
        (
            f"{QUACK}, weights in pairs: the two products with an epilogue",
            saved_ms(record, GATED, QUACK),
        ),
        ("Triton, the two products with an epilogue", saved_ms(record, GATED, "Triton")),
        ("a pass that costs nothing", saved_ms(record, GATED, ALONE)),
        *((f"{case}: {BETA}", saved_ms(record, (case,), BETA)) for case in SUMS),
    ]
    lines = [(name, "not measured" if ms is None else f"{ms:.2f}") for name, ms in sums]
    step = markdown((f"ms less in a step of {LAYERS} layers", ""), lines)
    return f"{heading(record, record['libraries'])}.\n\n{table}\n\n{step}"


OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--seconds", {"type": float, "default": 1.0, "help": "of each way"}),
    ("--limit", {"type": float, "default": 100.0, "help": "seconds that it may take"}),
    ("--tiny", {"action": "store_true", "help": "on the CPU"}),
)
BENCH = Bench("epilogues", __doc__, run, show, tuple(CASES), options=OPTIONS)

if __name__ == "__main__":
    harness.main(BENCH)
