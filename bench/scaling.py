"""Training steps on one, two and four GPUs in each layout, beside transformers + Liger.

The trainer's own steps, as in bench/parallel.py: Llama-3.1-8B's shape with a row of 8,192 tokens on
each rank, or longer rows that ranks share, in bf16 and in fp8; and Qwen3-30B-A3B's with 8 layers,
whose experts are shared, too. Speeds are tokens per second and GPU. bench/plan.py puts what
`tigon plan` predicts beside them.

    python -m bench scaling                      # about 500 s on four GPUs
    python -m bench scaling --only "fsdp 4,transformers"
    python -m bench scaling --write-docs         # needs no GPU

A side that the record has with the same libraries is not measured again, so the same command goes
on with what is missing; `--again` measures it. Rows say their commit: of a claim, both sides are to
be of one run.
"""

import json
from collections.abc import Iterable
from typing import Any

from bench import harness, layouts
from bench.harness import Bench, Job, Record, figure, markdown, report, verdict
from bench.layouts import (
    CASES,
    EXPERTS,
    LIMIT,
    LLAMA_8B,
    TOKENS,
    Side,
    commits,
    differences,
    measure,
    measured,
    peak,
)
from bench.layouts_side import EXPERT_PEER, TIGON
from bench.train_cases import PEER
from bench.train_step import LIBRARIES
from tigon.plan import Layout

GPUS = 4
OVER_PEER, OVER_ONE, OVER_EXPERT_PEER = 1.10, 0.96, 2.0
DOCUMENT, PICTURE = "docs/scale.md", "docs/scaling.svg"

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


def run(job: Job) -> None:
    known = json.loads(job.out.read_text(encoding="utf-8")) if job.out.exists() else {}
    had = known.get("libraries", {"": ""}).items()
    same = had <= job.record["libraries"].items() and not job.options.again
    job.record["sides"] = known["sides"] if same else {}
    measure(job, SIDES)
    job.whole = not job.tiny and all(job.record["sides"].get(name) for name in SIDES)


def speed(record: Record, name: str) -> float | None:
    """Returns tokens per second and GPU, the median of the rounds."""
    return layouts.speed(measured(record, name), SIDES[name])


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
    best, rows = fastest(record, PEERS), []
    for name, side in SIDES.items():
        each, gpus = measured(record, name), str(side.layout.ranks)
        if (rate := speed(record, name)) is None:
            failed = record["sides"].get(name, ())[:1]
            rows += [[name, gpus, harness.failure(row)] for row in failed]
            continue
        beside = [ratio(record, name, other) for other in (best, "one GPU")]
        shown = map(figure, beside) if side.model == LLAMA_8B else ["", ""]
        used = ", ".join(each[0]["attention"])
        cells = [f"{rate:,.0f}", figure(peak(each)), *shown, used, commits(each)]
        rows.append([name, gpus, *cells])
    head = ("side", "GPUs", "tok/s and GPU", "peak GiB", "over the peer", "over one GPU")
    table = markdown((*head, "attention", "commit"), rows)
    said = [
        verdict(f"tok/s and GPU of {name or TIGON} over {other or PEER}", value, aim)
        for name, other, aim in targets(record)
        for value in [ratio(record, name, other)]
    ]
    return report(record, table, [*said, *differences(record, SIDES)])


def plot(record: Record, path: Any = harness.ROOT / PICTURE) -> None:
    """Draws tokens per second over the number of GPUs, beside as many times one GPU's."""
    from matplotlib.figure import Figure  # an extra

    whole = Figure(figsize=(6, 3))
    axes = whole.subplots()
    lines = {
        "FSDP2": ("one GPU", "two GPUs, fsdp 2", "fsdp 4"),
        "sharding=gradients": ("one GPU", "two GPUs, sharding=gradients", "sharding=gradients"),
        PEER: (fastest(record, PEERS) or PEERS[0],),
    }
    for label, names in lines.items():
        rates = {SIDES[n].layout.ranks: rate for n in names if (rate := speed(record, n))}
        axes.plot([*rates], [n * rate for n, rate in rates.items()], "o-", label=label)
    if (one := speed(record, "one GPU")) is not None:
        axes.plot([1, GPUS], [one, GPUS * one], ":", color="gray", label="times one GPU")
    axes.set_xticks([1, 2, GPUS])
    axes.set_xlabel("GPUs")
    axes.set_title(f"Tokens per second, {LLAMA_8B}\n{record['machine']}, bf16", fontsize=8)
    axes.legend(fontsize=7)
    harness.save_picture(whole, path)


def blocks(record: Record) -> dict[str, str]:
    link = f"![tokens per second over the number of GPUs]({PICTURE.removeprefix('docs/')})"
    return {DOCUMENT: f"{link}\n\n{show(record)}"}


OPTIONS = (
    *(CASES, LIMIT),
    ("--rounds", {"type": int, "default": 1}),
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
