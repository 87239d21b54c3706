"""What tasks lose with fp8: two recipes of bench/recipes.py on a real model, with three seeds.

dpo: configs/recipe_dpo.yaml, and the share of held-out pairs whose chosen answer has the higher
reward; each of the five parts of the pairs is held out once. sft: configs/recipe_lora.yaml with all
parameters, and the share of tokens of held-out answers that are the most probable ones. A seed
orders the rows, and runs in fp8 have those of bf16. Evaluations compute in bf16, as exported models
do. Judged are the means over the seeds: not below the lowest of bf16's seeds.

    python -m bench fp8_recipes                  # minutes on a GPU
    python -m bench fp8_recipes --only "seed 1"  # a part, for runs side by side
"""

from statistics import fmean
from typing import Any

from bench.fp8_curves import BF16, FP8, SEEDS
from bench.harness import Bench, Job, Record, markdown, report, verdict
from bench.recipes import DPO, LORA, OPTIONS, Runner, accuracy, write_parts

SETTINGS = {BF16: (), FP8: ("fp8=true",)}
RUNS = {f"{kind}, seed {seed}": (kind, seed) for seed in SEEDS for kind in SETTINGS}
SFT, LR = "sft", "1.0e-4"  # the middle of bench/recipes.py's rates for all parameters
DATA = {"data": "train", "eval_data": "eval"}
TASKS = {DPO: "pairs whose chosen answer has the higher reward", SFT: "tokens of answers"}


def measure(job: Job, runner: Runner, kind: str, seed: int) -> Record:
    """The last evaluations of one seed: of each part of the pairs, and of the answers."""
    options, common = job.options, (f"seed={seed}", *SETTINGS[kind])
    pairs = write_parts(options.preferences, options.runs / "pairs")
    parts = []
    for train, held_out, count in pairs[: 1 if job.quick else None]:
        row = runner(DPO, f"data={train}", f"eval_data={held_out}", *common)
        parts.append({"last": row["last"], "pairs": count})
    data = [f"{name}={options.gsm8k / file}.jsonl" for name, file in DATA.items()]
    row = runner(LORA, *data, "lora=null", f"lr={LR}", *common)
    return {DPO: parts, SFT: row["last"], "steps": row["steps"]}


def run(job: Job) -> None:
    job.record |= {"libraries": {}, "runs": {}}
    runner = Runner(job.options)
    for name in job.only:
        found = {name: measure(job, runner, *RUNS[name])}
        job.add(runs=job.record["runs"] | found)


def shares(record: Record, task: str, kind: str) -> list[float]:
    """What each seed of a kind got right."""
    found = [record["runs"][n] for n, (of, _) in RUNS.items() if of == kind and n in record["runs"]]
    if task == SFT:
        return [row[SFT]["eval_accuracy"] for row in found]
    return [share for row in found if (share := accuracy(row[DPO])) is not None]


def show(record: Record) -> str:
    rows = []
    for name, row in record["runs"].items():
        margin = fmean(part["last"]["eval_rewards/margins"] for part in row[DPO])
        cells: list[Any] = [f"{accuracy(row[DPO]):.3f}", f"{margin:.3f}"]
        rows.append(
            [name, *cells, f"{row[SFT]['eval_accuracy']:.4f}", f"{row[SFT]['eval_loss']:.4f}"]
        )
    head = ["run", f"dpo: {TASKS[DPO]}", "mean margin", f"sft: {TASKS[SFT]}", "loss"]
    lines = []
    for task, what in TASKS.items():
        known, own = (shares(record, task, kind) for kind in SETTINGS)
        whole = len(known) == len(own) == len(SEEDS)
        mean, lowest = (fmean(own), min(known)) if whole else (None, None)
        text = f"{task}, share of {what}: mean of fp8's seeds over the lowest of bf16's"
        lines.append(verdict(text, mean / lowest if mean and lowest else None, 1.0))
    return report(record, markdown(head, rows), lines)


BENCH = Bench(run, show, list(RUNS), "docs/performance.md", options=OPTIONS[:-1], tiny=True)
