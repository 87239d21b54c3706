"""What auto chooses beside settings of one's own, in one run on one GPU.

Each case is a model and a batch as a user gives them, full rows of packed chats. Its first way
leaves everything to auto; the others set what auto could have chosen. A step is the trainer's own,
with clipping and bf16 weights and states where the case does not say otherwise. All ways go over
the same batches; the first steps compile, measure and capture, and those after them count. Memory
is what the allocator has reserved: tensors in the pool of graphs are allocated as these are
captured, before the steps that count. Each way is measured once, auto first, which so compiles for
all.
"""

import contextlib
import gc
import io
import json
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import harness, timing
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, failure, figure, markdown, progress, report, verdict
from bench.timing import peaks, reset_peaks
from bench.train_cases import LLAMA_8B
from bench.trainer import write_chats
from tests.support.small import LLAMA, write_tokenizer
from tigon.train import load, start
from tigon.train.build import TrainingRun, read_inputs
from tigon.train.cuda_graphs import Graphs
from tigon.train.distributed import World
from tigon.train.dry_run import random_run
from tigon.train.less_memory import within_memory
from tigon.train.trainer import forward_backward, update_weights

LEAST = 0.98  # of the tokens per second of the best way
AUTO = "auto"
BF16 = ("param_dtype=bfloat16", "optimizer=adamw_bf16")
LORA = ("lora.rank=16",)
OFF, ON = ("cuda_graphs=false",), ("cuda_graphs=true",)
ALL, NONE = ("activation_checkpointing=true",), ("activation_checkpointing=false",)
BATCHES = 4  # over which each way goes, as the steps of others take another time
SPOILED = "auto, with a block that asks the GPU"  # for a number, as no graph can


def rows(count: int, *more: str) -> tuple[str, ...]:
    return (f"micro_batch_size={count}", *more)


@dataclass(frozen=True)
class Case:
    """A model and a batch, the settings that a user gives, and those of each way besides."""

    model: Record
    rows: int
    tokens: int  # of a row
    given: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]


CASES = {
    "Llama-3.2-1B, 1 x 512": Case(
        LLAMA_1B, 1, 512, BF16, {AUTO: (), "no graphs": OFF, "graphs": ON, SPOILED: ()}
    ),
    "Llama-3.1-8B, 1 x 512, LoRA": Case(
        LLAMA_8B, 1, 512, LORA, {AUTO: (), "no graphs": OFF, "graphs": ON}
    ),
    "Llama-3.2-1B, 2 x 8192": Case(
        LLAMA_1B, 2, 8192, BF16,
        {AUTO: (), "2 rows": rows(2, *OFF), "1 row": rows(1, *OFF), "graphs": rows(2, *ON)},
    ),
    "Llama-3.2-1B, 8 x 2048, float32 weights": Case(
        LLAMA_1B, 8, 2048, (),
        {
            AUTO: (),
            "FSDP2, 8 rows": rows(8, "sharding=full"),
            "FSDP2, 1 row": rows(1, "sharding=full"),
            "ZeRO-2, 1 row": rows(1, "sharding=gradients", *OFF),
            "ZeRO-2, 1 row, graphs": rows(1, "sharding=gradients", *ON),
        },
    ),
    "Llama-3.1-8B, 1 x 8192": Case(
        LLAMA_8B, 1, 8192, BF16, {AUTO: (), "no block recomputed": rows(1, *NONE, *OFF)}
    ),
    "Llama-3.1-8B, 4 x 8192": Case(
        LLAMA_8B, 4, 8192, BF16,
        {
            AUTO: (),
            "2 rows": rows(2, *NONE, *OFF),
            "1 row": rows(1, *NONE, *OFF),
            "4 rows, fewest blocks recomputed": rows(4, *OFF),
            "4 rows, all blocks recomputed": rows(4, *ALL, *OFF),
            "auto, for 400 GiB": ("memory_budget=400",),
        },
    ),
}  # fmt: skip
TINY = LLAMA | {"max_position_embeddings": 2**14}


