"""Training steps on one, two and four GPUs in each layout, beside transformers + Liger.

The trainer's own steps, as in bench/train_multi.py: Llama-3.1-8B's shape with a row of 8,192 tokens
on each rank, or longer rows that ranks share, in bf16 and in fp8; and Qwen3-30B-A3B's with 8
layers, whose experts are shared, too. Speeds are tokens per second and GPU. bench/plan.py puts what
`tigon plan` predicts beside them.

    python -m bench scaling                      # about 500 s on four GPUs
    python -m bench scaling --only "fsdp 4,transformers"
    python -m bench scaling --write-docs         # needs no GPU

A side that the record has with the same libraries is not measured again, so the same command goes
on with what is missing; `--again` measures it. Rows say their commit: of a claim, both sides are to
be of one run.
"""

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, verdict
from bench.kernels_report import STYLE
from bench.train_cases import MODELS, PEER
from bench.train_multi import Side as Ranks
from bench.train_multi import run_first, settings, write_inputs
from bench.train_multi_side import EXPERT_PEER, FIRST, TIGON
from bench.train_step import LIBRARIES
from tests.support.small import EXPERTS as SMALL_EXPERTS
from tests.support.small import LLAMA
from tigon.plan import Layout

LLAMA_8B, EXPERTS = "Llama-3.1-8B", "Qwen3-30B-A3B"
GPUS, TOKENS = 4, 8192
OVER_PEER, OVER_ONE, OVER_EXPERT_PEER = 1.10, 0.96, 2.0
DOCUMENT, PICTURE = "docs/scale.md", "docs/scaling.svg"


@dataclass(frozen=True)
class Side:
    """A layout of a library's training step."""

    layout: Layout
    kind: str = TIGON  # as bench/train_multi_side.py calls it
    model: str = LLAMA_8B
    tokens: int = TOKENS  # of a row
    fp8: bool = False

    @property
    def gpus(self) -> int:
        return self.layout.ranks

    @property
    def rate(self) -> float:
        """Tokens of a step on each GPU."""
        return self.layout.rows * self.layout.data * self.tokens / self.gpus

    def arguments(self, root: Path, tiny: bool) -> list[str]:
        """Returns settings of `tigon train`; the peers read their rows, and the mesh, from them."""
        tokens = 32 * self.tokens // TOKENS if tiny else self.tokens
        more = [f"seq_len={tokens}", f"batch_size={self.layout.rows * self.layout.data}"]
        more += ["fp8=true"] if self.fp8 else []
        more += [f"steps={FIRST + 2}"] if self.tokens > 4 * TOKENS else []
        ranks = Ranks(self.kind, self.gpus, (*more, *self.layout.settings.split()))
        return settings(root, ranks, tiny)


FOUR, ONE_FP8 = Layout(fsdp=GPUS), "one GPU, fp8"
EXPERT = "experts, expert 4"
PEER_EXPERTS = f"{PEER}, experts, ep_size=4", f"{PEER}, experts, FSDP2 without resharding"
PEERS = f"{PEER}, FSDP2", f"{PEER}, FSDP2 without resharding"
GRADIENTS = Layout(fsdp=GPUS, sharding="gradients")
# Those that say most first: the time of a machine may end
SIDES = {
    PEERS[0]: Side(FOUR, "peer-reshard"),
    "fsdp 4": Side(FOUR),
    "sharding=gradients": Side(GRADIENTS),
    "one GPU": Side(Layout()),
    EXPERT: Side(Layout(fsdp=GPUS, expert=GPUS), model=EXPERTS),
    PEER_EXPERTS[0]: Side(FOUR, EXPERT_PEER, EXPERTS),
    PEER_EXPERTS[1]: Side(FOUR, "peer-keep", EXPERTS),
    "tensor 4": Side(Layout(tensor=4)),
    "context 4, a row of 32,768": Side(Layout(context=4), tokens=4 * TOKENS),
    "replicate 2 x fsdp 2": Side(Layout(replicate=2, fsdp=2)),
    PEERS[1]: Side(FOUR, "peer-keep"),
    "context 4, a row of 131,072": Side(Layout(context=4), tokens=16 * TOKENS),
    "sharding=gradients, fp8": Side(GRADIENTS, fp8=True),
    ONE_FP8: Side(Layout(), fp8=True),
    "fsdp 2 x tensor 2": Side(Layout(fsdp=2, tensor=2)),
    "fsdp 2 x context 2, rows of 32,768": Side(Layout(fsdp=2, context=2), tokens=4 * TOKENS),
    "fsdp 4, fp8": Side(FOUR, fp8=True),
    "experts, fsdp 4": Side(FOUR, model=EXPERTS),
    "experts, expert 2": Side(Layout(fsdp=4, expert=2), model=EXPERTS),
    "two GPUs, fsdp 2": Side(Layout(fsdp=2)),
    "two GPUs, sharding=gradients": Side(Layout(fsdp=2, sharding="gradients")),
}


