"""The training loop, from top to bottom."""

import math
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from tigon.train import checkpoint, objectives, resume
from tigon.train.build import Run
from tigon.train.optim import clip_gradients, learning_rate
from tigon.train.parallel import reshard, sync_gradients
from tigon.train.record import Record


def train(run: Run) -> int:
    """To the last step, or until SIGTERM or SIGINT: then a checkpoint. Returns the exit code."""
    config, world, start, steps = run.config, run.world, run.start, run.steps
    directory = Path(config.run_dir)
    if start >= steps and (directory / "hf").exists():
        world.say(f"{directory} is finished: nothing left to do")
        return 0
    facts = resume.facts(config, run.data)
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
    what else its objective records."""
    config, world, model = run.config, run.world, run.model
    batches = [objectives.to(batch, world.device) for batch in run.data.micro_batches(step)]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    shares = [objectives.num_items(model, batch, config) for batch in batches]
    items = world.sum(torch.stack(shares).sum())
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    means: dict[str, Tensor] = {}
    for i, (batch, share) in enumerate(zip(batches, shares, strict=True)):
        sync_gradients(model, i == len(batches) - 1)
        loss, metrics = objectives.loss(model, batch, config, items)
        loss.backward()
        totals[0] += loss.detach()
        for name, value in metrics.items():
            means[name] = means.get(name, 0) + value * (share / items.clamp(min=1))
    totals[1] = float(stop)
    norm = clip_gradients(model, config.max_grad_norm)
    more = objectives.recorded({name: world.sum(mean) for name, mean in means.items()})
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
    config, world, data = run.config, run.world, run.eval_data
    began = time.perf_counter()

    def batches() -> Iterator[objectives.Batch]:
        for i in range(data.steps_per_epoch):
            for batch in data.micro_batches(i):
                yield objectives.to(batch, world.device)

    items = sum(objectives.num_items(run.model, batch, config) for batch in batches())
    items = world.sum(torch.as_tensor(items, device=world.device))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    run.model.eval()
    for batch in batches():
        total += objectives.evaluation(run.model, batch, config, items)
    run.model.train()
    reshard(run.model)
    loss = world.sum(total).item()
    tokens, seconds = int(data.row_targets.sum()), time.perf_counter() - began
    record.evaluation({"step": step, "eval_loss": loss, "eval_tokens": tokens, "seconds": seconds})


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
