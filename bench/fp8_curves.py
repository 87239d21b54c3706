"""Losses of 1,000 steps in fp8 beside those of three seeds in bf16, on real text.

SmolLM2-135M from the quickstart's checkpoint on its conversations and its questions and answers,
where `make quickstart` has built them, of which the last rows are held out; else a tiny run of this
project's documents. A seed is an order of the rows, and all kinds have the same ones. Judged is the
mean held-out loss over the seeds, computed in bf16 as by evaluations of a run and by the exported
model: it may be above bf16's by half of what bf16's own seeds differ. Of three seeds both the mean
and that spread are rough: a table has the interval that they leave open, and the loss with the
products of training, which is higher.

    python -m bench fp8_curves   # some five minutes

What a task loses is in bench/fp8_recipes.py.
"""

import gc
from collections.abc import Callable
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Job, Record, heading, markdown, progress, report, verdict
from bench.train_curves import Given, given, masters, mine, text_tokens
from tigon.kernels.linear.fp8 import supports_fp8
from tigon.train.cuda_graphs import Graphs
from tigon.train.model import named_projections


def mine_in_fp8(what: Given, apart: str = "none") -> Any:
    model = mine(what)
    for name, layer in named_projections(model):
        layer.fp8 = supports_fp8(layer.weight.shape) and not name.endswith(apart)
    return model


BF16, FP8, APART = "bf16", "fp8", "fp8 except qkv_proj"
KINDS: dict[str, Callable[[Given], Any]] = {
    BF16: mine,
    FP8: mine_in_fp8,
    APART: partial(mine_in_fp8, apart="qkv_proj"),
}
SEEDS, STEPS, ROWS, TOKENS, HELD_OUT = (1, 2, 3), 1000, 6, 1024, 64
SHARE = 0.5  # of the seeds' spread
JUDGED = "held_out_bf16"
KEYS = {JUDGED: "in bf16", "held_out": "with the products of training"}
T95 = 4.303  # Student's t for an interval of 95 % from three differences
RUNS = [f"{kind}, seed {seed}" for seed in SEEDS for kind in KINDS]


def rows_of(tiny: bool) -> tuple[Tensor, Tensor]:
    """Rows to learn from and rows held out, int64 [rows, tokens]."""
    length, held_out = (24, 4) if tiny else (TOKENS, HELD_OUT)
    texts = [torch.arange(999) % 97] if tiny else text_tokens()[1:]
    rows = torch.cat([text[: len(text) // length * length].view(-1, length) for text in texts])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[held_out:], rows[:held_out]


@torch.no_grad()
def held_out_loss(model: Any, rows: Tensor) -> float:
    """The mean loss of rows that were not learned, with the products of training."""
    losses = [model(input_ids=ids, labels=ids).loss.float() for ids in rows.split(4)]
    return float(torch.stack(losses).mean())


def curve(kind: str, seed: int, what: Given, tiny: bool) -> Record:
    """The loss of each step, and of the held-out rows after the last."""
    rows, held_out = rows_of(tiny)
    steps, count = (4, 2) if tiny else (STEPS, ROWS)
    draw = torch.Generator().manual_seed(seed)
    passes = -(-steps * count // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=draw) for _ in range(passes)])
    model = KINDS[kind](what).train()
    if what.device == "cuda":  # the same bits, without waiting for launches
        Graphs(model)
    optimizer, losses = masters(model), []
    for chosen in order[: steps * count].view(steps, count):
        ids = rows[chosen].to(what.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    known = held_out_loss(model, held_out.to(what.device))
    # As the exported model computes: evaluations of a run are in bf16
    exported = held_out_loss(model.eval(), held_out.to(what.device))
    curve = torch.stack(losses).float().tolist()
    return {"losses": curve, "held_out": known, "held_out_bf16": exported}


def run(job: Job) -> None:
    tiny = job.options.tiny
    what = given(tiny)
    job.add(checkpoint=what.checkpoint is not None, runs={})
    for name in job.only:
        progress(name)
        kind, _, seed = name.rpartition(", seed ")
        job.add(runs=job.record["runs"] | {name: curve(kind, int(seed), what, tiny)})
        gc.collect()


def ends(record: Record, kind: str, key: str = JUDGED) -> list[float]:
    """Held-out losses of a kind's seeds."""
    names = [f"{kind}, seed {seed}" for seed in SEEDS]
    return [record["runs"][n][key] for n in names if n in record["runs"]]


def spread(record: Record) -> float | None:
    """The highest less the lowest end of bf16's seeds, once all are there."""
    known = ends(record, BF16)
    return max(known) - min(known) if len(known) == len(SEEDS) else None


def differences(record: Record, kind: str, key: str) -> list[float]:
    """Of a kind's ends from those of bf16 with the same seeds; none until all are there."""
    own, known = ends(record, kind, key), ends(record, BF16)
    if not len(own) == len(known) == len(SEEDS):
        return []
    return [a - b for a, b in zip(own, known, strict=True)]


def table_of_differences(record: Record) -> str:
    """How far kinds are from bf16, and what three seeds cannot exclude."""
    bar, rows = spread(record), []
    for kind in (FP8, APART):
        for key, how in KEYS.items():
            if bar and (found := differences(record, kind, key)):
                above, error = fmean(found), T95 * stdev(found) / len(found) ** 0.5
                numbers = above, above - error, above + error
                mean, *sides = (f"{number:+.4f}" for number in numbers)
                share, *shares = (f"{number / bar:+.2f}" for number in numbers)
                rows.append([kind, how, mean, " to ".join(sides), share, " to ".join(shares)])
    head = (
        "from bf16 of the same seed",
        "held out, computed",
        "mean of the seeds",
        "95 % interval",
    )
    over = f"mean over the spread of bf16's seeds, {bar:.4f}" if bar else ""
    return markdown((*head, over, "interval over it"), rows) if rows else ""


def show(record: Record) -> str:
    rows = [
        [
            name,
            f"{r['losses'][0]:.4f}",
            f"{fmean(r['losses'][-10:]):.4f}",
            f"{r['held_out']:.4f}",
            f"{r['held_out_bf16']:.4f}",
        ]
        for name, r in record["runs"].items()
    ]
    head = ("run", "first loss", "mean of the last 10", "held out", "held out, computed in bf16")
    weights = "the quickstart's checkpoint" if record["checkpoint"] else "random weights"
    title = f"{heading(record)}. SmolLM2-135M's shape, {weights}."
    bar, lines = spread(record), []
    for kind in (FP8, APART):
        found = differences(record, kind, JUDGED)
        name = f"{kind}: held-out loss above bf16's, over the spread of bf16's seeds"
        above = fmean(found) / bar if bar and found else None
        lines.append(verdict(name, above, SHARE, most=True))
    return report(record, markdown(head, rows), table_of_differences(record), lines, title=title)


BENCH = Bench(run, show, RUNS, "docs/performance.md", tiny=True)
