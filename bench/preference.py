"""DPO steps beside TRL's DPOTrainer with PEFT and Liger, each side in a process of its own.

Llama-3.1-8B's shape with adapters of rank 16 on all projections, bf16 weights, adapters and states,
AdamW, gradients clipped at a norm of 1; the reference is the base, computed at each step with the
adapters off. A step has four pairs: a prompt with an answer has at most 1,024 tokens and 512 in the
mean, so both sequences of a pair have 1,024 together in the mean. Their lengths are quantiles of
lognormal distributions: prompts of 192 tokens in the mean (spread 0.8), answers of 320 (0.6).
Tokens per second count each pair's own tokens: the prompt twice, both answers, no padding.

Both sides have the same weights, drawn by their names, and the same texts, which each reads and
tokenises itself. Ours packs the four pairs into one row, or into two that are a micro-batch each,
where each prompt is computed once for both answers; beside them stands one row with a copy of the
prompt before each. TRL 1.16 pads (its padding_free is withdrawn): short trials choose its attention
(flash-attn-4 or SDPA) and how many pairs are in a micro-batch, of which it adds up the gradients.
It has its own fused head, Liger's kernels in the layers, no recomputation, and adapters in bf16, as
float32 is slower. Its fastest setting is compared with ours of as many pairs in a micro-batch, or
of two. Ratios are of medians. First steps are compared with that in float32.

    python -m bench preference                # minutes on an H200
    python -m bench preference --write-docs   # needs no GPU
"""

import math
from collections.abc import Iterator

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, report, verdict
from bench.preference_side import EXACT, HALF, LOGGED, OURS, PAIRS, PEER, TWICE, Request, lengths
from bench.processes import side_lines
from bench.train_step import LIBRARIES

SIDE = harness.ROOT / "bench/preference_side.py"
SPEED, MEMORY = 1.6, 0.7
LABELS = {TWICE: "tigon, a copy of the prompt per answer"}
# Of the first step: how many times as far from float32 as the furthest of the peer's settings. An
# answer's log-probability is a sum over hundreds of tokens, whose logits bf16 rounds up or down
NOISE = 3


def tokens(tiny: bool) -> int:
    """Of a step."""
    return sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in lengths(tiny))


def run(job: Job) -> None:
    job.record |= {"tokens": tokens(job.tiny), "tried": {}, "sides": {}}
    for side, line in side_lines(job, Request, SIDE):
        add(job.record, side, line)
        job.add()


def add(record: Record, side: str, line: Record) -> None:
    """A line of a process to the record; the peer is what was fastest of its settings."""
    kind = line.pop("kind")
    if kind == "tried":
        record["tried"][line["name"]] = line
    known = record["sides"].get(side, {})
    if line.get("ms", math.inf) < known.get("ms", math.inf) or not known:
        record["sides"][side] = line


def beside(record: Record) -> str:
    """Our side with as many pairs in a micro-batch as the peer's fastest setting has, or two."""
    return OURS if record["sides"].get(PEER, {}).get("pairs", PAIRS) == PAIRS else HALF


def ratio(record: Record, key: str) -> float | None:
    """The peer's over ours."""
    values = [record["sides"].get(side, {}).get(key) for side in (PEER, beside(record))]
    return values[0] / values[1] if all(values) else None


def disagreement(record: Record, side: str) -> str:
    """What of a first step is further from float32 than bf16 takes the peer."""
    exact, mine = (record["sides"].get(name, {}).get("first") for name in (EXACT, side))
    tried = [line["first"] for line in record["tried"].values() if "first" in line]
    if exact is None or mine is None or not tried:
        return ""
    names = ("loss", "grad_norm", *LOGGED)
    noise = {name: max(abs(first[name] - exact[name]) for first in tried) for name in names}
    return "; ".join(
        f"{name} is {mine[name]:.5g}, in float32 {exact[name]:.5g}; {PEER} is at most "
        f"{noise[name]:.2g} away"
        for name in names
        if not abs(mine[name] - exact[name]) <= NOISE * noise[name]
    )


def verdicts(record: Record) -> Iterator[str]:
    compared = f"{beside(record)} over {PEER}"
    yield verdict(f"tokens/s of {compared}", ratio(record, "ms"), SPEED)
    less = ratio(record, "allocated_gib")
    yield verdict(f"peak memory of {compared}", less and 1 / less, MEMORY, most=True)
    if EXACT not in record["sides"]:
        yield f"not measured: {EXACT}, with which first steps are compared"
    for side in (OURS, HALF, TWICE):
        if differ := disagreement(record, side):
            yield f"WRONG: {side}, first step: {differ}"


def show(record: Record) -> str:
    head = ["DPO, Llama-3.1-8B, LoRA", "tokens/s", "ms per step", "peak, GiB"]
    head += ["first loss", "first reward margin", "first gradient norm"]
    rows = []
    for side, row in record["sides"].items():
        name = LABELS.get(side, side)
        if "error" in row:
            rows.append([name, harness.failure(row)])
            continue
        ms = row.get("ms")
        speed = f"{1e3 * record['tokens'] / ms:,.0f}" if ms else ""
        cells = [speed, figure(ms, 4), figure(row.get("allocated_gib"))]
        cells += [f"{row['first'][n]:.4f}" for n in ("loss", "rewards/margins", "grad_norm")]
        rows.append([name, *cells])
    title = f"{heading(record)}. {record['tokens']:,} tokens per step."
    tried = markdown(
        [f"settings tried for {PEER}", "ms per step", "peak, GiB"],
        [
            [name, harness.failure(row)]
            if "error" in row
            else [name, figure(row["ms"], 4), figure(row.get("allocated_gib"))]
            for name, row in record["tried"].items()
        ],
    )
    return report(record, markdown(head, rows), tried, verdicts(record), title=title)


OPTIONS = (
    ("--steps", {"type": int, "default": 5, "help": "that are timed"}),
    ("--limit", {"type": float, "default": 300.0, "help": "seconds that this call may take"}),
)
BENCH = Bench(
    run,
    show,
    (OURS, HALF, TWICE, EXACT, PEER),
    "docs/preference.md",
    options=OPTIONS,
    libraries={"TRL": "trl", **LIBRARIES},
    needed=("TRL", "PEFT", "Liger"),
    tiny=True,
)
