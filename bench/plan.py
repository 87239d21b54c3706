"""The model of time and memory of `tigon plan` beside what was measured, and what it is fitted to.

The rates of GEMMs, attention, memory-bound kernels and optimizer are fitted to the kinds of work in
the profiled steps of bench/results/train_step-nvidia-h200.json, but that of head dim 512 to its
kernels alone; attention's fixed time per query to steps over length in cost_curves-nvidia-
h200.json; the rate of the gated delta rule is of its kernels in gated_delta-nvidia-h200.json;
latency and rate of NVLink are fitted to collectives-nvidia-h200.json; the share of FSDP's
collectives that a step waits for to the two ways of sharing in parallel-nvidia-h200.json.
tigon/plan/constants.json has them all and is written here alone, with --fit. To parallel-
nvidia-h100-80gb-hbm3.json only the time of shared experts is fitted; other sides of both tell how
well the rates carry over to other layouts and to another GPU, and bench/scaling.py to four.
--write-docs puts the tables into docs/scale.md. No GPU is needed.

    python -m bench plan [--fit] [--write-docs]
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import scaling
from bench.cost_points import POINTS, SIZES, Point
from bench.harness import RESULTS, Record, figure, markdown, save, write_docs
from bench.layouts import EXPERTS, LLAMA_8B
from bench.layouts_side import TIGON
from bench.plan_scenarios import GPU, SCENARIOS, planned, scenario
from bench.train_cases import CASES, MODELS, OURS, settings
from tigon.models import MODELS as FAMILIES
from tigon.plan import Constants, Job, Layout, Shapes, estimate_memory, find_gpu
from tigon.plan.cost import BF16, Step, delta_operations, estimate_step
from tigon.plan.gpu import CONSTANTS
from tigon.train import load

OTHER = "h100"  # its constants are by its data sheet
MACHINES = {GPU: "nvidia-h200", OTHER: "nvidia-h100-80gb-hbm3"}
SETTINGS = ["param_dtype=bfloat16", "optimizer=adamw_bf16", "model=none", "run_dir=none"]
SETTINGS += ["data=none", "task=pretrain", "tokenizer=none"]
# Other rates than those of plain steps: of fp8, of adapters, of rows too short for a GPU, of chats
LEFT_OUT = ("LoRA", "QLoRA", "fp8", "ragged", "1 x 512")
FITTED = ("Llama", "Qwen3-", "Gemma3")  # models whose steps have flash-attn-4 and no recurrence
# Assumed, until several hosts are measured; four H200s, 1 GiB, all-reduce: 335 to 345 GB/s
ASSUMED: dict[str, Any] = {"nvlink_many": 340e9, "network_share": 0.8, "hop": 5e-6}


@dataclass(frozen=True)
class Measured:
    """A step, or several ranks' steps."""

    name: str
    model: str  # of MODELS
    rows: int
    tokens: int
    layout: Layout
    ms: float
    gib: float
    profile: Mapping[str, float]
    settings: tuple[str, ...] = ()  # of tigon.train
    gpu: str = GPU
    fitted: bool = True  # to it, too
    sums: torch.dtype | None = None  # as in `estimate_step`

    def step(self, constants: Constants) -> Step:
        """As planned."""
        return estimate_step(self.job(constants), self.layout, sums=self.sums)

    def job(self, constants: Constants) -> Job:
        family, _, values = MODELS[self.model]
        gpu, _ = find_gpu(self.gpu)
        constants = constants.scale(gpu, find_gpu(GPU)[0])
        read = next(f for f in FAMILIES.values() if f.__name__ == family).config_class
        shapes = Shapes(read.from_dict(values), torch.bfloat16)
        config = load(None, [*SETTINGS, "max_grad_norm=0", *self.settings])
        rows = self.rows * self.layout.data
        return Job(shapes, config, self.layout.ranks, gpu, constants, self.tokens, rows)


def results(name: str, gpu: str = GPU) -> Record:
    return json.loads((RESULTS / f"{name}-{MACHINES[gpu]}.json").read_text())


def measured() -> list[Measured]:
    """All steps that predictions are compared with."""
    return [*steps(), *curves()]


