"""The training loop, from top to bottom."""

import math
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from tigon.train import checkpoint, resume
from tigon.train.build import Run
from tigon.train.objectives import Inputs
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
            loss, grad_norm, stop, more = backward(run, step, stop=bool(received))
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
                    "loss": loss,
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "tokens": tokens,
                    "supervised_tokens": targets,
                    "step_seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    "memory_gib": peak_memory(world.device) / 2**30,
                    **more,
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


def backward(run: Run, step: int, *, stop: bool) -> tuple[float, float, bool, dict[str, float]]:
    """The step's loss, its gradients' norm before clipping, whether any rank wants to stop, and
    what else its objective logs."""
    world, model, objective = run.world, run.model, run.objective
    batches = [
        objective.resolve(model, rows.to(world.device)) for rows in run.data.micro_batches(step)
    ]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    sums = total(world, (objective.sums(model, batch) for batch in batches))
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    metrics: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        sync_gradients(model, i == len(batches) - 1)
        part = objective.loss(model, batch, sums)
        part.loss.backward()
        totals[0] += part.loss.detach()
        add(metrics, part.metrics)
    totals[1] = float(stop)
    norm = clip_gradients(model, run.config.max_grad_norm)
    more = objective.logged(over_ranks(world, metrics))
    # The step's only wait for the device
    values = torch.stack([*world.sum(totals), norm.double(), *(v.double() for v in more.values())])
    loss_sum, stops, grad_norm, *rest = values.tolist()
    return loss_sum, grad_norm, stops > 0, dict(zip(more, rest, strict=True))


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
    sums = total(world, (objective.sums(model, batch) for batch in batches()))
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    metrics: dict[str, Tensor] = {}
    for batch in batches():
        part = objective.evaluate(model, batch, sums)
        loss += part.loss
        add(metrics, part.metrics)
    model.train()
    reshard(model)
    more = objective.logged(over_ranks(world, metrics))
    row = {"step": step, "eval_loss": world.sum(loss).item()}
    row |= {f"eval_{name}": value.item() for name, value in more.items()}
    row |= {"eval_tokens": int(data.row_targets.sum()), "seconds": time.perf_counter() - began}
    record.evaluation(row)


def add(totals: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


def over_ranks(world: World, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums over all ranks; a copy, since the collective works in place."""
    return {name: world.sum(value.clone()) for name, value in values.items()}


def total(world: World, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of all parts over micro-batches and ranks."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        add(totals, part)
    return over_ranks(world, totals)


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
