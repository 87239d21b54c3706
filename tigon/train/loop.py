"""The training loop, from top to bottom."""

import math
import time
from pathlib import Path
from typing import Any

import torch

from tigon import report
from tigon.data.examples import format_count
from tigon.train import checkpoint, guard, publish, resume
from tigon.train.build import Run
from tigon.train.distributed import InputError, reshard
from tigon.train.evaluate import Interrupted, evaluate, sample
from tigon.train.export import export, export_best, export_name, export_step, step_export_path
from tigon.train.logging import (
    RunLog,
    is_unfinished,
    read_eval_loss,
    read_exported_step,
    write_exported_step,
)
from tigon.train.optim import learning_rate
from tigon.train.profile import Profiler
from tigon.train.step import backward, set_rates
from tigon.train.stopping import Deadline

SAVE_FAILED = 1000  # more than the number of any signal


def open_objective(run: Run) -> None:
    """Whatever the objective reads besides the data; InputError if that is not what it needs."""
    loaders = [loader for loader in (run.data, run.eval_data) if loader is not None]
    try:
        run.objective.open(run.model, loaders, trained=run.start > 0)
    except InputError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise InputError(str(error)) from None


def train(run: Run) -> int:
    """To the last step, or until a signal: then a checkpoint. Returns the exit code."""
    config, world = run.config, run.world
    over = run.start >= run.steps or run.state.is_out_of(config.patience)
    if over:
        guard.check_skipped(run, run.start)
    owed = owes_export(run)
    if (
        over
        and not owed
        and not world.all_reduce_max_int(world.main and is_unfinished(config, run.start))
    ):
        world.log_rank0(f"{config.run_dir} is finished: nothing left to do")
        if world.main and report.is_due(Path(config.run_dir)):
            world.log_rank0(report.attempt(Path(config.run_dir)))
        return 0
    open_objective(run)
    run.objective.begin(run.model)
    record = RunLog(config, world, run.start, run.steps)
    if run.meter.convention:
        world.log_rank0(run.meter.convention)
    with world.signals, run.saver, run.exporter, run.feed:
        if owed:
            export_step(run, run.start)
        due = config.eval_every > 0 and run.start % config.eval_every == 0
        if not over and (due or evaluated_loss(run, run.start) is not None):
            evaluate_once(run, run.start, record)
            over = run.state.is_out_of(config.patience)
        # Where an error ends the steps: torchrun sends a signal to the ranks that are left over
        world.signals.phase = "in training: resume=auto goes on from the last checkpoint"
        with world.signals.deferred():
            step = run.start if over else steps(run, record)
            run.saver.wait()
        if signal := world.all_reduce_max_int(world.signals.received):
            record.close()
            saved = checkpoint.latest(run.saver.directory)
            where = (
                f"goes on from {saved.name}" if saved else "begins again: there is no checkpoint"
            )
            world.log_rank0(f"stopped by a signal after step {step}: resume=auto {where}")
            return 128 + signal
        world.signals.phase = "in the last evaluation or the export: resume=auto goes on with it"
        finish(run, step, record)
    return 0


def steps(run: Run, record: RunLog) -> int:
    """Optimizer steps, evaluations and checkpoints. Returns the number of steps that are done."""
    config, world, state = run.config, run.world, run.state
    facts, deadline = resume.facts(config, run.data), Deadline(run)
    facts |= {"base": run.base} if run.base else {}
    if run.tokenizer.strftime_now is not None:
        facts |= {"strftime_now": run.tokenizer.strftime_now.isoformat()}
    for name in ("share_prompts", "distinct"):  # which rows a step has depends on them
        facts |= {name: True} if getattr(run.objective, name) else {}
    profiler = Profiler(config.profile, config.run_dir, world, run.start, run.steps)
    step = run.start
    while step < run.steps:
        began, done = time.perf_counter(), step + 1
        world.progress.step = done
        values = backward(run, step + state.offset)
        evaluates = config.eval_every > 0 and done % config.eval_every == 0 and done < run.steps
        exports = config.hf_every > 0 and done % config.hf_every == 0
        saves = config.save_every > 0 and done % config.save_every == 0
        trouble = guard.judge(run, step, values)
        if trouble is None:
            update(run, step)
        run.optimizer.zero_grad()
        stop = asked_to_stop(run)
        if evaluates or saves or exports or stop or done == run.steps:
            broken = guard.check_weights(run, done)
            if trouble is None or trouble.policy != "rollback":  # which says what came first
                trouble = broken or trouble
        if trouble is not None and trouble.policy == "rollback":
            step = guard.rollback(run, step, trouble)
            record.rewind(step)
            continue
        seconds = time.perf_counter() - began
        record.log(row(run, step, values, seconds, trouble))
        deadline.note(seconds)
        profiler.step(done)
        step = done
        if evaluates and not stop:
            evaluate_once(run, step, record)
            stop = asked_to_stop(run)
        ends = step == run.steps or state.is_out_of(config.patience)
        if (saves or stop or ends) and (not stop or deadline.allows_save(step)):
            save(run, step, record, facts)
        if exports and not stop:
            export_step(run, step)
        if stop or ends:
            break
    return step


