"""The time of a sum over two GPUs of what a step of generation has: few tokens of 4,096 bfloat16.

In a CUDA graph of sums, each of the one before it: Tigon's one kernel, NCCL as torch's functional
collectives call it and in place, and torch's one-shot all-reduce through symmetric memory.

    python -m bench one_shot_sum                # half a minute; starts the processes itself
    python -m bench one_shot_sum --write-docs   # needs no GPU
"""

import tempfile
from pathlib import Path

from bench import harness
from bench.harness import Bench, Job, Record, figure, markdown, report
from bench.processes import run_ranks

SIDE = harness.ROOT / "bench/one_shot_sum_side.py"
GPUS, TOKENS = 2, ("1", "4", "16", "64")


def run(job: Job) -> None:
    tiny = job.options.tiny
    with tempfile.TemporaryDirectory() as root:
        given = ["tiny" if tiny else "whole", *job.only]
        found = run_ranks(SIDE, GPUS, Path(root), given, job.options.limit)
    if "error" in found:
        raise SystemExit("\n".join([found["error"], *found["log"]]))
    job.add(ways=found)


def show(record: Record) -> str:
    ways = record["ways"]
    tokens = list(next(iter(ways.values())))
    rows = [
        [name, *(figure(of[n]["us"]) if "us" in of[n] else harness.failure(of[n]) for n in tokens)]
        for name, of in ways.items()
    ]
    table = markdown(["microseconds of a sum, by tokens", *tokens], rows)
    return report(record, table)


OPTIONS = (("--limit", {"type": float, "default": 100.0, "help": "seconds that it may take"}),)
DOCUMENT = "docs/parallel.md"
BENCH = Bench(run, show, TOKENS, DOCUMENT, options=OPTIONS, tiny=True, gpus=GPUS, each_machine=True)
