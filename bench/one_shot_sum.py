"""The time of a sum over two GPUs of what a step of generation has: few tokens of 4,096 bfloat16.

In a CUDA graph of sums, each of the one before it: Tigon's one kernel, NCCL as torch's functional
collectives call it and in place, and torch's one-shot all-reduce through symmetric memory.

    python bench/one_shot_sum.py                # half a minute; starts the processes itself
    python bench/one_shot_sum.py --write-docs   # needs no GPU
"""

import sys
import tempfile
from pathlib import Path

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import harness
from bench.estimates import run_ranks
from bench.harness import Bench, Job, Record, figure, heading, markdown

SIDE = Path(__file__).with_name("one_shot_sum_side.py")
GPUS, TOKENS = 2, ("1", "4", "16", "64")


def run(job: Job) -> str:
    tiny = job.options.tiny
    if not tiny and torch.cuda.device_count() < GPUS:
        raise SystemExit(f"needs {GPUS} GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as root:
        given = ["tiny" if tiny else "whole", *job.only]
        found = run_ranks(SIDE, GPUS, Path(root), given, job.options.limit)
    if "error" in found:
        raise SystemExit("\n".join([found["error"], *found["log"]]))
    job.add(machine=f"{GPUS} x {job.record.get('gpu', 'CPU')}", ways=found)
    return show(job.record)


def show(record: Record) -> str:
    ways = record["ways"]
    tokens = list(next(iter(ways.values())))
    rows = [
        [name, *(figure(of[n]["us"]) if "us" in of[n] else harness.failure(of[n]) for n in tokens)]
        for name, of in ways.items()
    ]
    table = markdown(["microseconds of a sum, by tokens", *tokens], rows)
    return f"{heading(record, {})}.\n\n{table}"


OPTIONS = (
    ("--limit", {"type": float, "default": 100.0, "help": "seconds that it may take"}),
    ("--tiny", {"action": "store_true", "help": "on the CPU"}),
)
DOCUMENT = "docs/parallel.md"
BENCH = Bench(
    *("one_shot_sum", __doc__, run, show, TOKENS, DOCUMENT), options=OPTIONS, each_machine=True
)

if __name__ == "__main__":
    harness.main(BENCH)