def settings(root: Path, case: Case, way: str, tiny: bool) -> list[str]:
    """Of tigon.train, for one way of a case."""
    model = root / "config.json"
    model.write_text(json.dumps(TINY if tiny else case.model))
    values = {
        "run_dir": tempfile.mkdtemp(dir=root),
        "init": model,
        "tokenizer": root / "tokenizer",
        "data": root / "chats.jsonl",
        "steps": 10_000,
        "seq_len": case.tokens // 16 if tiny else case.tokens,
        "batch_size": case.rows,
        "device": "cpu" if tiny else "cuda",
        "export": "false",
    }
    given = [f"{key}={value}" for key, value in values.items()]
    more = [*case.given, *case.ways[way]]
    if tiny:  # no GPU, and no graphs
        more = [setting for setting in more if setting != ON[0]]
        more += ["memory_budget=1"] * (way == AUTO)
    return [*given, *more]


def built(arguments: list[str], world: World) -> TrainingRun:
    """The run with random weights, as `tigon train` builds it."""
    inputs = read_inputs(load(None, arguments), world)
    torch.manual_seed(0)
    if inputs.choice is not None:
        print(inputs.choice, flush=True)
    return random_run(inputs, world)


def spoil(run: TrainingRun) -> None:
    """Lets a block wait for the GPU."""
    mlp: Any = run.model.model.layers[0].mlp
    forward = mlp.forward

    def wait(x: torch.Tensor, *args: Any) -> Any:
        assert float(x.detach().float().sum()) < 1e30
        return forward(x, *args)

    mlp.forward = wait


def step(run: TrainingRun, number: int) -> float:
    """A step of training; returns its loss."""
    values, scale = within_memory(run, number + 1, partial(forward_backward, run, number))
    update_weights(run, number, scale)
    run.optimizer.zero_grad()
    return values["loss"]


def count_graphs(run: TrainingRun) -> int | None:
    """The kinds of passes and the graphs that there are; None where it is not decided if there
    are to be any."""
    graphs = run.model.graphs
    if not isinstance(graphs, Graphs):
        return 0
    return None if graphs.meter is not None else len(graphs.learned) + len(graphs.captured)


def timed(run: TrainingRun, seconds: float) -> Record:
    """Steps over the same batches again and again, for so many seconds, once all are known."""
    losses, times, tokens = list[float](), list[float](), list[int]()
    began, known = time.perf_counter(), None
    while (count := count_graphs(run)) is None or not losses or count != known:
        known = count
        losses += [step(run, number) for number in range(BATCHES)]
    warm = timing.now() - began
    reset_peaks()
    while sum(times) < seconds:
        for number in range(BATCHES):
            start_time = time.perf_counter()
            losses.append(step(run, number))
            times.append(timing.now() - start_time)
            tokens.append(run.data.counts(number)[0])
    found: Record = {"losses": losses[:8], "steps": len(times), "warm_up_s": warm}
    found |= {"tokens_per_second": median_rate(times, tokens), "step_ms": 1e3 * median(times)}
    found |= peaks()
    found["graphs"] = len(run.model.graphs.captured) if known else 0
    found["rows"] = run.data.micro_batch_size
    return found


def median_rate(times: list[float], tokens: list[int]) -> float:
    """Tokens per second over all batches, each in its median time."""
    medians = [median(times[number::BATCHES]) for number in range(BATCHES)]
    return sum(tokens[:BATCHES]) / sum(medians)


@contextlib.contextmanager
def overheard() -> Iterator[list[str]]:
    """The lines that are printed, once the `with` block is done."""
    lines: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            yield lines
        finally:
            lines += text.getvalue().splitlines()


def measured(root: Path, case: Case, way: str, world: World, job: Job) -> Record:
    """A way's figures and what it said, or its error."""
    found: Record = {"name": way}
    tiny, run = job.options.tiny, None
    with overheard() as said:
        try:
            run = built(settings(root, case, way, tiny), world)
            if way == SPOILED:
                spoil(run)
            with run.prefetcher:
                found |= timed(run, 0.1 if tiny else job.options.each)
            torch.rand(4, device=world.device)  # its generator has survived
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            progress(traceback.format_exc(limit=-4))
        run = None
    found["said"] = [line for line in said if "chosen" in line or "auto" in line or "step" in line]
    gc.collect()
    torch.cuda.empty_cache()
    return found


def auto_ratio(case: Record) -> float | None:
    """Tokens per second of auto over those of the fastest way that sets what auto chooses."""
    speeds = {row["name"]: row.get("tokens_per_second") for row in case["ways"]}
    others = [speed for name, speed in speeds.items() if not name.startswith(AUTO) and speed]
    auto = speeds.get(AUTO)
    return auto / max(others) if auto and others else None


