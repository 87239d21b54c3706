"""The training loop: `train` runs `train_steps`; a step is `forward_backward`, a check, an update.

Every rank calls each of these functions, and as often as the others.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon import report
from tigon.data import Loader
from tigon.data.examples import format_count
from tigon.train import checkpoint, guard, publish
from tigon.train.benchmarks import Interrupted
from tigon.train.build import TrainingRun
from tigon.train.callbacks import Callback, CallbackHandler, NamedSets, PredictionsWriter
from tigon.train.distributed import InputError, World, eval_mode, sync_gradients
from tigon.train.less_memory import within_memory
from tigon.train.logging import (
    RunLog,
    is_unfinished,
    read_eval_loss,
    read_exported_step,
    write_exported_step,
)
from tigon.train.optim import clip, learning_rate
from tigon.train.profile import Profiler
from tigon.train.samples import generate
from tigon.train.saving import (
    Deadline,
    checkpoint_metadata,
    export,
    export_name,
    save,
    step_export_path,
)
from tigon.train.tasks import MicroBatchLoss, StepInputs

SAVE_FAILED = 1000  # more than the number of any signal


def train(run: TrainingRun) -> int:
    """Trains to the last step, evaluates and exports, unless all is done; returns the exit code.

    It is 0, or 128 + the signal that stopped the run, after a checkpoint if there was time.
    """
    config, world = run.config, run.world
    finished, pending = run.is_finished, export_pending(run)
    if finished:
        guard.check_skipped(run, run.start)
        if not pending and is_complete(run):
            return 0
    open_task(run)
    # config.yaml keeps what was left open as auto, to be chosen again on another machine
    auto: dict[str, Any] = dict.fromkeys(run.auto, "auto")
    log = RunLog(replace(config, **auto), world, run.start, run.steps)
    if run.meter.convention:
        world.log_rank0(run.meter.convention)
    with world.signals, run.saver, run.exporter, run.prefetcher:
        if pending:
            export(run, step_export_path(config, run.start), copy=True)
        due = is_due(config.eval_every, run.start)
        if not finished and (due or read_known_eval_loss(run, run.start) is not None):
            evaluate_once(run, run.start, log)
            finished = run.state.is_out_of_patience(config.patience)
        # Where an error ends the steps, torchrun sends a signal to the other ranks
        world.signals.phase = "in training: resume=auto goes on from the last checkpoint"
        with world.signals.deferred():
            step = run.start if finished else train_steps(run, log)
            run.saver.wait()
        if signal := world.all_reduce_max_int(world.signals.received):
            log.close()
            saved = checkpoint.latest(run.saver.directory)
            hint = f"goes on from {saved.name}" if saved else "begins again: there is no checkpoint"
            world.log_rank0(f"stopped by a signal after step {step}: resume=auto {hint}")
            return 128 + signal
        world.signals.phase = "in the last evaluation or the export: resume=auto goes on with it"
        finish(run, step, log)
    return 0


def train_steps(run: TrainingRun, log: RunLog) -> int:
    """Runs optimizer steps, with the evaluations and checkpoints between them, until the last one,
    a signal or the end of patience. Returns the number of finished steps."""
    config, world, state = run.config, run.world, run.state
    metadata, deadline = checkpoint_metadata(run), Deadline(run)
    profiler = Profiler(config.profile, config.run_dir, world, run.start, run.steps)
    step = run.start
    while step < run.steps:
        start_time, done = time.perf_counter(), step + 1
        world.progress.step = done
        passes = partial(forward_backward, run, step + state.offset)
        values, scale = within_memory(run, done, passes)
        evaluates = is_due(config.eval_every, done) and done < run.steps
        exports, saves = is_due(config.hf_every, done), is_due(config.save_every, done)
        local_loss = values.pop("local_loss")  # for messages, and in no row of metrics.jsonl
        bad_step = guard.check_step(run, step, values, local_loss)
        bad_weights: guard.BadStep | None = None
        if bad_step is None:
            update_weights(run, step, scale)
        run.optimizer.zero_grad()
        stop = should_stop(run)
        if evaluates or saves or exports or stop or done == run.steps:
            # `check_step` saw the gradients, before the update. Weights are checked here, since a
            # rollback can still mend them: `check_finite` of a save or an export, which also checks
            # states and averages, can only end the run
            bad_weights = guard.check_weights(run, done)
        rolls_back = bad_step is not None and bad_step.policy == "rollback"
        if (reason := bad_step if rolls_back else bad_weights) is not None:  # the first fault
            step = guard.rollback(run, step, reason)
            log.rewind(step)
            continue
        seconds = time.perf_counter() - start_time
        log.log(metrics_row(run, step, values, seconds, bad_step))
        deadline.warn_once(seconds)
        profiler.step(done)
        if step == run.start:
            run.saver.warn_if_full(run.model, run.optimizer, run.ema)
        step = done
        if evaluates and not stop:
            evaluate_once(run, step, log)
            stop = should_stop(run)
        ends = step == run.steps or state.is_out_of_patience(config.patience)
        if (saves or stop or ends) and (not stop or deadline.allows_save(step)):
            try:
                save(run, step, log, metadata, last=stop or ends)
            except checkpoint.SaveError:  # on all ranks
                if ends and not stop and config.export:
                    export_last(run)
                    world.log_rank0(f"{config.run_dir} has the export, but no last checkpoint")
                raise
        if exports and not stop:
            export(run, step_export_path(config, step), copy=True)
        if stop or ends:
            break
    return step


def is_due(every: int, step: int) -> bool:
    """Returns whether `step` is a multiple of `every`, as of save_every; never for 0."""
    return every > 0 and step % every == 0


# One optimizer step, over all micro-batches and ranks.


def forward_backward(run: TrainingRun, data_step: int) -> tuple[dict[str, float], Tensor | None]:
    """Computes the gradients of a step. Returns its values on the host ("loss", "local_loss", which
    is this rank's part, "grad_norm" before clipping, and the task's metrics), and the scale that
    `update_weights` applies to the gradients, or None if they are clipped already.

    With optimizer_in_backward the weights are updated here, block by block. `data_step` counts the
    steps whose rows a rollback passed over too; the optimizer's step is that less `state.offset`.
    """
    world, model, task = run.world, run.model, run.task
    step = data_step - run.state.offset
    all_inputs = [task.resolve(model, rows) for rows in run.prefetcher(data_step)]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    sums = all_reduce_sums(world, [task.sums(model, inputs) for inputs in all_inputs])
    watching = task.callbacks if is_due(run.config.hook_every, step + 1) else []
    callbacks = callback_handler(run, watching, step + 1, training=True)
    results, norm, scale = [], None, None
    for i, inputs in enumerate(all_inputs):
        sync_gradients(model, i == len(all_inputs) - 1)
        inputs = replace(inputs, request=callbacks.request(inputs.micro_batch, inputs.targets))
        result = task.loss(model, inputs, sums)
        loss = result.loss.detach()
        if run.in_backward is None:
            result.loss.backward()
        else:
            set_learning_rates(run, step)
            total = world.all_reduce_sum(loss.to(torch.double, copy=True))
            norm = run.in_backward.backward(result.loss, world.same_loss(total))
        callbacks.on_pass(result.output, inputs.request, i, inputs.micro_batch)
        results.append(replace(result, loss=loss, output=None))
        # The next pass may be captured, which fails while nodes of an eager one are alive
        del result
    if norm is None:
        if model.tensor_parallel is not None:
            model.tensor_parallel.sum_gradients(model)
        norm, scale = clip(model, run.optimizer, run.config.max_grad_norm)
    # The step's one wait for results; its passes wait for counts, as of the rows that are learned
    values = to_host({"grad_norm": norm} | reduce_losses(run, results))
    if run.in_backward is not None and not math.isfinite(values["loss"]):
        run.in_backward.undo_step()
    return values, scale


def callback_handler(
    run: TrainingRun, callbacks: Sequence[Callback], step: int, *, training: bool
) -> CallbackHandler:
    """Returns the handler of the callbacks that a step or an evaluation calls."""
    run_dir = Path(run.config.run_dir)
    facts = {"run_dir": run_dir, "tokenizer": run.tokenizer, "world": run.world}
    return CallbackHandler(callbacks, step=step, training=training, **facts)


def update_weights(run: TrainingRun, step: int, scale: Tensor | None) -> None:
    """Sets the learning rates of `step`, counted from 0, and updates the weights with gradients
    times `scale`, unless backward has done both; then updates their moving average, if any."""
    if run.in_backward is None:
        set_learning_rates(run, step)
        # Only AdamW's kernel leaves a scale, and multiplies the gradients itself
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        run.optimizer.step(**options)
    if run.ema is not None:
        run.ema.update(run.model)


def set_learning_rates(run: TrainingRun, step: int) -> None:
    """Sets each parameter group's learning rate for `step`, counted from 0."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, step, run.steps) * group["lr_scale"]


