"""Loading a checkpoint, beside transformers, each load in a process of its own, interleaved.

The files hold random numbers and lie in the page cache. A round loads the same files once on every
side, one after the other; a ratio is the median over the rounds, so that other load hits all alike.
transformers maps files into memory and copies nothing where no weight is converted: such a load
ends before a weight was read. So beside the time of `from_pretrained` stands the time until the
bits of all weights were added up once, which must also give the same number on every side.

Memory is the most that was resident beyond what there was after importing: `rss` with the pages of
mapped files, `anon` only what no file backs. Memory is taken from rounds of its own: watching it
takes time. Some cases also save what was loaded, once on each side, beside raw writes.

    python -m bench checkpoint                          # on a CPU: about 2 GB of disk a case
    python -m bench checkpoint --only llama-8b-cuda     # 32 GB, on a GPU; ranks-2 needs two
    python -m bench checkpoint --write-docs             # every machine's newest record
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import harness
from bench.compare_side import config
from bench.cpu import processor
from bench.harness import Bench, Job, Record, figure, heading, installed, markdown, report, verdict
from bench.processes import environment, lines
from tigon.models import MODELS
from tigon.models.pretrained.names import layout
from tigon.weights.header import write_header

SIDE = harness.ROOT / "bench/checkpoint_side.py"
PATIENCE = 600.0  # seconds of a side
AIM = 1 / 3  # of transformers' time of saving, where the disk allows
SHARD = 5 << 30  # bytes of one file at most
BLOCK = 1 << 25  # random numbers that a checkpoint repeats
WRITE = 1 << 28  # bytes that a thread writes at a time

MOE = {"moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8}
MOE |= {"norm_topk_prob": True}
APART = {"dtype": "bfloat16", "tie_word_embeddings": False}
CONFIGS = {
    "dense": config("llama", 32000, 2048, 8192, 12, 32, 8, 64, **APART),
    "moe": config("qwen3_moe", 32000, 1024, 3072, 5, 16, 4, 64, **MOE, **APART),
    "llama-8b": config("llama", 128256, 4096, 14336, 32, 32, 8, 128, **APART),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is loaded, by whom, and what is to be reached."""

    model: str  # of CONFIGS
    dtype: str
    sides: tuple[str, ...] = ("tigon", "transformers")  # as bench/checkpoint_side.py calls them
    device: str = "cpu"
    # A figure of the first side over another's -> at most that. "bytes" are those of the weights,
    # "pinned" the time of copying as many from pinned memory.
    targets: tuple[tuple[str, str, float], ...] = ()
    exports: bool = False  # what was loaded is saved too


MAPPED = ("tigon-mmap", "tigon", "transformers")
CASES = {
    "dense-bf16": Case(
        *("dense", "bfloat16", MAPPED),
        targets=(("seconds", "transformers", 1.0), ("peak_rss", "bytes", 1.1)),
        exports=True,
    ),
    "dense-bf16-copied": Case(
        *("dense", "bfloat16", ("tigon", "transformers")),
        targets=(("used_seconds", "transformers", 1.0), ("peak_rss", "bytes", 1.1)),
    ),
    "dense-fp32": Case(
        *("dense", "float32"),
        targets=(("seconds", "transformers", 0.5), ("peak_rss", "bytes", 1.1)),
    ),
    "moe-bf16": Case(
        *("moe", "bfloat16"),
        targets=(
            *(("seconds", "transformers", 0.25), ("peak_rss", "transformers", 0.5)),
            ("peak_rss", "bytes", 1.1),
        ),
    ),
    "llama-8b-cuda": Case(
        *("llama-8b", "bfloat16", ("tigon", "transformers"), "cuda"),
        targets=(("seconds", "transformers", 1 / 6), ("seconds", "pinned", 1 / 0.8)),
        exports=True,
    ),
    "ranks-2": Case(
        *("llama-8b", "bfloat16", ("tigon-ranks",), "cuda"),
        targets=(("bytes_read", "bytes_of_files", 1.001), ("seconds", "pinned", 1 / 0.8)),
    ),
}
NAMES = {  # of figures, in verdicts
    "seconds": "load time",
    "used_seconds": "time of load + first use",
    "peak_rss": "peak RSS",
    "bytes": "size of the weights",
    "bytes_read": "bytes read",
    "bytes_of_files": "size of the files",
    "pinned": "a copy from pinned memory",
}
SAVED = {"raw": "raw writes"}
ON_GPU = tuple(name for name, case in CASES.items() if case.device == "cuda")


