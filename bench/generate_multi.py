"""A token's time where two GPUs share the layers (tensor parallelism), beside one GPU.

Random weights of the shape of Llama-3.1-8B, the same on both sides, in bf16; greedy tokens, each
side in processes of its own. A token's time is what passes from the 32nd token to the 224th, as the
host receives them.

    python -m bench generate_multi                # two minutes on two H200s
    python -m bench generate_multi --write-docs   # needs no GPU
"""

import tempfile
from pathlib import Path

from bench import harness
from bench.harness import Bench, Job, Record, figure, markdown, progress, report, verdict
from bench.processes import run_ranks

SIDE = harness.ROOT / "bench/generate_multi_side.py"
GPUS, CONTEXT, AIM = 2, 1024, 1.6
BATCHES = {"decode 1 x 1024": 1, "decode 64 x 1024": 64}


def run(job: Job) -> None:
    tiny = job.options.tiny
    job.record |= {"cases": {}}
    sizes = (8, 2, 4, 1, "tiny") if tiny else (CONTEXT, 32, 224, job.options.rounds, "whole")
    for name in job.only:
        sides: list[Record] = []
        for ranks in (1, GPUS):
            progress(f"{name}: {ranks} of {GPUS}")
            given = [str(x) for x in (BATCHES[name], *sizes)]
            with tempfile.TemporaryDirectory() as root:
                found = run_ranks(SIDE, ranks, Path(root), given, job.options.limit)
            sides.append(found)
        job.add(cases=job.record["cases"] | {name: sides})


def ratio(sides: list[Record]) -> float | None:
    one, several = (side.get("ms") for side in sides)
    return one / several if one and several else None


def alike(sides: list[Record]) -> int | None:
    """Tokens of the first row up to the first that differs, as roundings do."""
    if any("tokens" not in side for side in sides):
        return None
    pairs = zip(*(side["tokens"] for side in sides), strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(sides[0]["tokens"]))


def show(record: Record) -> str:
    rows = []
    for name, sides in record["cases"].items():
        if failed := [harness.failure(side) for side in sides if "error" in side]:
            rows.append([name, *failed])
            continue
        cells = [f for side in sides for f in (side["ms"], side.get("allocated_gib"))]
        rows.append([name, *map(figure, cells), figure(ratio(sides)), str(alike(sides))])
    head = ["batch x context", "one GPU, ms per step", "GiB", f"tensor={GPUS}, ms per step", "GiB"]
    table = markdown([*head, "speed-up", "equal tokens from the first"], rows)
    first = next(iter(BATCHES))
    reached = ratio(record["cases"][first]) if first in record["cases"] else None
    said = verdict(f"{first}: tensor={GPUS} over one GPU", reached, AIM)
    # Roundings choose another token after a few, but not in prompts of all rows
    if wrong := [name for name, sides in record["cases"].items() if alike(sides) == 0]:
        said = f"WRONG: {', '.join(wrong)}: no token is equal"
    return report(record, table, said)


OPTIONS = (
    ("--rounds", {"type": int, "default": 5}),
    ("--limit", {"type": float, "default": 100.0, "help": "seconds that a side may take"}),
)
DOCUMENT = "docs/parallel.md"
BENCH = Bench(
    run, show, tuple(BATCHES), DOCUMENT, options=OPTIONS, tiny=True, gpus=GPUS, each_machine=True
)