def losses_of(record: Record) -> str:
    """How far the first losses of a case's ways are apart, and how many steps were timed."""
    ways = [row for case in record["cases"] for row in case["ways"] if "loss_difference" in row]
    if not ways:
        return ""
    apart, steps = max(row["loss_difference"] for row in ways), [row["steps"] for row in ways]
    return (
        f"Losses of a case's first steps differ between ways by at most {apart:.1e} of their "
        f"value. Each way was measured once, over {min(steps)} to {max(steps)} steps."
    )


def repetitions(record: Record) -> str:
    """Cases in which auto has made the steps of another way: only noise is between the two."""
    found = []
    for case in record["cases"]:
        rows = {row["name"]: row for row in case["ways"] if "steps" in row}
        for name, row in rows.items() if AUTO in rows else ():
            if not name.startswith(AUTO) and is_same(row, rows[AUTO]):
                ratio = rows[AUTO]["tokens_per_second"] / row["tokens_per_second"]
                found.append(f"{case['name']}, {name}: {ratio:.3f}")
    said = "**Noise.** Where auto made the same steps as another way, its tokens/s over that way's "
    return f"{said}show how far two measurements differ: {'; '.join(found)}." if found else ""


def is_same(a: Record, b: Record) -> bool:
    """Whether two ways have the same micro-batches and graphs, and memory within 0.1 %."""
    keys = "rows", "graphs"
    sizes = a.get("allocated_gib", 0.0), b.get("allocated_gib", 0.0)
    return all(a[k] == b[k] for k in keys) and abs(sizes[0] - sizes[1]) <= 1e-3 * sizes[1]


def show(record: Record) -> str:
    lines, ends = [], []
    for case in record["cases"]:
        for row in case["ways"]:
            if "error" in row:
                lines.append([case["name"], row["name"], failure(row)])
                continue
            cells = [figure(row["tokens_per_second"], 5)]
            cells += [figure(row.get(key)) for key in ("step_ms", "reserved_gib", "warm_up_s")]
            said = [line.partition(": ")[2] for line in row["said"] if AUTO in row["name"]]
            lines.append([case["name"], row["name"], *cells, "; ".join(said)])
        what = f"{case['name']}: tokens/s of auto over the fastest way"
        ends.append(verdict(what, auto_ratio(case), LEAST))
    head = ["case", "way", "tokens/s", "ms per step", "reserved, GiB", "first steps, s"]
    head += ["what auto said"]
    notes = losses_of(record), repetitions(record)
    return report(record, markdown(head, lines), *notes, ends)


def run(job: Job) -> None:
    tiny = job.options.tiny
    cases: list[Record] = job.record.setdefault("cases", [])
    with tempfile.TemporaryDirectory() as directory, start("cpu" if tiny else "cuda") as world:
        root = Path(directory)
        write_tokenizer(root / "tokenizer")
        for name in job.only:
            case = CASES[name]
            size = case.tokens // 16 if tiny else case.tokens
            write_chats(root / "chats.jsonl", 12 * case.rows * max(size, 4096), size // 8)
            cases.append({"name": name, "ways": []})
            for way in case.ways:
                if time.perf_counter() - harness.BEGIN > job.options.seconds:
                    cases[-1]["ways"].append({"name": way, "error": "no time was left"})
                    continue
                progress(f"{name}: {way}")
                cases[-1]["ways"].append(measured(root, case, way, world, job))
                job.add(cases=cases)
    return show(add_loss_differences(job.record))


def add_loss_differences(record: Record) -> Record:
    """The record, with the difference of each way's first losses from those of the last way that
    has any, relative."""
    for case in record["cases"]:
        ways = [row for row in case["ways"] if row.get("losses")]
        for row in ways:
            pairs = zip(row["losses"], ways[-1]["losses"], strict=False)
            row["loss_difference"] = max(abs(a / b - 1) for a, b in pairs)
    return record


OPTIONS = (
    ("--seconds", {"type": float, "default": 600, "help": "after which no way begins"}),
    ("--each", {"type": float, "default": 2, "help": "seconds that a way is timed"}),
)
BENCH = Bench(run, show, list(CASES), "docs/performance.md", options=OPTIONS, tiny=True)
