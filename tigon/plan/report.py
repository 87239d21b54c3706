"""`tigon plan`: from the command line to a table."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from tigon.data.examples import format_count
from tigon.plan.cost import Job, Shapes
from tigon.plan.gpu import find_gpu
from tigon.plan.layout import MESH
from tigon.plan.search import LACKS, TIE, LayoutChoice, LayoutPlan
from tigon.settings.config import MAX_TOKENS
from tigon.settings.plan import read_plan_settings
from tigon.train.memory import GIB
from tigon.train.model import meta_model
from tigon.utils.config import check_range

COLUMNS = (
    *("micro-batch size", "micro-batches", "recomputed", "GiB", "NVLink GB", "network GB"),
    *("network s", "step s", "tok/s/GPU", "MFU"),
)
MAX_GPUS, MAX_STEP_TOKENS = 2**18, 2**40  # beyond any cluster, and slow to search
MAX_REASONS = 6  # listed one by one


def read_job(
    model: str, gpus: int, gpu: str, seq_len: int, batch_tokens: int | None = None,
    settings: Sequence[str] = (),
) -> Job:  # fmt: skip
    """Returns the job of a directory, a hub repository or a config.json, reading only the config.

    `settings` are `tigon train`'s. A step has a row for each GPU unless `batch_tokens` says more.
    Raises ValueError and OSError for what cannot be planned.
    """
    tokens = gpus * seq_len if batch_tokens is None else batch_tokens
    check_range("--gpus", gpus, ge=1, le=MAX_GPUS)
    data_sheet, constants = find_gpu(gpu)
    check_range("--seq-len", seq_len, ge=2, le=MAX_TOKENS)
    name = "--batch-tokens (default: --gpus x --seq-len)"
    check_range(name, tokens, ge=1, le=MAX_STEP_TOKENS)
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        near = " or ".join(str(n) for n in (below, below + seq_len) if n)
        raise ValueError(f"--batch-tokens {tokens} is no multiple of {seq_len}: give {near}")
    if model.endswith(".json") and not Path(model).is_file():
        raise FileNotFoundError(f"no file {model}")
    config = read_plan_settings(model, settings)
    dtype = getattr(torch, config.param_dtype)
    on_meta = meta_model(config, dtype)
    if seq_len > (context := on_meta.config.max_position_embeddings):
        print(f"note: rows of {seq_len:,} tokens, and the model's context is {context:,}")
    shapes, rows = Shapes(on_meta.config, dtype), tokens // seq_len
    return Job(shapes, config, gpus, data_sheet, constants, seq_len, rows)


def format_plan(plan: LayoutPlan) -> str:
    """Returns the output of `tigon plan`."""
    job = plan.job
    model = job.shapes.shard()
    rows = format_count(job.batch_rows, "row")
    lines = [
        f"{model.config.transformers_class}, {job.shapes.counts().total:,} parameters, on "
        f"{job.gpus:,} x {job.gpu.name}; a step has {rows} of {job.seq_len:,} tokens, "
        f"{job.batch_rows * job.seq_len:,} in all",
        f"{job.config.param_dtype} weights, {job.config.optimizer}; "
        f"{plan.budget / GIB:.1f} GiB of a GPU for tensors",
    ]
    if job.shapes.experts:
        lines.append("experts are assumed to be balanced")
    if len(plan.choices) > 1:
        lines.append(
            f"step times within {100 * TIE:g} % of each other are ties, ranked by memory "
            "(errors of the model: docs/scale.md)"
        )
    table = table_rows(plan)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in table)]
    if not plan.choices:
        lines += ["no layout fits", *suggestions(plan)]
    else:
        best = plan.choices[0]
        largest = best.memory.kinds.items()
        memory = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest if size > GIB / 20)
        times = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in best.step.largest)
        settings = f"batch_size={job.batch_rows} seq_len={job.seq_len} {best.layout.settings}"
        days = 1e12 / (best.step.rate * job.gpus) / 86400
        lines += ["", f"the first: {settings}", f"  memory, GiB: {memory}", f"  seconds: {times}"]
        lines.append(f"  10^12 tokens: {days:,.1f} days")
    return "\n".join([*lines, "", *format_reasons(plan)])


def table_rows(plan: LayoutPlan) -> list[list[str]]:
    """Returns the table: its head and a row per choice, with `expert` for models with experts."""
    mesh = MESH if plan.job.shapes.experts else MESH[:-1]

    def cells(choice: LayoutChoice) -> list[str]:
        layout, step = choice.layout, choice.step
        zero = " ZeRO-2" if layout.sharding == "gradients" else ""
        return [
            *(f"{getattr(layout, name)}{zero if name == 'fsdp' else ''}" for name in mesh),
            str(layout.rows), str(layout.micro_batches),
            {False: "none", 2: "every 2nd", True: "all"}[layout.checkpointing],
            f"{choice.memory.total / GIB:.1f}", f"{step.traffic.nvlink_bytes / 1e9:,.1f}",
            f"{step.traffic.network_bytes / 1e9:,.1f}", f"{step.traffic.network:.3g}",
            f"{step.seconds:.3g}", f"{step.rate:,.0f}", f"{step.mfu(plan.job.gpu):.1%}",
        ]  # fmt: skip

    return [[*mesh, *COLUMNS], *map(cells, plan.choices)]


def format_reasons(plan: LayoutPlan) -> list[str]:
    """Returns lines that say why other layouts are impossible, the most frequent first."""
    if not plan.reasons:
        return []
    reasons = merge_rank_counts(plan.reasons)
    lines = ["layouts that are not possible:"]
    for reason, count in reasons.most_common(MAX_REASONS):
        if reason == LACKS:
            required, budget = (plan.lacking or 0) / GIB, plan.budget / GIB
            sizes = f"{required:,.0f} GiB per GPU at least, and {budget:.0f} are usable"
            reason = f"too little memory: {sizes}"
        lines.append(f"  {format_count(count, 'layout')}: {reason}")
    if len(reasons) > MAX_REASONS:
        rest = sum(count for _, count in reasons.most_common()[MAX_REASONS:])
        lines.append(f"  {format_count(rest, 'layout')}: other reasons")
    return lines


def suggestions(plan: LayoutPlan) -> list[str]:
    """Returns lines with changes of settings that may make a layout fit."""
    job, config = plan.job, plan.job.config
    if LACKS not in plan.reasons:
        return ["the reasons are below: change --gpus or --batch-tokens"]
    smaller = {"param_dtype": "bfloat16"} if config.param_dtype == "float32" else {}
    if config.optimizer in ("adamw", "adamw_bf16"):
        smaller["optimizer"] = "adamw_8bit"
    lines = ["what needs less memory per GPU:"]
    with suppress(ValueError):  # of settings that do not go with these
        replace(config, **smaller)  # type: ignore[arg-type]
        if smaller:
            lines.append("  --settings " + " ".join(f"{k}={v}" for k, v in smaller.items()))
    gpus, seq_len = f"--gpus above {job.gpus:,}", f"--seq-len below {job.seq_len:,}"
    lines.append(f"  more GPUs, {gpus}, or shorter rows, {seq_len}")
    if job.batch_rows > job.gpus:
        lines.append("  fewer rows in a step, --batch-tokens, so that no gradients accumulate")
    offload = "activation_offload=true and optimizer_offload=true"
    text = f"{offload}, which a plan does not model; --dry-run estimates them"
    return [*lines, f"  for `tigon train`: {text}"]


def merge_rank_counts(reasons: Counter[str]) -> Counter[str]:
    """Merges reasons that differ only in the number of ranks: "2, 4 ranks cannot ..."."""
    merged, ranks = Counter[str](), dict[str, list[int]]()
    for reason, count in reasons.items():
        match = re.fullmatch(r"(\d+)( ranks .*)", reason, re.S)
        rest = match[2] if match else reason
        merged[rest] += count
        ranks.setdefault(rest, []).extend([int(match[1])] if match else [])
    return Counter({", ".join(map(str, sorted(ranks[x]))) + x: merged[x] for x in merged})
