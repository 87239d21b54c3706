"""Saving a checkpoint, beside transformers and the disk's own rate, interleaved in one process.

A round saves the same weights once on every side, each after all that is dirty was written back; a
ratio is the median over the rounds. Ours waits until all is on the disk, transformers does not: so
that its time stands with and without that wait. `raw` writes as many bytes to as many files from
one buffer, by as many threads: what the disk allows. `convert` is `tigon export` of the files.

    python bench/checkpoint_export.py                          # on a CPU: about 4 GB of disk
    python bench/checkpoint_export.py --only llama-8b-cuda     # 16 GB, on a GPU
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import harness
from bench.checkpoint import OPTIONS, run_cases, warm
from bench.checkpoint_side import Memory
from bench.harness import Bench, Job, Record, figure, heading, markdown, verdict
from bench.peers import imported
from bench.saving import AIM, Save, raw, seconds, sync, unsynced
from tigon.models import MODELS, from_pretrained
from tigon.models.pretrained.convert import convert_pretrained
from tigon.weights import Repository


@dataclass(frozen=True)
class Case:
    model: str  # of bench/checkpoint.py
    device: str = "cpu"
    dtype: str = "bfloat16"  # of the export
    size: str = "5GB"  # of a file


CASES = {
    "dense": Case("dense"),
    "dense-files": Case("dense", size="300MB"),
    "dense-fp32": Case("dense", dtype="float32"),
    "llama-8b-cuda": Case("llama-8b", "cuda"),
}
ON_GPU = tuple(name for name, case in CASES.items() if case.device == "cuda")


def sides(case: Case, source: Path, like: Path) -> dict[str, Save]:
    """What is timed, by name; `like`: an export."""
    dtype = getattr(torch, case.dtype)
    ours = from_pretrained(str(source), device=case.device)
    auto = imported("transformers:AutoModelForCausalLM")
    theirs = auto.from_pretrained(source, dtype=torch.bfloat16).to(case.device, dtype)
    options: dict[str, Any] = {"max_shard_size": case.size}

    def tigon(target: Path) -> None:
        ours.save_pretrained(target, dtype=dtype, **options)

    def tigon_unsynced(target: Path) -> None:
        with unsynced():
            tigon(target)

    def transformers(target: Path) -> None:
        theirs.save_pretrained(target, **options)

    def transformers_synced(target: Path) -> None:
        transformers(target)
        sync(target)

    def converted(target: Path) -> None:
        convert_pretrained(Repository(source), target, MODELS, dtype=dtype, **options)

    return {
        "tigon": tigon,
        "tigon, no fsync": tigon_unsynced,
        "transformers": transformers,
        "transformers, fsync": transformers_synced,
        "raw": lambda target: raw(target, like, wait=True),
        "raw, no fsync": lambda target: raw(target, like, wait=False),
        "raw, fallocate": lambda target: raw(target, like, wait=True, reserve=True),
        "convert": converted,
    }


def measure(job: Job, name: str, case: Case, source: Path) -> None:
    warm(source)
    like, target = source.with_name("like"), source.with_name("target")
    shutil.rmtree(like, ignore_errors=True)
    options: dict[str, Any] = {"max_shard_size": case.size, "dtype": getattr(torch, case.dtype)}
    with Memory() as memory:
        convert_pretrained(Repository(source), like, MODELS, **options)
    found: dict[str, list[float]] = {}
    what = sides(case, source, like)
    for _ in range(1 if job.quick else job.options.repeats):
        for side, save in what.items():
            found.setdefault(side, []).append(seconds(save, target))
            harness.progress(f"{name}, {side}: {found[side][-1]:.2f} s")
    nbytes = sum(p.stat().st_size for p in like.iterdir())
    pairs = zip(found["tigon"], found["transformers"], strict=True)
    summary: Record = {
        "case": name,
        "bytes": nbytes,
        "sides": {side: {"seconds": median(times)} for side, times in found.items()},
        "ratio": median(a / b for a, b in pairs),
        "convert_peak_anon": memory.anon,
        "rounds": found,
    }
    job.append("results", summary, rows_of(summary))


def rows_of(summary: Record) -> str:
    gb = summary["bytes"] / 1e9
    rows = [
        [side, figure(row["seconds"]), figure(gb / row["seconds"])]
        for side, row in summary["sides"].items()
    ]
    peak = figure(summary["convert_peak_anon"] / 1e6)
    title = f"**{summary['case']}**, {gb:.2f} GB; converting takes {peak} MB of memory:"
    judged = verdict("time over transformers'", summary["ratio"], AIM, most=True)
    return "\n\n".join([title, markdown(["", "s", "GB/s"], rows), judged])


def show(record: Record) -> str:
    said = heading(record, {"transformers": record["transformers"]})
    return "\n\n".join([f"{said}.", *map(rows_of, record.get("results", ()))])


def run(job: Job) -> str:
    return run_cases(job, CASES, measure, show)


MORE = {"options": OPTIONS, "needs_gpu": False, "unasked": ON_GPU}
BENCH = Bench("checkpoint_export", __doc__, run, show, tuple(CASES), **MORE)

if __name__ == "__main__":
    harness.main(BENCH)