def reduce_losses(run: TrainingRun, results: Sequence[MicroBatchLoss]) -> dict[str, Tensor]:
    """Returns "local_loss", the sum over this rank's micro-batches, "loss", that over all ranks,
    and the task's metrics to log."""
    local_loss = torch.stack([result.loss.double() for result in results]).sum()
    loss = run.world.same_loss(run.world.all_reduce_sum(local_loss.clone()))
    metrics = all_reduce_sums(run.world, [result.metrics for result in results])
    return {"local_loss": local_loss, "loss": loss} | run.task.metrics_to_log(metrics)


def all_reduce_sums(world: World, terms: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns each tensor's sum over micro-batches and ranks with one all-reduce per dtype."""
    sums = {name: torch.stack([term[name] for term in terms]).sum(0) for name in terms[0]}
    for dtype in dict.fromkeys(value.dtype for value in sums.values()):
        local = {name: value for name, value in sums.items() if value.dtype == dtype}
        flat = world.all_reduce_sum(torch.cat([value.flatten() for value in local.values()]))
        chunks = flat.split([value.numel() for value in local.values()])
        sums |= {name: x.view_as(local[name]) for name, x in zip(local, chunks, strict=True)}
    return sums


def to_host(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the values as Python floats, after one wait for the device for all of them."""
    host = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, host, strict=True))


def metrics_row(
    run: TrainingRun,
    step: int,
    values: dict[str, float],
    seconds: float,
    bad_step: guard.BadStep | None,
) -> dict[str, Any]:
    """Returns the row of metrics.jsonl of `step`, counted from 0: its `values`, epoch, learning
    rate and speed, why it was skipped, and how many rollbacks there were."""
    data_step = step + run.state.offset
    lengths, before, targets = run.data.lengths(data_step)
    return {
        "step": step + 1,
        "epoch": run.data.epoch(data_step + 1),
        "lr": learning_rate(run.config, step, run.steps),
        **values,
        **run.meter(lengths, before, targets, seconds, run.prefetcher.seconds),
        **({} if bad_step is None else {"skipped": bad_step.kind}),
        **({"rollbacks": run.state.rollbacks} if run.state.rollbacks else {}),
    }


def should_stop(run: TrainingRun) -> bool:
    """Returns whether any rank has received a signal.

    Raises SaveError on all ranks if a background checkpoint or export has failed on any: one
    all-reduce answers both, as every step asks.
    """
    failed = run.saver.failed or run.exporter.failed
    code = run.world.all_reduce_max_int(SAVE_FAILED if failed else run.world.signals.received)
    if code == SAVE_FAILED:
        run.saver.wait()
        run.exporter.wait()
        raise checkpoint.SaveError("a checkpoint or an export was not written on another rank")
    return code > 0


# Evaluation: all held-out data counts as one step.


def evaluate(run: TrainingRun, step: int) -> dict[str, Any] | None:
    """Returns the evaluation's row of metrics.jsonl, which callbacks have seen: measures of the
    held-out data and of lm-eval's tasks; None with neither.

    Raises Interrupted on all ranks once one of them has received a signal.
    """
    start_time = time.perf_counter()
    values = {} if run.eval_data is None else measure_held_out(run, run.eval_data, step)
    if run.benchmarks is not None:
        values |= run.benchmarks()
    if not values:
        return None
    row = {"step": step, **values, "seconds": time.perf_counter() - start_time}
    callback_handler(run, run.task.callbacks, step, training=False).on_evaluate(row)
    return row


@torch.no_grad()
def measure_held_out(run: TrainingRun, data: Loader, step: int) -> dict[str, float]:
    """Returns loss and metrics of the held-out data, as "eval_loss", whose passes callbacks have
    seen, and its targets; every rank runs as many passes as the others."""
    config, world, model, task = run.config, run.world, run.model, run.task

    def all_inputs() -> Iterator[StepInputs]:
        for i in range(data.steps_per_epoch or 0):
            for rows in data.micro_batches(i):
                if world.any(world.signals.received > 0):
                    raise Interrupted
                yield task.resolve(model, rows.to(world.device), training=False)

    sets = NamedSets.of(config, data, world.device)
    results = []
    writer = PredictionsWriter(Path(config.run_dir), step, run.tokenizer, world)
    with eval_mode(model), writer if config.predictions else nullcontext() as file:
        sums = all_reduce_sums(world, [task.sums(model, inputs) for inputs in all_inputs()])
        recorders = [recorder for recorder in (file, sets) if recorder is not None]
        # The user's last: they may change what they are shown
        callbacks = callback_handler(run, [*recorders, *task.callbacks], step, training=False)
        for i, inputs in enumerate(all_inputs()):
            inputs = replace(inputs, request=callbacks.request(inputs.micro_batch, inputs.targets))
            result = task.evaluate(model, inputs, sums)
            callbacks.on_pass(result.output, inputs.request, i, inputs.micro_batch)
            results.append(replace(result, output=None))
    metrics = reduce_losses(run, results) | ({} if sets is None else sets.metrics_to_log(world))
    del metrics["local_loss"]
    values = {f"eval_{name}": value for name, value in to_host(metrics).items()}
    return values | {"eval_tokens": data.targets}


def evaluate_once(run: TrainingRun, step: int, log: RunLog) -> None:
    """Evaluates, samples, exports the best weights and logs; stops at a pending signal."""
    known = read_known_eval_loss(run, step)
    if known is not None:  # a run that ended may have evaluated after the step's checkpoint
        run.state.note_evaluation(step, known)
        return
    try:
        row = evaluate(run, step)
    except Interrupted:
        return
    if row is None:
        return
    texts = []
    if run.prompts:
        tokens = run.config.sample_tokens
        texts = generate(run.model, run.prompts, run.tokenizer, tokens, run.world)
    # Whether the run ends here must not depend on a fault of one rank
    loss = torch.tensor(row.get("eval_loss", math.inf), dtype=torch.double, device="cpu")
    loss = run.world.same_loss(loss)
    run.state.note_evaluation(step, float(loss))
    if run.config.hf_best and run.state.best_step == step > 0:
        export(run, Path(run.config.run_dir, f"{export_name(run.config)}-best"))
    log.log(row, texts)  # last: a run that is killed in the export evaluates again


def read_known_eval_loss(run: TrainingRun, step: int) -> float | None:
    """Returns the eval loss that metrics.jsonl has for this step, on all ranks: inf if it was not
    finite, None without an evaluation."""
    path = Path(run.config.run_dir, "metrics.jsonl")
    return run.world.share(lambda: read_eval_loss(path, step))


# Before the first step, and after the last.


def open_task(run: TrainingRun) -> None:
    """Lets the task read or compute what it needs besides the data; raises InputError."""
    loaders = [*filter(None, (run.data, run.eval_data))]
    try:
        run.task.open(run.model, loaders, trained=run.start > 0)
    except InputError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise InputError(str(error)) from None


def is_complete(run: TrainingRun) -> bool:
    """Returns whether a finished run has its last evaluation and export; if so, logs it and writes
    the report that may be missing."""
    directory, world = Path(run.config.run_dir), run.world
    if world.any(world.main and is_unfinished(run.config, run.start)):
        return False
    world.log_rank0(f"{directory} is finished: nothing left to do")
    if world.main and report.lacks_page(directory):
        world.log_rank0(report.write_or_explain(directory))
    return True


def export_pending(run: TrainingRun) -> bool:
    """Returns whether an export of hf_every after `run.start` is due and missing."""
    config, step = run.config, run.start
    latest = checkpoint.latest(run.saver.directory)
    pending = (
        step > 0
        and is_due(config.hf_every, step)
        and not step_export_path(config, step).exists()
        and latest is not None
        and checkpoint.step_of(latest) == step
    )
    return run.world.any(run.world.main and pending)  # as the first rank sees it


def export_last(run: TrainingRun) -> None:
    """Exports the trained weights: the model or its adapter, the merged model, the averages."""
    config, directory = run.config, Path(run.config.run_dir)
    export(run, directory / export_name(config))
    if config.lora is not None and config.lora.merge:
        run.model.graphs = None  # captured with the adapter, which is merged now
        run.model.merge_adapter()
        export(run, directory / "hf")
    if run.ema is not None:
        export(run, directory / "hf-ema", run.ema.values)


def finish(run: TrainingRun, step: int, log: RunLog) -> None:
    """Makes the last evaluation, the exports, the report and the push, where they are missing.

    Raises FloatingPointError before that if most of the steps were skipped.
    """
    config, world, state = run.config, run.world, run.state
    guard.check_skipped(run, step)
    if state.is_out_of_patience(config.patience):
        count = format_count(state.evaluations_since, "evaluation")
        world.log_rank0(
            f"ended after step {step}: no eval loss in {count} was "
            f"below {state.best_loss:.4f}, of step {state.best_step}"
        )
    evaluate_once(run, step, log)
    log.close()
    directory = Path(config.run_dir)
    exports = config.export and world.any(read_exported_step(config) != step)
    if exports:
        export_last(run)
        if world.main:
            write_exported_step(directory, step)
    if world.main:
        world.log_rank0(report.write_or_explain(directory))
        if config.push_to_hub and exports:
            world.signals.phase = f"in the push: `tigon push {directory} NAME` uploads the export"
            world.log_rank0(publish.push_or_explain(config))