def write_shape(root: Path, model: str, tiny: bool) -> None:
    small = SMALL_EXPERTS | {"num_experts": 4, "tie_word_embeddings": False}
    shape = {LLAMA_8B: LLAMA, EXPERTS: small}[model] if tiny else MODELS[model][2]
    (root / "config.json").write_text(json.dumps(shape))


def run_side(root: Path, name: str, job: Job) -> Record:
    """Returns a side's figures; a peer takes SDPA where flash-attn-4 does not work."""
    side, tiny = SIDES[name], job.options.tiny
    write_shape(root, side.model, tiny)
    ways = ["sdpa"] if tiny or side.kind == TIGON else ["flash_attention_4", "sdpa"]
    return run_first(root, name, side, side.arguments(root, tiny), ways, job.options.limit)


def run(job: Job) -> None:
    options = job.options
    known = json.loads(job.out.read_text(encoding="utf-8")) if job.out.exists() else {}
    had = known.get("libraries", {"": ""}).items()
    same = had <= job.record["libraries"].items() and not options.again
    job.record["sides"] = known["sides"] if same else {}
    run = {key: job.record[key] for key in ("commit", "date")}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root, options.tiny)
        for number in range(options.rounds):
            for name in job.only:
                rows = job.record["sides"].setdefault(name, [])
                if len(rows) > number:
                    continue
                progress(f"round {number + 1} of {options.rounds}: {name}")
                began = time.monotonic()
                found = run_side(root, name, job) | {"seconds": time.monotonic() - began}
                rows.append(found | run)
                job.add()
    job.whole = not options.tiny and all(job.record["sides"].get(name) for name in SIDES)


def speed(record: Record, name: str) -> float | None:
    """Returns tokens per second and GPU, the median of the rounds."""
    times = [row["ms"] for row in record["sides"].get(name, ()) if "ms" in row]
    return 1e3 * SIDES[name].rate / median(times) if times else None


def fastest(record: Record, names: Iterable[str]) -> str | None:
    """Returns the side of these with most tokens per second and GPU."""
    return max((n for n in names if speed(record, n)), key=lambda n: speed(record, n), default=None)


def ratio(record: Record, name: str | None, other: str | None) -> float | None:
    own, base = (speed(record, key) if key else None for key in (name, other))
    return own / base if own and base else None


def targets(record: Record) -> list[tuple[str | None, str | None, float]]:
    """Returns sides, those that they are compared with, and the least ratio of their speeds."""
    peer = fastest(record, PEERS)
    dense, low = (
        fastest(record, [f"{way}{end}" for way in ("fsdp 4", "sharding=gradients")])
        for end in ("", ", fp8")
    )
    return [
        (dense, peer, OVER_PEER),
        (dense, "one GPU", OVER_ONE),
        (low, ONE_FP8, OVER_ONE),
        (EXPERT, fastest(record, PEER_EXPERTS), OVER_EXPERT_PEER),
    ]


