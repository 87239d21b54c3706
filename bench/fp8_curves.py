"""Losses of 1,000 steps in fp8 beside those of three seeds in bf16, on real text.

SmolLM2-135M from the quickstart's checkpoint on its conversations and its questions and answers,
where `make quickstart` has built them, of which the last rows are held out; else a tiny run of this
project's documents. A seed is an order of the rows, and all kinds have the same ones. Judged is the
mean held-out loss over the seeds: it may be above bf16's by half of what bf16's own seeds differ.

    python -m bench fp8_curves   # some five minutes

What a task loses: `python -m bench recipes --set fp8=true --out bench/out/recipes-fp8.json`,
beside the record without it.
"""

import gc
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Job, Record, markdown, progress, report, verdict
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


def ends(record: Record, kind: str) -> list[float]:
    """Held-out losses of a kind's seeds, as the exported model has them."""
    names = [f"{kind}, seed {seed}" for seed in SEEDS]
    return [record["runs"][n]["held_out_bf16"] for n in names if n in record["runs"]]


def show(record: Record) -> str:
    rows = [
        [
            name,
            f"{fmean(r['losses'][-10:]):.4f}",
            f"{r['held_out']:.4f}",
            f"{r['held_out_bf16']:.4f}",
        ]
        for name, r in record["runs"].items()
    ]
    head = ("run", "mean of the last 10", "held out", "held out, computed in bf16")
    known = ends(record, BF16)
    lines = []
    for kind in (FP8, APART):
        own, above = ends(record, kind), None
        if len(own) == len(known) == len(SEEDS):
            above = (fmean(own) - fmean(known)) / (max(known) - min(known))
        name = f"{kind}: held-out loss above bf16's, over the spread of bf16's seeds"
        lines.append(verdict(name, above, SHARE, most=True))
    return report(record, markdown(head, rows), lines)


BENCH = Bench(run, show, RUNS, "docs/performance.md", tiny=True)
