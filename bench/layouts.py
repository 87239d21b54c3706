"""Training steps of models that GPUs share: what bench/parallel.py and bench/scaling.py measure.

Tigon's steps are the trainer's own, with the norm of all gradients and one wait for the device; the
peers' are forward, backward and update. Each side runs in fresh processes, one for each rank, by
bench/layouts_side.py.
"""

import json
import string
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Job, Record, progress
from bench.layouts_side import CONTEXT_PEER, FIRST, TIGON
from bench.processes import run_ranks
from bench.train_cases import MODELS
from tests.support.small import EXPERTS as SMALL_EXPERTS
from tests.support.small import LLAMA, write_tokenizer
from tigon.plan import Layout

SCRIPT = harness.ROOT / "bench/layouts_side.py"
LLAMA_8B, EXPERTS = "Llama-3.1-8B", "Qwen3-30B-A3B"
SMALL = {LLAMA_8B: LLAMA, EXPERTS: SMALL_EXPERTS | {"num_experts": 4, "tie_word_embeddings": False}}
TOKENS, STEPS, ALONE = 8192, 8, Layout()
# Of first losses; and of later ones, among Tigon's sides and among the peer's, whose updates are
# rounded in different ways
FIRST_APART, LATER_APART = 3e-4, 5e-3


@dataclass(frozen=True)
class Side:
    """A layout of a library's training step, and the side that it is compared with."""

    layout: Layout = ALONE
    kind: str = TIGON  # as bench/layouts_side.py calls it
    model: str = LLAMA_8B
    tokens: int = TOKENS  # of a row
    fp8: bool = False
    beside: str = ""  # the side whose rate is compared
    aim: float | None = None

    @property
    def rate(self) -> float:
        """Tokens of a step on each GPU."""
        return self.layout.rows * self.layout.data * self.tokens / self.layout.ranks


def write_inputs(root: Path, tiny: bool) -> None:
    """More text than any side reads, and a tokenizer of it with many tokens: with few, ranks would
    have more or less than their part of the experts that these choose."""
    count, vocabulary = (4_000, 300) if tiny else (12 * TOKENS * (FIRST + STEPS), 4096)
    text = "".join(Random(0).choices(string.printable, k=count))
    write_tokenizer(root / "tokenizer", text[:200_000], vocabulary)
    (root / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")


def settings(root: Path, side: Side, tiny: bool) -> list[str]:
    """Of `tigon train`; the peers read their rows, and the mesh, from them."""
    layout = side.layout
    values = {
        "run_dir": tempfile.mkdtemp(dir=root),
        "task": "pretrain",
        "init": root / "config.json",
        "tokenizer": root / "tokenizer",
        "data": root / "text.jsonl",
        "workers": 0,
        "steps": FIRST + (2 if tiny or side.tokens > 4 * TOKENS else STEPS),
        "seq_len": 32 * side.tokens // TOKENS if tiny else side.tokens,
        "batch_size": layout.rows * layout.data,
        "param_dtype": "bfloat16",
        "optimizer": "adamw_bf16",
        "schedule": "constant",
        "lr": 1e-5,
        "beta2": 0.999,
        "max_grad_norm": 0,
        "activation_checkpointing": "false",
        "fp8": str(side.fp8).lower(),
        "device": "cpu" if tiny else "cuda",
    }
    return [*(f"{key}={value}" for key, value in values.items()), *layout.settings.split()]


def run_side(root: Path, name: str, side: Side, job: Job) -> Record:
    """A side's figures; a peer has SDPA where flash-attn-4 does not work."""
    shape = SMALL[side.model] if job.tiny else MODELS[side.model][2]
    (root / "config.json").write_text(json.dumps(shape))
    # Tigon chooses its own, and torch's ring is one of SDPA
    alone = job.tiny or side.kind in (TIGON, CONTEXT_PEER)
    found: Record = {}
    for attention in ("sdpa",) if alone else ("flash_attention_4", "sdpa"):
        given = [side.kind, attention, *settings(root, side, job.tiny)]
        found = run_ranks(SCRIPT, side.layout.ranks, root, given, job.options.limit)
        if "error" not in found:
            break
        progress(f"{name}, {attention}: {found['error'][:300]}")
    return found


def measure(job: Job, sides: Mapping[str, Side]) -> None:
    """Adds what each round finds of each side that was asked for, unless the record has it."""
    run = {"run": job.record["date"], "commit": job.record["commit"]}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root, job.tiny)
        for number in range(job.options.rounds):
            for name in job.only:
                rows = job.record["sides"].setdefault(name, [])
                if len(rows) > number:
                    continue
                progress(f"round {number + 1} of {job.options.rounds}: {name}")
                began = time.monotonic()
                found = run_side(root, name, sides[name], job)
                rows.append(found | run | {"seconds": time.monotonic() - began})
                job.add()


def measured(record: Record, name: str) -> list[Record]:
    """The rows of a side that did not fail."""
    return [row for row in record["sides"].get(name, ()) if "ms" in row]


def peak(rows: Iterable[Record]) -> float | None:
    """The most GiB that a rank had."""
    return max((row["allocated_gib"] for row in rows if "allocated_gib" in row), default=None)


def speed(rows: Iterable[Record], side: Side) -> float | None:
    """Tokens per second and GPU, the median of the rows."""
    times = [row["ms"] for row in rows]
    return 1e3 * side.rate / median(times) if times else None


def commits(rows: Iterable[Record]) -> str:
    return ", ".join(dict.fromkeys(row["commit"] for row in rows))


def differences(record: Record, sides: Mapping[str, Side]) -> list[str]:
    """Lines on sides of one run, with the same weights and rows, whose losses are further apart
    than roundings make them. Ranks that share rows read fewer of them, and fp8 rounds more."""
    groups: dict[Any, dict[str, list[float]]] = {}
    for name, side in sides.items():
        for row in measured(record, name):
            alike = row.get("run"), side.model, side.tokens, side.layout.data, side.fp8
            groups.setdefault(alike, {})[name] = row["losses"]
    found = []
    for losses in groups.values():
        compared = [(FIRST_APART, 0, losses)]
        for ours in (True, False):
            own = {n: each for n, each in losses.items() if (sides[n].kind == TIGON) == ours}
            compared += [(LATER_APART, step, own) for step in range(1, FIRST)]
        for most, step, some in compared:
            values = {name: each[step] for name, each in some.items() if step < len(each)}
            first = next(iter(values.values()), 0.0)
            if not all(abs(loss - first) <= most * first for loss in values.values()):
                found.append(f"WRONG: losses of step {step + 1} differ: {values}")
    return found


CASES = ("cases", {"nargs": "*", "help": "as --only"})
LIMIT = ("--limit", {"type": float, "default": 120.0, "help": "seconds that a side may take"})