def steps() -> list[Measured]:
    """On one, two and four GPUs, most with rows of 8,192 tokens."""
    found = []
    for row in results("train_step")["cases"]:
        case, rounds = CASES[row["name"]], row["rounds"].get("tigon")
        case = replace(case, settings=tuple(row["settings"]))  # those of the record
        if not rounds or any(word in row["name"] for word in LEFT_OUT):
            continue
        recompute = settings(case, OURS).activation_checkpointing
        layout = Layout(rows=case.rows, checkpointing=recompute)
        ms, gib = (f([r[k] for r in rounds]) for f, k in ((median, "ms"), (max, "allocated_gib")))
        fitted = case.model.startswith(FITTED)
        profile = row["profile"]["tigon"] if fitted else {}
        given = case.model, case.rows, case.tokens, layout, ms, gib, profile
        found.append(Measured(row["name"], *given, case.settings, fitted=fitted))
    sides = results("parallel")["sides"]
    (run,) = {row["run"] for row in sides["tigon, FSDP2"]}
    for name, ways in {
        "tigon, one GPU": Layout(1, 1, 1, 1),
        "tigon, FSDP2": Layout(1, 2, 1, 1),
        "tigon, sharding=gradients": Layout(1, 2, 1, 1, sharding="gradients"),
    }.items():
        rows = [row for row in sides[name] if row["run"] == run]
        ms, gib = (f(r[k] for r in rows) for f, k in ((median, "ms"), (max, "allocated_gib")))
        what = name.removeprefix("tigon, ").removeprefix("one GPU")
        label = f"Llama-3.1-8B 1 x 8192, {what or 'the trainer'}"
        gpus = f" on {ways.data} GPUs" if ways.data > 1 else ""
        given = "Llama-3.1-8B", 1, 8192, ways, ms, gib, {}
        # FSDP2 then summed two ranks' gradients in float32, too
        found.append(Measured(label + gpus, *given, sums=torch.float32))
    return [*found, *divided(), *scaled()]


LAYERS = f"{MODELS[EXPERTS][2]['num_hidden_layers']} layers"  # of all that the latter has
# Of bench/parallel.py: GPU, model, layout, tokens of a row. Left out are sides whose communication
# is another one today
EXPERT = "experts, expert"  # the share of the layers that `shared_experts` is
DIVIDED = (
    ("one GPU, a row of 16,384", GPU, LLAMA_8B, Layout(), 16384, "1 GPU"),
    ("context", GPU, LLAMA_8B, Layout(context=2), 8192, "context=2 on 2 GPUs"),
    ("one GPU", OTHER, LLAMA_8B, Layout(), 8192, "1 GPU"),
    ("tensor", OTHER, LLAMA_8B, Layout(tensor=2), 8192, "tensor=2 on 2 GPUs"),
    ("context", OTHER, LLAMA_8B, Layout(context=2), 8192, "context=2 on 2 GPUs"),
    ("context, a row of 16,384", OTHER, LLAMA_8B, Layout(context=2), 16384, "context=2 on 2 GPUs"),
    ("experts, FSDP2", OTHER, EXPERTS, Layout(fsdp=2), 8192, "FSDP2 on 2 GPUs"),
    (EXPERT, OTHER, EXPERTS, Layout(fsdp=2, expert=2), 8192, "expert=2 on 2 GPUs"),
    (EXPERT, GPU, EXPERTS, Layout(fsdp=2, expert=2), 8192, "expert=2 on 2 GPUs"),
)


def divided() -> list[Measured]:
    return [_divided(*way) for way in DIVIDED]


def _divided(side: str, gpu: str, model: str, layout: Layout, tokens: int, said: str) -> Measured:
    rows = results("parallel", gpu)["sides"][f"tigon, {side}"]
    ms = median(row["ms"] for row in rows)
    gib = max(row["allocated_gib"] for row in rows)
    of = f"{model}, {LAYERS}," if model == EXPERTS else model
    label = f"{of} 1 x {tokens}, {said}, {gpu.upper()}"
    fitted = side == EXPERT and gpu == OTHER
    return Measured(label, model, 1, tokens, layout, ms, gib, {}, gpu=gpu, fitted=fitted)


