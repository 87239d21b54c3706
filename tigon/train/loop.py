"""The training loop, from top to bottom."""

import math
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from tigon.train import checkpoint, resume
from tigon.train.build import Run
from tigon.train.evaluate import evaluate
from tigon.train.export import export, export_best, export_due
from tigon.train.optim import learning_rate
from tigon.train.record import Record
from tigon.train.signals import signals
from tigon.train.step import backward


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
    keep = checkpoint.Keep(config.keep_last, config.keep_best, config.keep_hours)
    saver = checkpoint.Saver(directory, world, keep=keep, background=config.async_save)
    with signals() as received, saver:
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
                export_best(run, done, evaluate(run, done, record))
            if last or (config.save_every and done % config.save_every == 0):
                saver.save(done, run.model, run.optimizer, run.tokenizer, facts)
            export_due(run, done)
            if stop and done < steps:
                saver.wait()
                record.close()
                world.say(f"stopped by a signal after step {done}: resume=auto goes on from there")
                return 128 + (received[0] if received else signal.SIGTERM)
    export_best(run, steps, evaluate(run, steps, record))
    record.close()
    if config.export:
        export(run, directory / "hf")
    return 0


def diagnosis(run: Run, step: int, loss: float, grad_norm: float) -> str:
    where = run.data.where(step)
    more = f" and {len(where) - 8} more" if len(where) > 8 else ""
    saved = checkpoint.latest(Path(run.config.run_dir, "checkpoints"))
    return (
        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; its rows are "
        f"{', '.join(where[:8])}{more}. The weights were not changed; last checkpoint: {saved}"
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
