"""Training steps of Llama-3.1-8B's shape on two GPUs and on one, beside transformers + Liger.

A row of 8,192 tokens on each rank, bf16 weights, gradients and states, the same weights and rows on
every side. Tigon's steps are the trainer's own, with the norm of all gradients and one wait for the
device; the peer's are forward, backward and update under FSDP2, with and without giving up gathered
weights after forward. A round runs every side once, each in fresh processes; a ratio is the median
over the rounds. What the record has at this commit is not measured again.

    python -m bench train_multi                 # about 450 s; starts the processes itself
    python -m bench train_multi --rounds 1 tigon
    python -m bench train_multi --write-docs    # needs no GPU
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, report, verdict
from bench.kernels_report import STYLE
from bench.processes import run_ranks
from bench.train_cases import LLAMA_8B, PEER
from bench.train_multi_side import FIRST
from bench.train_step import LIBRARIES
from tests.support.small import LLAMA, WORDS, write_tokenizer
from tigon.train.config import Config

SIDE = harness.ROOT / "bench/train_multi_side.py"
PICTURE, DOCUMENT = "docs/train_multi.svg", "docs/performance.md"
GPUS, TOKENS, STEPS = 2, 8192, 8
OVER_PEER, OVER_ONE = 1.09, 0.97  # tokens per second and GPU, over the peer's and over one GPU's


@dataclass(frozen=True)
class Side:
    kind: str  # as bench/train_multi_side.py calls it
    gpus: int = GPUS
    settings: tuple[str, ...] = ()


ONE = "tigon, one GPU"
SIDES = {
    f"{PEER}, FSDP2": Side("peer-reshard"),
    f"{PEER}, FSDP2 without resharding": Side("peer-keep"),
    "tigon, FSDP2": Side("tigon"),
    "tigon, sharding=gradients": Side("tigon", settings=("sharding=gradients",)),
    ONE: Side("tigon", gpus=1),
}


def offered() -> dict[str, Side]:
    """Those whose settings this Tigon has."""
    known = {field.name for field in fields(Config)}
    return {
        name: side
        for name, side in SIDES.items()
        if all(setting.partition("=")[0] in known for setting in side.settings)
    }


def write_inputs(root: Path, tiny: bool) -> None:
    write_tokenizer(root / "tokenizer")
    (root / "config.json").write_text(json.dumps(LLAMA if tiny else LLAMA_8B))
    count = 2_000 if tiny else 4 * TOKENS * (FIRST + STEPS) * GPUS
    text = " ".join(WORDS[i % len(WORDS)] for i in range(count))
    (root / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")


def settings(root: Path, side: Side, tiny: bool) -> list[str]:
    values = {
        "run_dir": tempfile.mkdtemp(dir=root),
        "task": "pretrain",
        "init": root / "config.json",
        "tokenizer": root / "tokenizer",
        "data": root / "text.jsonl",
        "workers": 0,
        "steps": FIRST + (2 if tiny else STEPS),
        "seq_len": 32 if tiny else TOKENS,
        "batch_size": side.gpus,
        "param_dtype": "bfloat16",
        "optimizer": "adamw_bf16",
        "schedule": "constant",
        "lr": 1e-5,
        "beta2": 0.999,
        "max_grad_norm": 0,
        "device": "cpu" if tiny else "cuda",
    }
    return [*(f"{key}={value}" for key, value in values.items()), *side.settings]


def run_side(root: Path, name: str, job: Job) -> Record:
    """A side once. The peer falls back to SDPA where flash-attn-4 does not work."""
    side, tiny = SIDES[name], job.options.tiny
    ways = ["flash_attention_4", "sdpa"]
    if tiny or "attention" in job.record or not side.kind.startswith("peer"):
        ways = [job.record.get("attention", "sdpa")]
    found = run_first(root, name, side, settings(root, side, tiny), ways, job.options.limit)
    if "error" not in found and side.kind.startswith("peer"):
        (job.record["attention"],) = found["attention"]
    return found


def run_first(
    root: Path, name: str, side: Any, arguments: list[str], attentions: Sequence[str], limit: float
) -> Record:
    """A side, which has a kind and GPUs, with the first of these attentions that works."""
    found: Record = {}
    for attention in attentions:
        given = [side.kind, attention, *arguments]
        found = run_ranks(SIDE, side.gpus, root, given, limit)
        if "error" not in found:
            break
        progress(f"{name}, {attention}: {found['error'][:300]}")
    return found


def measure(job: Job) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root, job.options.tiny)
        for number in range(job.options.rounds):
            for name in job.only:
                rows = job.record["sides"].setdefault(name, [])
                if len(rows) > number:
                    continue
                progress(f"round {number + 1} of {job.options.rounds}: {name}")
                began = time.monotonic()
                found = run_side(root, name, job)
                rows.append(found | {"seconds": time.monotonic() - began})
                job.add()


def took(record: Record, name: str) -> float | None:
    values = [row["ms"] for row in record["sides"].get(name, ()) if "ms" in row]
    return median(values) if values else None


def ratio(record: Record, name: str, other: str) -> float | None:
    """Of tokens per second and GPU."""
    rows = [record["sides"].get(key, ()) for key in (other, name)]
    pairs = [(a, b) for a, b in zip(*rows, strict=False) if "ms" in a and "ms" in b]
    return median(a["ms"] / b["ms"] for a, b in pairs) if pairs else None


def fastest(record: Record, *, ours: bool) -> str | None:
    """Of the sides on two GPUs."""
    known = {
        name: ms
        for name, side in SIDES.items()
        if (side.kind == "tigon") == ours and side.gpus > 1 and (ms := took(record, name))
    }
    return min(known, key=known.__getitem__) if known else None


def verdicts(record: Record) -> list[str]:
    mine, theirs = fastest(record, ours=True), fastest(record, ours=False)
    said = []
    for other, aim in ((theirs, OVER_PEER), (ONE, OVER_ONE)):
        value = ratio(record, mine, other) if mine and other else None
        said.append(verdict(f"tok/s/GPU of {mine or 'tigon'} over {other or PEER}", value, aim))
    firsts = {n: r[0]["losses"][0] for n, r in record["sides"].items() if r and "losses" in r[0]}
    same = {name: loss for name, loss in firsts.items() if name != ONE}
    if same and max(same.values()) - min(same.values()) > 2e-3 * max(same.values()):
        said.append(f"WRONG: the sides' first losses differ: {same}")
    return said


def show(record: Record) -> str:
    theirs, rows = fastest(record, ours=False), []
    for name in SIDES:
        each = record["sides"].get(name, [])
        ms = took(record, name)
        if ms is None:
            rows += [[name, harness.failure(each[0])]] if each else []
            continue
        sizes = [row["allocated_gib"] for row in each if "allocated_gib" in row]
        ratios = [ratio(record, name, other) if other else None for other in (theirs, ONE)]
        speed = 1e3 * record["tokens"] / ms
        attention = ", ".join(next(r["attention"] for r in each if "ms" in r))
        cells = [f"{speed:,.0f}", figure(ms, 4), figure(max(sizes, default=None))]
        rows.append([name, *cells, *(figure(x) for x in ratios), attention])
    head = ["side", "tok/s/GPU", "ms per step", "peak GiB", "speed over the peer"]
    head += ["speed over one GPU", "attention"]
    rounds = f"{record['rounds']} round{'s' if record['rounds'] > 1 else ''}"
    title = f"{heading(record, record['libraries'])}; {rounds}."
    return report(record, markdown(head, rows), verdicts(record), title=title)


def plot(record: Record, path: Any = harness.ROOT / PICTURE) -> None:
    """A bar for each side: tokens per second and GPU, the median of the rounds."""
    import matplotlib  # an extra
    from matplotlib.figure import Figure

    speeds = {n: 1e3 * record["tokens"] / ms for n in SIDES if (ms := took(record, n)) is not None}
    whole = Figure(figsize=(8, 2.4))
    axes = whole.subplots()
    shades = ["#c1272d" if name.startswith("tigon") else "#4f7cac" for name in speeds]
    axes.barh([*speeds], [*speeds.values()], color=shades)
    for place, value in enumerate(speeds.values()):
        axes.annotate(f" {value:,.0f}", (value, place), va="center", fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.set_title(
        f"Tokens per second and GPU, Llama-3.1-8B\n{record['machine']}, bf16", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context(STYLE):
        whole.savefig(path, bbox_inches="tight", metadata={"Date": None})


def blocks(record: Record) -> dict[str, str]:
    link = f"![tokens per second with each library]({PICTURE.removeprefix('docs/')})"
    return {DOCUMENT: f"{link}\n\n{show(record)}"}


def run(job: Job) -> None:
    options, known = job.options, job.resume()
    keep = known.get("commit") == job.record["commit"] and not options.again
    job.record |= {"rounds": options.rounds, "tokens": 32 if job.tiny else TOKENS}
    job.record["sides"] = known["sides"] if keep else {}
    if keep and "attention" in known:
        job.record["attention"] = known["attention"]
    measure(job)
    whole = all(len(job.record["sides"].get(name, ())) >= options.rounds for name in offered())
    job.whole = whole and not job.tiny


OPTIONS = (
    ("cases", {"nargs": "*", "help": "as --only"}),
    ("--rounds", {"type": int, "default": 3}),
    ("--limit", {"type": float, "default": 120.0, "help": "seconds that a side may take"}),
    ("--again", {"action": "store_true", "help": "measure what the record has"}),
)
BENCH = Bench(
    run,
    show,
    tuple(offered()),
    blocks=blocks,
    draw=plot,
    options=OPTIONS,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
    gpus=GPUS,
)
