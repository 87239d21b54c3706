"""Distillation steps, Llama-3.1-8B to Llama-3.2-1B, beside the formula and Liger's fused JSD.

One row of 4,096 tokens; all parameters of the student learn, in bf16 with bf16 states and AdamW,
gradients clipped at a norm of 1. The teacher runs in each step. Both Kullback-Leibler divergences
and the Jensen-Shannon divergence are measured once: whole steps, and the head alone, forward and
backward, from the last hidden states of both models. Both sides have the same tokens, and weights
of these shapes drawn by their names, each side in a process of its own.

The peers are transformers' models with Liger's kernels in the layers, and flash-attn-4 where it
works: with the divergence as a formula on all logits, in float32, or with LigerFusedLinearJSD. Of
LigerFusedLinearJSDLoss, which torch.compile fuses, there is the head alone. A head's memory is what
it allocates beside its inputs and the gradients it leaves: logits of all tokens would show in it.

    python -m bench distillation                # four minutes on an H200
    python -m bench distillation --write-docs   # needs no GPU
"""

from collections.abc import Iterator

from bench import harness
from bench.distillation_side import CHUNKED, DIVERGENCES, FORMULA, FUSED, OURS, Request
from bench.harness import Bench, Job, Record, figure, markdown, report, verdict
from bench.processes import side_lines
from bench.train_step import LIBRARIES

SIDE = harness.ROOT / "bench/distillation_side.py"
PEERS = "peers"
SPEED = 1.3
LOGITS = "a model's logits in bf16"
GIB = 2**30
LOSS_WITHIN, NORM_WITHIN = 5e-3, 2e-2  # shares; logits have bf16's rounding


def run(job: Job) -> None:
    shape = Request(OURS, tiny=job.tiny)
    job.record["tokens"] = shape.tokens
    job.record["vocab"] = shape.shapes()[0]["vocab_size"]
    job.record |= {"step": {}, "head": {}, "ended": {}}
    for side, line in side_lines(job, Request, SIDE):
        add(job.record, side, line)
        job.add()


def add(record: Record, process: str, line: Record) -> None:
    """A line of a process to the record."""
    kind = line.pop("kind")
    if kind == "ended":
        record["ended"][process] = line["error"]
    elif kind == "attention":
        record["attention"] = line
    else:
        own = record[kind].setdefault(line.pop("side"), {})
        own[line.pop("divergence")] = line


def fastest(record: Record, kind: str, divergence: str) -> float | None:
    """Milliseconds of the fastest peer."""
    rows = [row.get(divergence, {}) for side, row in record[kind].items() if side != OURS]
    return min((row["ms"] for row in rows if "ms" in row), default=None)


def logits(record: Record) -> float:
    """GiB of one model's, of all tokens in bf16."""
    return 2 * record["tokens"] * record["vocab"] / GIB


def verdicts(record: Record) -> Iterator[str]:
    names = {"step": "step", "head": "head alone"}
    for kind, name in names.items():
        for divergence in DIVERGENCES:
            mine = record[kind].get(OURS, {}).get(divergence, {}).get("ms")
            other = fastest(record, kind, divergence)
            ratio = other / mine if other and mine else None
            yield verdict(f"{name}, {divergence}: speed over the fastest peer", ratio, SPEED)
    for divergence in DIVERGENCES:
        more = record["head"].get(OURS, {}).get(divergence, {}).get("gib")
        share = None if more is None else more / logits(record)
        what = f"head alone, {divergence}: memory over a model's bf16 logits"
        yield verdict(what, share, 1.0, most=True)
    yield from disagreements(record)


def disagreements(record: Record) -> Iterator[str]:
    """Where first losses and gradients differ beyond bf16. CHUNKED's log-probabilities are bf16."""
    for kind, rows in record.items():
        if kind not in ("step", "head"):
            continue
        for side in (FORMULA, FUSED):
            for divergence in DIVERGENCES:
                theirs, mine = (rows.get(s, {}).get(divergence, {}) for s in (side, OURS))
                for key, within in (("loss", LOSS_WITHIN), ("gradient_norm", NORM_WITHIN)):
                    if key not in theirs or key not in mine:
                        continue
                    a, b = theirs[key], mine[key]
                    if not abs(b - a) <= within * abs(a):
                        yield f"WRONG: {kind}, {divergence}, {side}: {key} {a:.5g} and {b:.5g}"


def table(record: Record, kind: str, title: str, memory: str, sides: tuple[str, ...]) -> str:
    """Milliseconds and GiB of each side, a pair of columns for each divergence."""
    head = [title, *(f"{name}, ms{unit}" for name in DIVERGENCES for unit in ("", ", GiB"))]
    rows = []
    for side in sides:
        cells = []
        for divergence in DIVERGENCES:
            row = record[kind].get(side, {}).get(divergence, {})
            if "error" in row:
                cells += [harness.failure(row, 40), ""]
            else:
                cells += [figure(row.get("ms"), 4), figure(row.get(memory))]
        rows.append([side, *cells])
    if kind == "head":
        rows.append([LOGITS, *["", figure(logits(record))] * len(DIVERGENCES)])
    return markdown([n.replace("ms, GiB", "GiB").replace("|", "\\|") for n in head], rows)


def show(record: Record) -> str:
    whole = "step, 8B to 1B, 1 x 4096"
    return report(
        record,
        table(record, "step", whole, "allocated_gib", (OURS, FORMULA, FUSED)),
        table(record, "head", "head alone", "gib", (OURS, FORMULA, FUSED, CHUNKED)),
        *(f"{name}: {error}" for name, error in record["ended"].items()),
        verdicts(record),
    )


OPTIONS = (
    ("--steps", {"type": int, "default": 6, "help": "that are timed"}),
    ("--limit", {"type": float, "default": 300.0, "help": "seconds that this call may take"}),
)
BENCH = Bench(
    run,
    show,
    (OURS, PEERS),
    "docs/preference.md",
    options=OPTIONS,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
)
