"""transformers' Trainer with a Tigon model beside a native loop, and beside transformers + Liger.

Shapes of Llama with random bf16 weights and torch's fused AdamW, rows of random tokens that are all
learned, no clipping. The native loop is forward, backward and the optimizer's step of a native
model with fused projections; each of the others is a run of Trainer, timed between its steps. In
each round all sides are built, trained and freed in turn; a ratio is the median over the rounds.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon
from bench import harness
from bench.compare_side import LLAMA_1B
from bench.harness import (
    Bench,
    Job,
    Record,
    figure,
    heading,
    installed,
    markdown,
    progress,
    verdict,
)
from bench.peers import random_model
from bench.train_cases import LLAMA_8B
from tests.support.small import LLAMA
from tigon.integrations.transformers import as_transformers

BEGIN = 5  # steps that are not timed
CASES: dict[str, tuple[Record, int, int]] = {  # config, rows of a step, tokens of a row
    "Llama-3.2-1B, 4 x 4096": (LLAMA_1B, 4, 4096),
    "Llama-3.1-8B, 1 x 4096": (LLAMA_8B, 1, 4096),
}
NATIVE, OURS, PEER = "native loop", "Trainer", "Trainer, Liger"
LEAST = {NATIVE: 0.97, PEER: 1.0}  # of each side's tokens per second


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(now())


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def native_model(config: Record, device: str) -> tigon.CausalLM:
    """A native model in bf16 with random weights."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return tigon.Llama.from_config(config, dtype=dtype, device=device)


def native_loop(config: Record, ids: torch.Tensor, device: str) -> list[float]:
    """The times of the steps of a loop of one's own."""
    model = native_model(config, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times = []
    for step in ids:
        batch = step.to(device, non_blocking=True)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
    return times


def trainer(model: Any, ids: torch.Tensor, liger: bool = False) -> list[float]:
    """The times of the steps of transformers' Trainer."""
    rows = [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=len(ids),
            per_device_train_batch_size=ids.shape[1],
            learning_rate=1e-5,
            max_grad_norm=0.0,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            use_liger_kernel=liger,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    return clock.times


def sides(config: Record, ids: torch.Tensor, device: str) -> dict[str, Callable[[], list[float]]]:
    """What makes the steps of each side; Liger's needs a GPU."""

    def ours() -> list[float]:
        return trainer(as_transformers(native_model(config, device)), ids)

    found: dict[str, Callable[[], list[float]]] = {
        NATIVE: lambda: native_loop(config, ids, device),
        OURS: ours,
    }
    if device == "cuda":
        found[PEER] = lambda: trainer(random_model("Llama", config, device), ids, liger=True)
    return found


def measured(case: str, job: Job) -> Record:
    """The tokens per second of every side in every round."""
    config, rows, tokens = CASES[case]
    device = "cuda"
    if job.options.tiny:
        config, rows, tokens, device = LLAMA, 2, 32, "cpu"
    steps = BEGIN + job.options.steps
    ids = torch.randint(config["vocab_size"], (steps, rows, tokens))
    found: Record = {"name": case, "commit": job.record["commit"], "sides": {}}
    for n in range(job.options.rounds):
        for name, run_side in sides(config, ids, device).items():
            progress(f"{case}, round {n + 1}: {name}")
            times = run_side()
            speed = job.options.steps * rows * tokens / (times[-1] - times[BEGIN - 1])
            found["sides"].setdefault(name, []).append(speed)
            gc.collect()
            torch.cuda.empty_cache()
    return found


def speed(case: Record, side: str) -> str:
    """The tokens per second of a side, if it was measured."""
    return figure(median(case["sides"][side]), 5) if side in case["sides"] else ""


def ratio(case: Record, other: str) -> float | None:
    """The tokens per second of Trainer over those of another side."""
    both = zip(case["sides"][OURS], case["sides"].get(other, ()), strict=False)
    return median([a / b for a, b in both]) if other in case["sides"] else None


def show(record: Record) -> str:
    rows = [
        [case["name"], case["commit"], *(speed(case, side) for side in (NATIVE, OURS, PEER))]
        for case in record["cases"]
    ]
    head = ["tokens/s", "commit", NATIVE, OURS, PEER]
    ends = [
        verdict(f"{case['name']}: tokens/s of {OURS} over {other}", ratio(case, other), least)
        for case in record["cases"]
        for other, least in LEAST.items()
    ]
    return "\n\n".join(
        [f"{heading(record, record['libraries'])}.", markdown(head, rows), "\n".join(ends)]
    )


def run(job: Job) -> str:
    job.record["machine"] = job.record.get("gpu", "CPU")
    packages = {"transformers": "transformers", "Liger": "liger-kernel", "triton": "triton"}
    job.record["libraries"] = {name: installed(package) for name, package in packages.items()}
    for case in job.only:
        job.append("cases", measured(case, job))
    return show(job.record)


OPTIONS = (
    ("--rounds", {"type": int, "default": 3}),
    ("--steps", {"type": int, "default": 20, "help": "steps that are timed"}),
    ("--tiny", {"action": "store_true", "help": "a tiny model on the CPU"}),
)
BENCH = Bench("neighbours", __doc__, run, show, list(CASES), "docs/neighbours.md", options=OPTIONS)

if __name__ == "__main__":
    harness.main(BENCH)
