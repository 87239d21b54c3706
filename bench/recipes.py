"""The recipes of docs/preference.md and docs/adapters.md on a real model and real data.

SmolLM2-135M-Instruct, as examples/assets/smollm2.py builds it, through the command line of training
in one process; each run's command is shown.

dpo: configs/recipe_dpo.yaml on pairs of answers (examples/assets/preferences.py). All pairs are cut
into five parts; a run trains on four of them and is evaluated on the fifth, so that each pair is
held out once. Judged is the share of held-out pairs whose chosen answer has the higher reward, and
by how much it exceeds chance, 0.5; of 295 pairs chance alone has a standard error of 0.029. Other
learning rates are tried on the first part, and on the others while --limit leaves time.

lora: configs/recipe_lora.yaml on worked answers (examples/assets/gsm8k.py), and the same with all
parameters, each with several learning rates; judged is by how much the adapter's best perplexity on
held-out answers is above the best of full fine-tuning.

    python -m bench recipes                # minutes on a GPU
    python -m bench recipes --write-docs   # needs no GPU
"""

import math
import random
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.harness import ROOT, Bench, Job, Record, figure, heading, markdown, progress, verdict
from tigon.train import load, main
from tigon.train.logging import read_metrics

DPO, LORA = "dpo", "lora"
CONFIGS = {name: f"configs/recipe_{name}.yaml" for name in (DPO, LORA)}
PARTS = 5  # of the pairs
DPO_RATES = ("3.0e-6", "3.0e-5")  # beside the config's
RATES = {  # of the adapter, and of all parameters
    "LoRA": ("5.0e-4", "1.0e-3", "2.0e-3"),
    "all parameters": ("5.0e-5", "1.0e-4", "2.0e-4"),
}
CHANCE, MARGIN, ABOVE = 0.5, 0.10, 1.02
ACCURACY = "eval_rewards/accuracies"


class Runner:
    """Trains, and keeps what metrics.jsonl has of the evaluations."""

    def __init__(self, options: Any) -> None:
        self.options, self.count = options, 0

    def __call__(self, recipe: str, *settings: str) -> Record:
        """The first and the last evaluation; the run's files go."""
        run = self.options.runs / f"recipe-{recipe}-{self.count}"
        self.count += 1
        shutil.rmtree(run, ignore_errors=True)
        given = [f"model={self.options.model}", f"run_dir={run}", "resume=false", "export=false"]
        given += settings
        given += self.options.set or []
        command = [str(ROOT / CONFIGS[recipe]), *given]
        progress(f"tigon train {shlex.join([CONFIGS[recipe], *given])}")
        began = time.perf_counter()
        main(command)
        seconds = time.perf_counter() - began
        rows = read_metrics(run / "metrics.jsonl")
        shutil.rmtree(run)
        evaluations = [row for row in rows if "eval_loss" in row]
        steps = max(row["step"] for row in rows)
        return {"first": evaluations[0], "last": evaluations[-1], "steps": steps} | {
            "seconds": seconds,
            "curve": [row["eval_loss"] for row in evaluations],
        }


def parts_of(rows: Sequence[str]) -> list[list[str]]:
    """The lines in PARTS equal shares, drawn once."""
    drawn = random.Random(0).sample(list(rows), len(rows))
    return [drawn[i::PARTS] for i in range(PARTS)]


