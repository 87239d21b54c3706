"""`tigon plan`: from the command line to a table."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from tigon.data.examples import format_count
from tigon.train.config import Config
from tigon.train.config_file import load, pairs
from tigon.train.estimate.budget import GIB
from tigon.train.model import outline
from tigon.train.plan.gpu import find_gpu
from tigon.train.plan.layout import MESH, Job
from tigon.train.plan.search import LACKS, TIE, Choice, Plan
from tigon.train.plan.work import Shapes
from tigon.train.settings import LONGEST

HEAD = (
    *("micro-batch size", "micro-batches", "recomputed", "GiB", "NVLink GB", "network GB"),
    *("network s", "step s", "tok/s/GPU", "MFU"),
)

UNKNOWN = ("lora", "fp8", "activation_offload", "optimizer_offload", "ema_decay", "teacher")
MOST_GPUS, MOST_TOKENS = 2**18, 2**40  # of a plan: more than anybody has, and it takes long
REASONS = 6  # that are told one by one
LAYOUT = ("sharding", "micro_batch_size", "activation_checkpointing")  # settings of a layout
# Settings of which memory, time or whether a layout is allowed depend; all others are refused
USED = (
    *("revision", "param_dtype", "dtype", "cuda_graphs", "router_aux_loss_coef"),
    *("optimizer", "momentum", "nesterov", "parameter_groups", "stochastic_rounding"),
    *("accumulate_fp32", "optimizer_in_backward", "max_grad_norm"),
    *("loss_reduction", "logits_bytes"),
)
ARGUMENTS = {  # settings that the command has arguments for
    "model": "give it as the argument MODEL",
    "init": "give it as the argument MODEL",
    "seq_len": "give --seq-len T instead",
    "batch_size": "give --batch-tokens N instead, which is batch_size x seq_len",
}


def read_job(
    model: str,
    gpus: int,
    gpu: str,
    seq_len: int,
    batch_tokens: int | None = None,
    settings: Sequence[str] = (),
) -> Job:
    """`model`: a directory, a hub repository or a config.json, of which only the config is read.
    `settings` are `tigon train`'s. A step has a row for each GPU unless `batch_tokens` says more.

    Raises ValueError and OSError for what cannot be planned.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {gpus} must be 1 to {MOST_GPUS:,}")
    found, constants = find_gpu(gpu)
    tokens = gpus * seq_len if batch_tokens is None else batch_tokens
    for name, count, least in (("--seq-len", seq_len, 2), ("--batch-tokens", tokens, 1)):
        if count < least:
            raise ValueError(f"{name} {count} must be at least {least}")
    if seq_len > LONGEST:
        raise ValueError(f"--seq-len {seq_len} must be at most {LONGEST:,}")
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        near = " or ".join(str(n) for n in (below, below + seq_len) if n)
        raise ValueError(
            f"--batch-tokens {tokens} is no multiple of --seq-len {seq_len}: give {near}"
        )
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"{tokens:,} tokens in a step, by --batch-tokens or as --gpus x --seq-len: there may "
            f"be {MOST_TOKENS:,} at most"
        )
    if model.endswith(".json") and not Path(model).is_file():
        raise FileNotFoundError(f"no file {model}")
    where = f"init={model}" if Path(model).is_file() else f"model={model}"
    own = [where, "run_dir=run", "data=data", "task=pretrain", "tokenizer=tokenizer"]
    check_used(settings)
    config = load(None, [*settings, *own])
    check(config)
    dtype = getattr(torch, config.param_dtype)
    read = outline(replace(config, activation_checkpointing=False, memory_budget=None), dtype)
    if seq_len > (context := read.config.max_position_embeddings):
        print(f"note: rows of {seq_len:,} tokens, and the model's context is {context:,}")
    shapes, rows = Shapes(read.config, dtype), tokens // seq_len
    return Job(shapes, config, gpus, found, constants, seq_len, rows)


def check_used(settings: Sequence[str]) -> None:
    """Raises ValueError for settings that a plan would ignore."""
    for name, value in pairs(settings):
        first, given = name.partition(".")[0], f"--settings {name}={value}"
        if name in ARGUMENTS:
            raise ValueError(f"{given}: {ARGUMENTS[name]}")
        if first in MESH:
            raise ValueError(
                f"{given}: a plan tries every layout itself; leave it out (for `tigon train` it is "
                f"parallel.{name}={value})"
            )
        if first == "parallel":
            raise ValueError(f"{given}: a plan tries every layout itself; leave it out")
        if name in LAYOUT:
            raise ValueError(f"{given}: a plan tries its values itself; leave it out")
        # What is unknown there, `load` says
        if first in Config.__dataclass_fields__ and first not in (*USED, *UNKNOWN):
            raise ValueError(
                f"{given}: a plan does not use it; leave it out. It uses {', '.join(USED)}"
            )


def check(config: Config) -> None:
    """Raises ValueError for settings whose time nobody has measured for this."""
    if config.parallel not in (None, "auto"):
        raise ValueError("parallel: a plan finds the layout itself; leave it out")
    for name in UNKNOWN:
        if getattr(config, name):
            raise ValueError(f"{name}: its time is not modelled; leave it out")
    if config.dtype == "float32":
        raise ValueError("dtype=float32: only GEMMs in bfloat16 are modelled; leave it out")