def scaled() -> list[Measured]:
    """Tigon's steps in bf16 of bench/scaling.py, if they have been measured."""
    if not (RESULTS / f"scaling-{MACHINES[GPU]}.json").exists():
        return []
    record, found = results("scaling"), []
    for name, side in scaling.SIDES.items():
        rows = [row for row in record["sides"].get(name, ()) if "ms" in row]
        if side.kind != TIGON or side.fp8 or not rows:
            continue
        of = f"{side.model}, {LAYERS}," if side.model == EXPERTS else side.model
        label = f"{of} {side.layout.rows} x {side.tokens}, {name.removeprefix('experts, ')}"
        ms, gib = (f(r[k] for r in rows) for f, k in ((median, "ms"), (max, "allocated_gib")))
        given = side.model, side.layout.rows, side.tokens, side.layout, ms, gib, {}
        found.append(Measured(label, *given, fitted=False))
    return found


def curves() -> list[Measured]:
    """Steps of bench/cost_curves.py, with rows of 1,024 to 131,072 tokens."""
    ours = [row for row in results("cost_curves")["points"] if row["side"] == "tigon"]
    found = {row["name"]: (row["ms"], row["allocated_gib"]) for row in ours if "ms" in row}
    return [at_point(point, *found[point.name]) for point in POINTS if point.name in found]


def at_point(point: Point, ms: float, gib: float) -> Measured:
    """A point of those curves. The one model that they have over length is fitted to."""
    given = point.model, point.rows, point.tokens, Layout(rows=point.rows), ms, gib, {}
    fitted = point.model == SIZES[0]
    return Measured(f"{point.name}, cost curves", *given, point.case.settings, fitted=fitted)


def fit() -> Constants:
    """From the results."""
    cases, start = steps(), Constants.read()
    works = {c.name: (c, c.job(start)) for c in cases if c.profile}
    rows, times, moved, moved_ms, adam = [], [], 0.0, 0.0, []
    heads: list[Attention] = []
    forward = forwards(results("train_step"))
    for case, job in works.values():
        layout, profile = case.layout, case.profile
        work = job.shapes.work(layout.rows, case.tokens, recomputed=layout.recomputed)
        shape = [
            (n * 2 * a * b * c, n * BF16 * (a * b + b * c + a * c))
            for (a, b, c), n in work.products.items()
        ]
        ms = profile["matrix products"]
        if work.grouped:
            grouped = case, shape, work.grouped
        else:
            rows.append([sum(f for f, _ in shape) / ms, sum(b for _, b in shape) / ms])
            times.append(1e-3)
        again = 1 + layout.recomputed * forward
        operations = {key: o * again for key, o in work.attention.items()}
        heads.append((operations, profile["attention"] / 1e3))
        moved += sum(work.moved.values())
        moved_ms += profile["fused kernels"]
        adam.append(
            7
            * BF16
            * sum(p.numel() for p in job.shapes.shard(1).parameters())
            / profile["optimizer"]
            * 1e3
        )
    # Relative errors of all steps' products, in the mean
    inverse, _, _, _ = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)
    products, product_bytes = (float(1 / x) for x in inverse)
    case, shape, operations = grouped
    dense = sum(f / products + b / product_bytes for f, b in shape)
    heads.append(wide_attention(cases, start))
    latency, nvlink = link(results("collectives"))
    constants = Constants(
        products=products,
        product_bytes=product_bytes,
        grouped=operations / (case.profile["matrix products"] / 1e3 - dense),
        attention={},
        attention_keys=0.0,
        attention_forward=forward,
        recurrence=delta_rate(results("gated_delta")),
        passes=moved / moved_ms * 1e3,
        optimizer=median(adam),
        rest=0.0,
        nvlink=nvlink,
        latency=latency,
        exposed=0.0,
        exposed_once=0.0,
        shared_experts=0.0,
        **ASSUMED,
    )
    keys = query_keys([case for case in curves() if case.fitted], constants)
    constants = replace(constants, attention=attention_rates(heads, keys), attention_keys=keys)
    alone = [c for c in cases if c.fitted and c.layout.ranks == 1]
    rest = median(c.ms / 1e3 / c.step(constants).seconds - 1 for c in alone)
    constants = replace(constants, rest=max(0.0, rest))
    several = {c.layout.sharding: c for c in cases if c.fitted and c.layout.fsdp > c.layout.expert}
    shares = {name: lost(case, constants) for name, case in several.items()}
    constants = replace(constants, exposed=shares["full"], exposed_once=shares["gradients"])
    (shared,) = (c for c in cases if c.fitted and c.layout.expert > 1)
    layers = MODELS[EXPERTS][2]["num_hidden_layers"]
    return replace(
        constants, shared_experts=(shared.ms / 1e3 - shared.step(constants).seconds) / layers
    )