def write_parts(folder: Path, out: Path) -> list[tuple[Path, Path, int]]:
    """For each part the files of the others' pairs and of its own, and how many it has."""
    lines = [
        line
        for name in ("train.jsonl", "eval.jsonl")
        for line in (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    parts, files = parts_of(lines), []
    out.mkdir(parents=True, exist_ok=True)
    for i, held_out in enumerate(parts):
        train = [line for part in parts if part is not held_out for line in part]
        paths = out / f"train-{i}.jsonl", out / f"eval-{i}.jsonl"
        for path, some in zip(paths, (train, held_out), strict=True):
            path.write_text("".join(some), encoding="utf-8")
        files.append((*paths, len(held_out)))
    return files


def measure_dpo(job: Job, runner: Runner) -> None:
    options = job.options
    files = write_parts(options.preferences, options.runs / "pairs")
    usual = f"{load(ROOT / CONFIGS[DPO], []).lr:.1e}"
    arms = [(part, usual) for part in range(PARTS)]
    needed = len(arms) + len(DPO_RATES)
    arms += [(part, rate) for part in range(PARTS) for rate in DPO_RATES]
    until = time.monotonic() + options.limit
    for number, (part, rate) in enumerate(arms[: 2 if job.quick else None]):
        if number >= needed and time.monotonic() > until:
            progress("no time is left for more learning rates")
            return
        train, held_out, count = files[part]
        row = runner(DPO, f"data={train}", f"eval_data={held_out}", f"lr={rate}")
        row |= {"part": part, "lr": rate, "pairs": count, "usual": rate == usual}
        job.append(DPO, row)


def measure_lora(job: Job, runner: Runner) -> None:
    folder = job.options.gsm8k
    data = [f"data={folder / 'train.jsonl'}", f"eval_data={folder / 'eval.jsonl'}"]
    for kind, rates in RATES.items():
        also = [] if kind == "LoRA" else ["lora=null"]
        for rate in rates[: 1 if job.quick else None]:
            row = runner(LORA, *data, *also, f"lr={rate}")
            job.append(LORA, row | {"kind": kind, "lr": rate})


MEASURE = {DPO: measure_dpo, LORA: measure_lora}


def run(job: Job) -> None:
    options = job.options
    job.record |= {"libraries": {}}
    runner = Runner(options)
    for name in job.only:
        MEASURE[name](job, runner)


def usual(record: Record) -> list[Record]:
    """DPO's runs with the config's learning rate."""
    return [row for row in record.get(DPO, ()) if row["usual"]]


def accuracy(rows: Sequence[Record]) -> float | None:
    """Over all held-out pairs of the runs."""
    if not rows:
        return None
    right = sum(row["last"][ACCURACY] * row["pairs"] for row in rows)
    return right / sum(row["pairs"] for row in rows)


def best(record: Record, kind: str) -> float | None:
    """Perplexity of the best learning rate."""
    rows = [row for row in record.get(LORA, ()) if row["kind"] == kind]
    return min((math.exp(row["last"]["eval_loss"]) for row in rows), default=None)


def verdicts(record: Record, recipe: str) -> Iterator[str]:
    if recipe == DPO:
        whole = len(usual(record)) == PARTS
        reached = accuracy(usual(record)) if whole else None
        yield verdict("held-out reward accuracy", reached, CHANCE + MARGIN)
        return
    ours, full = (best(record, kind) for kind in RATES)
    ratio = ours / full if ours and full else None
    yield verdict("held-out perplexity of LoRA over full fine-tuning", ratio, ABOVE, most=True)


def show_dpo(record: Record) -> str:
    rows = []
    for row in record.get(DPO, ()):
        found, sign = row["last"], math.sqrt(0.25 / row["pairs"])
        cells = [f"{row['part'] + 1} of {PARTS}", row["lr"], str(row["steps"])]
        cells += [f"{found[ACCURACY]:.3f} ± {sign:.3f}", f"{found['eval_rewards/margins']:.3f}"]
        rows.append([*cells, f"{found['eval_loss']:.4f}", figure(row["seconds"])])
    head = ["held-out part", "lr", "steps", "reward accuracy", "reward margin", "loss", "seconds"]
    lines = [markdown(head, rows)]
    for rate in dict.fromkeys(row["lr"] for row in record.get(DPO, ())):
        same = [row for row in record[DPO] if row["lr"] == rate]
        if len(same) < PARTS:
            continue
        count = sum(row["pairs"] for row in same)
        margin = fmean(row["last"]["eval_rewards/margins"] for row in same)
        lines.append(
            f"lr {rate}{', as in the config' if same[0]['usual'] else ''}: {accuracy(same):.3f} of "
            f"{count} held-out pairs have the chosen answer's reward above the rejected one's "
            f"(chance: {CHANCE} ± {math.sqrt(0.25 / count):.3f}); the mean margin is {margin:.3f}."
        )
    return "\n\n".join([*lines, *verdicts(record, DPO)])


def show_lora(record: Record) -> str:
    rows = []
    for row in record.get(LORA, ()):
        before, after = (math.exp(row[when]["eval_loss"]) for when in ("first", "last"))
        cells = [row["kind"], row["lr"], str(row["steps"]), f"{before:.3f}", f"{after:.3f}"]
        rows.append([*cells, figure(row["seconds"])])
    head = ["trained", "lr", "steps", "held-out perplexity before", "after", "seconds"]
    return "\n\n".join([markdown(head, rows), *verdicts(record, LORA)])


SHOWN = {DPO: show_dpo, LORA: show_lora}


def titled(record: Record, recipe: str) -> str:
    return f"{heading(record)}.\n\n{SHOWN[recipe](record)}"


def show(record: Record) -> str:
    return "\n\n".join(titled(record, recipe) for recipe in SHOWN if recipe in record)


def blocks(record: Record) -> dict[str, str]:
    return {"docs/preference.md": titled(record, DPO), "docs/adapters.md": titled(record, LORA)}


ASSETS = Path(".assets")
OPTIONS = (
    ("--model", {"default": ASSETS / "smollm2-135m-instruct", "help": "default: %(default)s"}),
    ("--preferences", {"type": Path, "default": ASSETS / "preferences", "help": "a folder"}),
    ("--gsm8k", {"type": Path, "default": ASSETS / "gsm8k", "help": "a folder"}),
    ("--runs", {"type": Path, "default": Path("runs"), "help": "where runs are, while they last"}),
    ("--set", {"action": "append", "help": "a further setting of all runs, such as steps=2"}),
    ("--limit", {"type": float, "default": 100.0, "help": "seconds for pairs, if they are enough"}),
)
BENCH = Bench(run, show, (DPO, LORA), blocks=blocks, options=OPTIONS, tiny=True)