def show(plan: Plan) -> str:
    """What a person reads."""
    job = plan.job
    model = job.shapes.part(1)
    count = sum(p.numel() for p in model.parameters())
    tokens = job.batch_rows * job.seq_len
    lines = [
        f"{model.config.transformers_class}, {count:,} parameters, on {job.gpus:,} x "
        f"{job.gpu.name}; a step has {format_count(job.batch_rows, 'row')} of "
        f"{job.seq_len:,} tokens, {tokens:,} in all",
        f"{job.config.param_dtype} weights, {job.config.optimizer}; "
        f"{plan.budget / GIB:.1f} GiB of a GPU for tensors",
        *["experts are assumed to be balanced"] * (job.shapes.experts > 0),
        *[
            f"step times within {100 * TIE:g} % of each other are ties, ranked by memory "
            "(errors of the model: docs/scale.md)"
        ]
        * (len(plan.choices) > 1),
        "",
        *table(rows_of(plan)),
    ]
    if not plan.choices:
        lines += ["no layout fits", *what_next(plan)]
    else:
        best = plan.choices[0]
        held = best.memory.kinds.items()
        kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in held if size > GIB / 20)
        times = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in best.step.largest)
        days = 1e12 / (best.step.rate * job.gpus) / 86400
        rows = f"batch_size={job.batch_rows} seq_len={job.seq_len}"
        lines += ["", f"the first: {rows} {best.layout.settings}", f"  memory, GiB: {kinds}"]
        lines += [f"  seconds: {times}", f"  10^12 tokens: {days:,.1f} days"]
    lines += ["", *why_not(plan)]
    return "\n".join(lines)


def rows_of(plan: Plan) -> list[list[str]]:
    """A head, and a row for each choice. A model without experts has no column for them."""
    mesh = MESH if plan.job.shapes.experts else MESH[:-1]
    return [[*mesh, *HEAD], *(cells(choice, mesh) for choice in plan.choices)]


def cells(choice: Choice, mesh: Sequence[str]) -> list[str]:
    layout, step = choice.layout, choice.step
    gpu = choice.gpu
    recomputed = {False: "none", 2: "every 2nd", True: "all"}[layout.checkpointing]
    zero = " ZeRO-2" if layout.sharding == "gradients" else ""
    return [
        *(f"{getattr(layout, name)}{zero if name == 'fsdp' else ''}" for name in mesh),
        str(layout.rows),
        str(layout.micro_batches),
        recomputed,
        f"{choice.memory.total / GIB:.1f}",
        f"{step.traffic.nvlink_bytes / 1e9:,.1f}",
        f"{step.traffic.network_bytes / 1e9:,.1f}",
        f"{step.traffic.network:.3g}",
        f"{step.seconds:.3g}",
        f"{step.rate:,.0f}",
        f"{step.mfu(gpu):.1%}",
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def why_not(plan: Plan) -> list[str]:
    """Why other layouts are impossible, the most frequent reasons first."""
    if not plan.reasons:
        return []
    reasons = alike(plan.reasons)
    lines = ["layouts that are not possible:"]
    for reason, count in reasons.most_common(REASONS):
        text = reason
        if reason == LACKS:
            least, there = ((size or 0) / GIB for size in (plan.lacking, plan.budget))
            text = (
                f"too little memory: {least:,.0f} GiB per GPU at least, and {there:.0f} are usable"
            )
        lines.append(f"  {format_count(count, 'layout')}: {text}")
    if len(reasons) > REASONS:
        rest = sum(count for _, count in reasons.most_common()[REASONS:])
        lines.append(f"  {format_count(rest, 'layout')}: other reasons")
    return lines


def what_next(plan: Plan) -> list[str]:
    """What may make a layout fit."""
    job, config = plan.job, plan.job.config
    if LACKS not in plan.reasons:
        return ["the reasons are below: change --gpus or --batch-tokens"]
    smaller = {"param_dtype": "bfloat16"} if config.param_dtype == "float32" else {}
    if config.optimizer in ("adamw", "adamw_bf16"):
        smaller["optimizer"] = "adamw_8bit"
    lines = ["what needs less memory per GPU:"]
    with suppress(ValueError):
        replace(config, **smaller)  # type: ignore[arg-type]
        given = " ".join(f"{name}={value}" for name, value in smaller.items())
        lines += [f"  --settings {given}"] * bool(smaller)
    lines.append(
        f"  more GPUs, --gpus above {job.gpus:,}, or shorter rows, --seq-len below {job.seq_len:,}"
    )
    if job.batch_rows > job.gpus:
        lines.append("  fewer rows in a step, --batch-tokens, so that no gradients accumulate")
    lines.append(
        "  for `tigon train`: activation_offload=true and optimizer_offload=true, which a "
        "plan does not model; --dry-run estimates them"
    )
    return lines


def alike(reasons: Counter[str]) -> Counter[str]:
    """Those of several numbers of ranks, "2 ranks cannot ...", as one: "2, 4 ranks cannot ..."."""
    found = Counter[str]()
    ranks: dict[str, list[int]] = {}
    for reason, count in reasons.items():
        number, between, why = reason.partition(" ranks ")
        same = between + why if between and number.isdecimal() else reason
        found[same] += count
        if same != reason:
            ranks.setdefault(same, []).append(int(number))
    numbers = {same: ", ".join(map(str, sorted(some))) for same, some in ranks.items()}
    return Counter({numbers.get(same, "") + same: count for same, count in found.items()})