def asked_to_stop(run: Run) -> bool:
    """Whether any rank has received a signal. Raises SaveError on all of them if a checkpoint or an
    export that is written meanwhile has failed on any: one question for all, as it is asked in
    every step."""
    failed = run.saver.failed or run.exporter.failed
    asked = run.world.all_reduce_max_int(SAVE_FAILED if failed else run.world.signals.received)
    if asked == SAVE_FAILED:
        run.saver.wait()
        run.exporter.wait()
        raise checkpoint.SaveError("a checkpoint or an export was not written on another rank")
    return asked > 0


def update(run: Run, step: int) -> None:
    """Of the weights, unless backward has done it, and of their average."""
    if run.in_backward is None:
        set_rates(run, step)
        run.optimizer.step()
    if run.ema is not None:
        run.ema.update(run.model)


def row(
    run: Run, step: int, values: dict[str, float], seconds: float, trouble: guard.Trouble | None
) -> dict[str, Any]:
    """Of metrics.jsonl."""
    taken = step + run.state.offset
    lengths, before, targets = run.data.lengths(taken)
    return {
        "step": step + 1,
        "epoch": run.data.epoch(taken + 1),
        "lr": learning_rate(run.config, step, run.steps),
        **values,
        **run.meter(lengths, before, targets, seconds, run.feed.seconds),
        **({} if trouble is None else {"skipped": trouble.kind}),
        **({"rollbacks": run.state.rollbacks} if run.state.rollbacks else {}),
    }


def evaluate_once(run: Run, step: int, record: RunLog) -> None:
    """Unless its row is there. A signal that is kept for the loop ends it: it is made later."""
    known = evaluated_loss(run, step)
    if known is not None:  # perhaps made after the step's checkpoint, by a run that had ended
        run.state.note_evaluation(step, known)
        return
    try:
        row = evaluate(run, step)
    except Interrupted:
        run.model.train()
        reshard(run.model)
        return
    if row is not None:
        texts = sample(run)
        # Whether the run ends here must not depend on a fault of one rank
        loss = run.world.same_loss(torch.tensor(row["eval_loss"], dtype=torch.double))
        run.state.note_evaluation(step, float(loss))
        export_best(run, step)
        record.log(row, texts)  # last: a run that is killed in the export evaluates again


def evaluated_loss(run: Run, step: int) -> float | None:
    """Of the evaluation that metrics.jsonl has of this step, on all ranks; None: it has none."""
    known = None
    if run.world.main:
        known = read_eval_loss(Path(run.config.run_dir, "metrics.jsonl"), step)
    found = torch.tensor(-math.inf if known is None else known, dtype=torch.double)
    loss = float(run.world.all_reduce_max(found))
    return None if loss == -math.inf else loss


def save(run: Run, step: int, record: RunLog, facts: dict[str, Any]) -> None:
    if run.in_backward is not None:
        run.in_backward.check()  # one that went on after an error must not save what it left
    if not run.world.all_reduce_max_int(run.world.signals.received):  # a signal leaves little time
        run.exporter.wait()  # what goes on from this checkpoint does not look for earlier exports
    record.sync()
    began = time.perf_counter()
    more = {"cursor": run.data.state(step + run.state.offset), **run.state.facts()}
    run.saver.save(step, run.model, run.optimizer, run.tokenizer, facts | more, run.ema)
    record.saved(step, time.perf_counter() - began, whole=not run.saver.writing)


def owes_export(run: Run) -> bool:
    """Whether the run ended between its last checkpoint and the export of that step."""
    config, step = run.config, run.start
    own = checkpoint.latest(Path(config.run_dir, "checkpoints"))
    due = config.hf_every > 0 and step > 0 and step % config.hf_every == 0
    due = due and own is not None and checkpoint.step_of(own) == step
    due = due and not step_export_path(config, step).exists()
    return run.world.all_reduce_max_int(due and run.world.main) > 0  # as the first rank sees it


def finish(run: Run, step: int, record: RunLog) -> None:
    """What a run does after its last step, where it is not done yet."""
    config, world, state = run.config, run.world, run.state
    guard.check_skipped(run, step)
    if state.is_out_of(config.patience):
        count = format_count(state.evaluations_since, "evaluation")
        world.log_rank0(
            f"ended after step {step}: no eval loss in {count} was "
            f"below {state.best_loss:.4f}, of step {state.best_step}"
        )
    evaluate_once(run, step, record)
    record.close()
    directory = Path(config.run_dir)
    new = config.export and world.all_reduce_max_int(read_exported_step(config) != step) > 0
    if new:
        export(run, directory / export_name(config))
        if config.lora is not None and config.lora.merge:
            run.model.graphs = None  # nothing is trained any more, and the adapter goes
            run.model.merge_adapter()
            export(run, directory / "hf")
        if run.ema is not None:
            export(run, directory / "hf-ema", run.ema.values)
        if world.main:
            write_exported_step(directory, step)
    if world.main:
        world.log_rank0(report.attempt(directory))
        if config.push_to_hub and new:
            world.signals.phase = f"in the push: `tigon push {directory} NAME` uploads the export"
            world.log_rank0(publish.push_or_explain(config))