def tensors_of(values: Record) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the checkpoint's tensors, experts apart, in the order of files."""
    model = MODELS[values["model_type"]].from_config(values, dtype=torch.bfloat16, device="meta")
    parts = layout(model, model.checkpoint_names, stacked_experts=False).values()
    return sorted({part.name: part.shape for some in parts for part in some}.items())


def write_model(directory: Path, values: Record) -> None:
    """A checkpoint of random numbers in bfloat16, in shards as transformers would split it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    draw = torch.Generator().manual_seed(0)
    block = (torch.randn(BLOCK, generator=draw) * 0.02).to(torch.bfloat16).view(torch.uint8)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors_of(values):
        nbytes = 2 * math.prod(shape)
        if size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    weight_map, paths = {}, []
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys((tensor for tensor, _ in shard), name)
        paths.append(directory / name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write_shard, paths, shards, [block] * len(shards)))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_shard(path: Path, shard: Sequence[tuple[str, tuple[int, ...]]], block: Any) -> None:
    header = write_header([(n, shape, torch.bfloat16) for n, shape in shard], {"format": "pt"})
    size = sum(2 * math.prod(shape) for _, shape in shard)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(begin: int) -> None:
        end = min(begin + WRITE, size)
        while begin < end:
            some = block.numpy().data[: end - begin]
            begin += os.pwrite(file, some, len(header) + begin)

    try:
        os.pwrite(file, header, 0)
        with ThreadPoolExecutor() as pool:
            list(pool.map(write, range(0, size, WRITE)))
    finally:
        os.close(file)


def warm(directory: Path) -> int:
    """Read all files, so that they are in the page cache; their bytes."""
    files = [path for path in directory.iterdir() if path.suffix == ".safetensors"]
    buffer = bytearray(1 << 22)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return sum(path.stat().st_size for path in files)


def side(what: str, directory: Path, case: Case, *, watch: bool) -> Record:
    command = [str(SIDE), what, str(directory), case.dtype, case.device]
    if what.endswith("-ranks"):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    *_, found = lines(command, PATIENCE, env=environment(WATCH_MEMORY=int(watch)))
    if "error" in found:
        raise RuntimeError(f"{what}: {found['error']}")
    del found["kind"]
    return found


def measure(job: Job, name: str, case: Case, directory: Path) -> None:
    """Rounds that are timed, and one in which memory is watched."""
    files = warm(directory)
    rounds = 1 if job.quick else job.options.repeats
    found: dict[str, list[Record]] = {what: [] for what in case.sides}
    memory: dict[str, Record] = {}
    for i in range(rounds + 1):
        for what in case.sides:
            row = side(what, directory, case, watch=i == rounds)
            if i == rounds:
                memory[what] = {key: row[key] for key in ("peak_rss", "peak_anon")}
            else:
                found[what].append(row)
            harness.progress(f"{name}, {what}: {row['seconds']:.3f} s")
    sums = {row["bits"] for rows in found.values() for row in rows}
    if len(sums) != 1:
        raise ValueError(f"{name}: the sides do not have the same weights: {sums}")
    first = found[case.sides[0]]
    summary: Record = {"case": name, "bytes": first[0]["bytes"], "bytes_of_files": files}
    summary["sides"] = {
        what: {
            "seconds": median(row["seconds"] for row in rows),
            "least_seconds": min(row["seconds"] for row in rows),
            "cpu_seconds": median(row["cpu_seconds"] for row in rows),
            "used_seconds": median(row["seconds"] + row["sum_seconds"] for row in rows),
            **{key: median(r[key] for r in rows) for key in ("pinned", "bytes_read") if key in r0},
            **memory[what],
        }
        for what, rows in found.items()
        for r0 in rows[:1]
    }
    summary["ratios"] = {
        f"{key} / {other}": ratio(key, other, summary, found) for key, other, _ in case.targets
    }
    summary["rounds"] = found
    if case.exports:
        summary["exports"] = exported(name, case, directory)
    job.append("results", summary, rows_of(summary))


def exported(name: str, case: Case, directory: Path) -> Record:
    """What saving took on each side; both have to write the same number of bytes."""
    saved = side("exports", directory, case, watch=False)
    for what, row in saved.items():
        harness.progress(f"{name}, saved by {what}: {row['seconds']:.2f} s")
    # Headers may differ in their padding and in what they say of the writer
    if abs(saved["tigon"]["bytes"] - saved["transformers"]["bytes"]) > 1 << 16:
        raise ValueError(f"{name}: the sides do not save the same: {saved}")
    return saved


def ratio(key: str, other: str, summary: Record, found: Mapping[str, list[Record]]) -> float:
    ours, *_ = found.values()
    mine = next(iter(summary["sides"].values()))
    if other in ("bytes", "bytes_of_files"):
        return mine[key] / summary[other]
    if key.startswith("peak"):
        return mine[key] / summary["sides"][other][key]

    def value(row: Record) -> float:
        return row["seconds"] + row["sum_seconds"] if key == "used_seconds" else row[key]

    if other == "pinned":
        return median(value(row) / row["pinned"] for row in ours)
    return median(value(a) / value(b) for a, b in zip(ours, found[other], strict=True))


def rows_of(summary: Record) -> str:
    head = ["side", "load, s", "fastest load, s", "CPU time, s", "load + first use, s"]
    head += ["peak RSS, GB", "anonymous, GB"]
    keys = ("seconds", "least_seconds", "cpu_seconds", "used_seconds")
    rows = [
        [what, *(figure(row[key]) for key in keys)]
        + [figure(row[key] / 1e9) for key in ("peak_rss", "peak_anon")]
        for what, row in summary["sides"].items()
    ]
    title = f"**{summary['case']}**, {summary['bytes'] / 1e9:.2f} GB of weights:"
    judged = [
        verdict(f"{NAMES[key]} over {NAMES.get(other, other)}", reached, aim, most=True)
        for key, other, aim in CASES[summary["case"]].targets
        for reached in [summary["ratios"].get(f"{key} / {other}")]
    ]
    tables = [title, markdown(head, rows), "\n".join(judged)]
    return "\n\n".join([*tables, *exports_of(summary.get("exports", {}))])


def exports_of(saved: Record) -> list[str]:
    """What saving took, as Markdown; nothing of a case that has not saved."""
    if not saved:
        return []
    rows = [
        [SAVED.get(what, what), figure(row["seconds"]), figure(row["bytes"] / row["seconds"] / 1e9)]
        for what, row in saved.items()
    ]
    reached = saved["tigon"]["seconds"] / saved["transformers"]["seconds"]
    judged = verdict("time of saving over transformers'", reached, AIM, most=True)
    return ["Saving the same model:", markdown(["side", "s", "GB/s"], rows), judged]


def show(record: Record) -> str:
    said = heading(record, {"transformers": record["transformers"]})
    said += f"; {record['cpus']} CPUs, load average {record['load']:.0f} at the start"
    if record.get("directory"):
        said += f"; files in {record['directory']}"
    return report(record, *map(rows_of, record.get("results", ())), title=f"{said}.")


def run(job: Job) -> None:
    options = job.options
    on_gpu = any(CASES[name].device == "cuda" for name in job.only)
    machine = torch.cuda.get_device_name() if on_gpu else processor()
    job.record |= {"machine": machine, "cpus": os.cpu_count(), "repeats": options.repeats}
    job.record["load"] = os.getloadavg()[0]  # runnable processes: others' too
    job.record["directory"] = str(options.directory) if options.directory else None
    job.record |= {name: installed(name) for name in ("transformers", "safetensors")}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for name in job.only:
            model = Path(directory) / CASES[name].model
            if not model.exists():
                write_model(model, CONFIGS[CASES[name].model])
            measure(job, name, CASES[name], model)


OPTIONS = (
    ("--repeats", {"type": int, "default": 5}),
    ("--directory", {"type": Path, "help": "for the checkpoints; default: the system's"}),
)
MORE = {"document": "docs/weights.md", "each_machine": True}
MORE |= {"options": OPTIONS, "needs_gpu": False, "unasked": ON_GPU}
BENCH = Bench(run, show, tuple(CASES), **MORE)