def show(record: Record) -> str:
    peer, rows = fastest(record, PEERS), []
    for name, side in SIDES.items():
        each = record["sides"].get(name, [])
        if (rate := speed(record, name)) is None:
            rows += [[name, str(side.gpus), harness.failure(each[0])]] if each else []
            continue
        size = max((row.get("allocated_gib", 0.0) for row in each if "ms" in row), default=0.0)
        beside = [ratio(record, name, other) for other in (peer, "one GPU")]
        shown = map(figure, beside) if side.model == LLAMA_8B else ["", ""]
        used = ", ".join(next(row["attention"] for row in each if "ms" in row))
        runs = ", ".join(dict.fromkeys(row["commit"] for row in each))
        rows.append([name, str(side.gpus), f"{rate:,.0f}", figure(size), *shown, used, runs])
    head = ("side", "GPUs", "tok/s and GPU", "peak GiB", "over the peer", "over one GPU")
    table = markdown((*head, "attention", "commit"), rows)
    said = [
        verdict(f"tok/s and GPU of {name or TIGON} over {other or PEER}", value, aim)
        for name, other, aim in targets(record)
        for value in [ratio(record, name, other)]
    ]
    said += [f"WRONG: first losses differ: {losses}" for losses in differences(record)]
    return "\n\n".join([heading(record, record["libraries"]) + ".", table, "\n".join(said)])


def differences(record: Record) -> list[dict[str, float]]:
    """Returns first losses of sides with the same weights and rows that rounding does not explain.

    Ranks that share rows read fewer of them, and fp8 rounds more.
    """
    groups: dict[Any, dict[str, float]] = {}
    for name, side in SIDES.items():
        for row in record["sides"].get(name, ()):
            if "losses" in row:
                key = side.model, side.tokens, side.layout.data, side.fp8
                groups.setdefault(key, {})[name] = row["losses"][0]
    return [
        losses
        for losses in groups.values()
        if max(losses.values()) - min(losses.values()) > 2e-3 * max(losses.values())
    ]


def plot(record: Record, path: Any = harness.ROOT / PICTURE) -> None:
    """Draws tokens per second over the number of GPUs, beside as many times one GPU's."""
    import matplotlib  # an extra
    from matplotlib.figure import Figure

    whole = Figure(figsize=(6, 3))
    axes = whole.subplots()
    lines = {
        "FSDP2": ("one GPU", "two GPUs, fsdp 2", "fsdp 4"),
        "sharding=gradients": ("one GPU", "two GPUs, sharding=gradients", "sharding=gradients"),
        PEER: (fastest(record, PEERS) or PEERS[0],),
    }
    for label, names in lines.items():
        found = [(SIDES[n].gpus, rate) for n in names if (rate := speed(record, n)) is not None]
        axes.plot([n for n, _ in found], [n * rate for n, rate in found], "o-", label=label)
    if (one := speed(record, "one GPU")) is not None:
        axes.plot([1, GPUS], [one, GPUS * one], ":", color="gray", label="times one GPU")
    axes.set_xticks([1, 2, GPUS])
    axes.set_xlabel("GPUs")
    axes.set_title(f"Tokens per second, {LLAMA_8B}\n{record['machine']}, bf16", fontsize=8)
    axes.legend(fontsize=7)
    with matplotlib.rc_context(STYLE):
        whole.savefig(path, bbox_inches="tight", metadata={"Date": None})


def blocks(record: Record) -> dict[str, str]:
    link = f"![tokens per second over the number of GPUs]({PICTURE.removeprefix('docs/')})"
    return {DOCUMENT: f"{link}\n\n{show(record)}"}


OPTIONS = (
    ("cases", {"nargs": "*", "help": "as --only"}),
    ("--rounds", {"type": int, "default": 1}),
    ("--limit", {"type": float, "default": 120.0, "help": "seconds that a side may take"}),
    ("--again", {"action": "store_true", "help": "measure what the record has"}),
)
BENCH = Bench(
    run,
    show,
    tuple(SIDES),
    blocks=blocks,
    draw=plot,
    options=OPTIONS,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
    gpus=GPUS,
)
