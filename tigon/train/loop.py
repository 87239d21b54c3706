"""The training loop, from top to bottom."""

import math
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from tigon.train import checkpoint, resume
from tigon.train.build import Run
from tigon.train.objectives import Inputs, Part
from tigon.train.optim import clip_gradients, learning_rate
from tigon.train.parallel import World, reshard, sync_gradients
from tigon.train.record import Record


def train(run: Run) -> int:
    """To the last step, or until SIGTERM or SIGINT: then a checkpoint. Returns the exit code."""
    config, world, start, steps = run.config, run.world, run.start, run.steps
    directory = Path(config.run_dir)
    if start >= steps and (directory / "hf").exists():
        world.say(f"{directory} is finished: nothing left to do")
        return 0
    facts = resume.facts(config, run.data)
    run.objective.begin(run.model)
    record = Record(config, world, start, steps)
    if start == 0 and config.eval_every:
        evaluate(run, 0, record)
    with signals() as received:
        for step in range(start, steps):
            began, done = time.perf_counter(), step + 1
            lr = learning_rate(config, step, steps)
            values = backward(run, step, stop=bool(received))
            stop, loss, grad_norm = values.pop("stop") > 0, values["loss"], values["grad_norm"]
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise FloatingPointError(diagnosis(run, step, loss, grad_norm))
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            run.optimizer.step()
            run.optimizer.zero_grad()

            tokens, targets = run.data.counts(step)
            seconds = time.perf_counter() - began
            record.step(
                {
                    "step": done,
                    "epoch": done / run.data.steps_per_epoch,
                    "lr": lr,
                    **values,
                    "tokens": tokens,
                    "supervised_tokens": targets,
                    "step_seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    "memory_gib": peak_memory(world.device) / 2**30,
                }
            )
            last = stop or done == steps
            if config.eval_every and done % config.eval_every == 0 and not last:
                evaluate(run, done, record)
            if last or (config.save_every and done % config.save_every == 0):
                checkpoint.save(
                    directory / "checkpoints",
                    done,
                    run.model,
                    run.optimizer,
                    world,
                    facts,
                    keep_last=config.keep_last,
                )
            if stop and done < steps:
                record.close()
                world.say(f"stopped by a signal after step {done}: resume=auto goes on from there")
                return 128 + (received[0] if received else signal.SIGTERM)
    evaluate(run, steps, record)
    record.close()
    if config.export:
        export(run, directory / "hf")
    return 0


def backward(run: Run, step: int, *, stop: bool) -> dict[str, float]:
    """Gradients of the step, clipped; its loss, their norm before clipping, how many ranks want to
    stop, and what else the objective logs."""
    world, model, objective = run.world, run.model, run.objective
    batches = [
        objective.resolve(model, rows.to(world.device)) for rows in run.data.micro_batches(step)
    ]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    sums = total(world, [objective.sums(model, batch) for batch in batches])
    parts = []
    for i, batch in enumerate(batches):
        sync_gradients(model, i == len(batches) - 1)
        part = objective.loss(model, batch, sums)
        part.loss.backward()
        parts.append(part)
    norm = clip_gradients(model, run.config.max_grad_norm)
    return numbers({"grad_norm": norm} | summed(run, parts, stop=stop))


@torch.no_grad()
def evaluate(run: Run, step: int, record: Record) -> None:
    """The loss of the held-out data as one step of training would have it.

    Every rank runs as many forward passes as the others.
    """
    if run.eval_data is None:
        return
    world, model, objective, data = run.world, run.model, run.objective, run.eval_data
    began = time.perf_counter()

    def batches() -> Iterator[Inputs]:
        for i in range(data.steps_per_epoch):
            for rows in data.micro_batches(i):
                yield objective.resolve(model, rows.to(world.device))

    model.eval()
    sums = total(world, [objective.sums(model, batch) for batch in batches()])
    parts = [objective.evaluate(model, batch, sums) for batch in batches()]
    model.train()
    reshard(model)
    values = {f"eval_{name}": value for name, value in numbers(summed(run, parts)).items()}
    tokens, seconds = int(data.row_targets.sum()), time.perf_counter() - began
    record.evaluation({"step": step, **values, "eval_tokens": tokens, "seconds": seconds})


def summed(run: Run, parts: Sequence[Part], **flags: bool) -> dict[str, Tensor]:
    """The loss and what else is logged, and how many ranks raise each flag."""
    loss = torch.stack([part.loss.detach().double() for part in parts]).sum()
    flagged = {name: torch.full_like(loss, float(flag)) for name, flag in flags.items()}
    first = {"loss": loss, **flagged}
    both = run.world.sum(torch.stack(list(first.values())))
    metrics = total(run.world, [part.metrics for part in parts])
    return dict(zip(first, both, strict=True)) | run.objective.logged(metrics)


def total(world: World, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each sum over all micro-batches and ranks."""
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: world.sum(values.sum(0)) for name, values in stacked.items()}


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The values on the host, after one wait for the device: the step's only one."""
    host = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, host, strict=True))


def export(run: Run, target: Path) -> None:
    """Hugging Face format, in the dtype of the checkpoint that the run began with unless told."""
    run.world.barrier()
    if run.world.main and target.exists():  # of this run, when it had fewer steps
        old = target.with_name(".hf.old")
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(target.rename(old))
    run.world.barrier()
    chosen, own = run.config.export_dtype, run.model.config.dtype or run.config.param_dtype
    dtype = getattr(torch, (own if chosen == "auto" else chosen).removeprefix("torch."))
    run.model.save_pretrained(target, tokenizer=run.tokenizer, dtype=dtype)
    run.world.say(f"exported to {target}")


def diagnosis(run: Run, step: int, loss: float, grad_norm: float) -> str:
    where = run.data.where(step)
    more = f" and {len(where) - 8} more" if len(where) > 8 else ""
    saved = checkpoint.latest(Path(run.config.run_dir, "checkpoints"))
    return (
        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; its rows are "
        f"{', '.join(where[:8])}{more}. The weights were not changed; last checkpoint: {saved}"
    )


@contextmanager
def signals() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that came; the second of a kind interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