# Operations, by head dim and the keys that a query sees, and the seconds that they take
Attention = tuple[Mapping[tuple[int, float], float], float]


def query_keys(cases: Iterable[Measured], constants: Constants) -> float:
    """The fixed time of a query, in keys: from steps of one model over length, the time that work
    other than attention leaves is split into a part per key and a part per query."""
    rows, times = [], []
    for case in cases:
        job, unlimited = case.job(constants), {"1": float("inf")}
        ((_, keys), operations), *_ = job.shapes.work(case.rows, case.tokens).attention.items()
        seconds = case.step(replace(constants, attention=unlimited)).seconds
        rows.append([operations / case.ms, operations / keys / case.ms])
        times.append(1 - 1e3 * seconds / case.ms)
    # Relative errors of the steps, in the mean
    (per_key, per_query), _, _, _ = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)
    return float(per_query / per_key)


def attention_rates(measured: Iterable[Attention], query_keys: float) -> dict[str, float]:
    """Operations per second with many keys, by head dim."""
    operations, seconds = Counter[str](), Counter[str]()
    for found, took in measured:
        for (dim, keys), number in found.items():
            operations[str(dim)] += number * (1 + query_keys / keys)
        seconds[str(dim)] += took
    return {dim: operations[dim] / seconds[dim] for dim in sorted(operations)}


def wide_attention(cases: Iterable[Measured], start: Constants) -> Attention:
    """Passes of the head dim that our own kernel is for, alone: no fitted model has it."""
    rows = {row["name"]: row.get("limit", {}) for row in results("train_step")["cases"]}
    for case in cases:
        passes = [
            a for a in rows.get(case.name, {}).get("attention", ()) if a["backend"] == "triton"
        ]
        if passes:
            work = case.job(start).shapes.work(case.layout.rows, case.tokens)
            widest = max(work.attention)
            return {widest: work.attention[widest]}, sum(a["ms"] for a in passes) / 1e3
    raise ValueError("no step in train_step's record has attention by our own kernel")


def delta_rate(record: Record) -> float:
    """Operations per second of the delta rule, forward and backward of a row."""
    tokens, heads, dim = 8192, 32, 128
    took = record["times"][f"1 x {tokens}"]
    operations = sum(delta_operations(dim, dim)) * tokens * heads
    return operations / (took["forward"] + took["backward"]) * 1e3


def lost(case: Measured, constants: Constants) -> float:
    """The share of the time of FSDP's collectives over NVLink that the step takes longer."""
    step = case.step(replace(constants, exposed=1.0, exposed_once=1.0))
    return 1 - (step.seconds - case.ms / 1e3) / step.kinds["FSDP over NVLink"]


def forwards(record: Record) -> float:
    """The share of the forward in attention's time, alone."""
    rows = [a for c in record["cases"] for a in c.get("limit", {}).get("attention", ())]
    return median(row["forward"] / row["both"] for row in rows)


def link(record: Record) -> tuple[float, float]:
    """Seconds that a small collective takes, and bytes a second that a GPU receives in a large
    one, of all-gather and reduce-scatter."""
    ranks = int(record["machine"].split()[0])
    small, rates = [], []
    for name in ("all-gather", "reduce-scatter"):
        found = {int(size): seconds for size, seconds in record[name].items()}
        small.append(found[min(found)])
        most = max(found)
        rates.append(most * (ranks - 1) / ranks / (found[most] - found[min(found)]))
    return median(small), median(rates)


