"""transformers' Trainer with a Tigon model beside a native loop, and beside transformers + Liger.

Shapes of Llama with random bf16 weights, the same on all sides, torch's fused AdamW, and rows of
random tokens that are all learned. All sides clip gradients to a norm of 1, as Trainer does by
default; without clipping it computes the norm all the same and multiplies each gradient by 1. The
native loop is forward, backward, clipping and the optimizer's step of a native model with fused
projections; each of the others is a run of Trainer, timed between its steps. All sides have
flash-attn-4 where it is installed, else SDPA. The mean losses must agree. In each round all sides
are built, trained and freed in turn; a ratio is the median over the rounds.
"""

import gc
import tempfile
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon
from bench import timing
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, figure, installed, markdown, progress, report, verdict
from bench.peers import random_model
from bench.train_cases import LLAMA_8B, fill, fill_ours
from tests.support.small import LLAMA
from tigon.integrations.transformers import as_transformers

LIBRARIES = {"transformers": "transformers", "Liger": "liger-kernel", "triton": "triton"}
LIBRARIES["flash-attn-4"] = "flash-attn-4"
BEGIN = 5  # steps that are not timed
CASES: dict[str, tuple[Record, int, int]] = {  # config, rows of a step, tokens of a row
    "Llama-3.2-1B, 4 x 4096": (LLAMA_1B, 4, 4096),
    "Llama-3.1-8B, 1 x 4096": (LLAMA_8B, 1, 4096),
}
NATIVE, OURS, PEER = "native loop", "Trainer", "Trainer, Liger"
CLIP = 1.0  # the largest norm of gradients, Trainer's default
APART = 2e-3  # of mean losses
LEAST = {NATIVE: 0.97, PEER: 1.0}  # of each side's tokens per second


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(timing.now())


def native_model(config: Record, device: str) -> tigon.CausalLM:
    """A native model in bf16 with random weights."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = tigon.Llama.from_config(config, dtype=dtype, device=device)
    fill_ours(model)
    return model


def peer_model(config: Record, device: str, attention: str) -> Any:
    model = random_model("Llama", config, device, attention)
    fill(model.named_parameters())
    return model


Run = tuple[list[float], float]  # the times at the ends of steps, and the mean of their losses


def native_loop(config: Record, ids: torch.Tensor, device: str) -> Run:
    """A loop of one's own."""
    model = native_model(config, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, losses = [], []
    for step in ids:
        batch = step.to(device, non_blocking=True)
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.append(timing.now())
    return times, float(torch.stack(losses).mean())


def trainer(model: Any, ids: torch.Tensor, liger: bool = False) -> Run:
    """transformers' Trainer."""
    rows = [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=len(ids),
            per_device_train_batch_size=ids.shape[1],
            learning_rate=1e-5,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            use_liger_kernel=liger,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        done = Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
    return clock.times, done.training_loss


def sides(config: Record, ids: torch.Tensor, device: str) -> dict[str, Callable[[], Run]]:
    """What makes the steps of each side; Liger's kernels need a GPU."""
    gpu = device == "cuda"
    attention = "flash_attention_4" if gpu and installed("flash-attn-4") else "sdpa"
    return {
        NATIVE: lambda: native_loop(config, ids, device),
        OURS: lambda: trainer(as_transformers(native_model(config, device)), ids),
        PEER: lambda: trainer(peer_model(config, device, attention), ids, liger=gpu),
    }


def measured(case: str, job: Job) -> Record:
    """The tokens per second of every side in every round, and its mean loss."""
    config, rows, tokens = CASES[case]
    device = "cuda"
    if job.options.tiny:
        config, rows, tokens, device = LLAMA, 2, 32, "cpu"
    steps = BEGIN + job.options.steps
    ids = torch.randint(config["vocab_size"], (steps, rows, tokens))
    found: Record = {"name": case, "commit": job.record["commit"], "sides": {}, "losses": {}}
    for n in range(job.options.rounds):
        for name, run_side in sides(config, ids, device).items():
            progress(f"{case}, round {n + 1}: {name}")
            times, found["losses"][name] = run_side()
            speed = job.options.steps * rows * tokens / (times[-1] - times[BEGIN - 1])
            found["sides"].setdefault(name, []).append(speed)
            gc.collect()
            torch.cuda.empty_cache()
    return found


def speed(case: Record, side: str) -> str:
    """The tokens per second of a side, if it was measured."""
    return figure(median(case["sides"][side]), 5) if side in case["sides"] else ""


def differing(case: Record) -> list[str]:
    """A line if the sides have not learned alike."""
    losses = case.get("losses", {})
    if losses and max(losses.values()) > (1 + APART) * min(losses.values()):
        return [f"WRONG: {case['name']}: mean losses differ: {losses}"]
    return []


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
    ends += [line for case in record["cases"] for line in differing(case)]
    return report(record, markdown(head, rows), ends)


def run(job: Job) -> None:
    for case in job.only:
        job.append("cases", measured(case, job))


OPTIONS = (
    ("--rounds", {"type": int, "default": 3}),
    ("--steps", {"type": int, "default": 20, "help": "steps that are timed"}),
)
BENCH = Bench(
    run, show, list(CASES), "docs/neighbours.md", options=OPTIONS, libraries=LIBRARIES, tiny=True
)