@dataclass(frozen=True)
class Compared:
    """Seconds and GiB that were predicted, over what was measured, less 1."""

    case: Measured
    seconds: float
    gib: float

    @property
    def time_error(self) -> float:
        return 1e3 * self.seconds / self.case.ms - 1

    @property
    def memory_error(self) -> float:
        return self.gib / self.case.gib - 1


def compare(case: Measured, constants: Constants) -> Compared:
    job = case.job(constants)
    gib = estimate_memory(job, case.layout).total / 2**30
    return Compared(case, case.step(constants).seconds, gib)


def comparison(found: Iterable[Compared]) -> str:
    head = ("step", "measured ms", "predicted ms", "error")
    head += ("measured GiB", "predicted GiB", "error", "fitted")
    rows = [
        [
            *(
                c.case.name,
                figure(c.case.ms, 4),
                figure(1e3 * c.seconds, 4),
                f"{c.time_error:+.1%}",
            ),
            *(figure(c.case.gib), figure(c.gib), f"{c.memory_error:+.1%}"),
            "yes" if c.case.fitted else "no",
        ]
        for c in found
    ]
    return markdown(head, rows)


def rates(k: Constants) -> str:
    """What constants.json says, beside the data sheet."""
    gpu, _ = find_gpu(GPU)

    def row(what: str, value: float, sheet: float, source: str) -> list[str]:
        return [what, figure(value / 1e12), figure(sheet / 1e12), source]

    attention = [
        row(f"attention with many keys, head_dim {d}, TFLOP/s", rate, gpu.flops, "fitted, 1 GPU")
        for d, rate in k.attention.items()
    ]
    fixed = "attention, fixed time of a query, in keys"
    attention.append([fixed, figure(k.attention_keys), "", "fitted, 1 GPU"])
    rows = [
        row("GEMMs, TFLOP/s", k.products, gpu.flops, "fitted, 1 GPU"),
        row("grouped GEMMs of experts, TFLOP/s", k.grouped, gpu.flops, "fitted, 1 GPU"),
        *attention,
        row("gated delta rule, TFLOP/s", k.recurrence, gpu.flops, "its kernels alone"),
        row("memory-bound kernels, TB/s", k.passes, gpu.bandwidth, "fitted, 1 GPU"),
        row("optimizer, TB/s", k.optimizer, gpu.bandwidth, "fitted, 1 GPU"),
        row("NVLink, from one GPU, TB/s", k.nvlink, gpu.nvlink, "collectives on 2 GPUs"),
        row(
            "NVLink, from several, TB/s",
            k.nvlink_many,
            gpu.nvlink,
            "all-reduce on 4 GPUs, not in a record",
        ),
        row("network, TB/s", k.network_share * gpu.network, gpu.network, "assumed"),
    ]
    more = [
        ["latency of a collective within a host, µs", figure(k.latency * 1e6), "", "2 GPUs"],
        ["further latency per additional host, µs", figure(k.hop * 1e6), "", "assumed"],
        ["exposed share of FSDP's NVLink time", figure(k.exposed), "", "fitted, 2 GPUs"],
        ["the same with `sharding=gradients`", figure(k.exposed_once), "", "fitted, 2 GPUs"],
        ["other work, as a share of the kinds above", figure(k.rest), "", "fitted, 1 GPU"],
        [
            "shared experts, for each layer and micro-batch, ms",
            figure(1e3 * k.shared_experts),
            "",
            "fitted, 2 H100",
        ],
    ]
    return markdown(("constant", "value", "data sheet", "source"), [*rows, *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fit", action="store_true", help="write tigon/plan/constants.json")
    parser.add_argument("--write-docs", action="store_true", help="of docs/scale.md")
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS), choices=SCENARIOS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    constants = fit()
    if options.fit:
        save(CONSTANTS, {"gpu": GPU, "fitted_by": "bench/plan.py", "constants": asdict(constants)})
    blocks = {"errors": comparison(compare(case, constants) for case in measured())}
    blocks["rates"] = rates(constants)
    print("\n\n".join(blocks.values()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            blocks[name] = scenario(planned(name, Path(folder)))
            print(f"\n{name}\n{blocks[name]}", flush=True)
    if options.write_docs:
        for name, block in blocks.items():
            write_docs({"docs/scale.md": block}, f"plan-{name}")


if __name__ == "__main__":
    main()
