"""Whether a run that a scheduler is ending still has the time for a checkpoint."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tigon import report
from tigon.data import Entry, MicroBatch, Mixture
from tigon.data.examples import format_count
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.parallel import find_tensor
from tigon.train import checkpoint, guard, publish, resume
from tigon.train.build import Run
from tigon.train.callbacks import Predictions, View, Wanted
from tigon.train.distributed import InputError, World, reshard, sync_gradients
from tigon.train.export import export, export_best, export_name, export_step, step_export_path
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
from tigon.train.tasks import Inputs, Part


class Deadline:
    """`stop_seconds` after SIGTERM, as all ranks see it; other signals have none."""

    def __init__(self, run: Run):
        self.run, self.seconds = run, run.config.stop_seconds
        self._told = False

    def note(self, step_seconds: float) -> None:
        """Say once, and before any signal, that the time for a step and a checkpoint is short."""
        needed = step_seconds + self.run.saver.seconds
        if self._told or not self.run.saver.seconds or not 0 < self.seconds < needed:
            return
        self._told = True
        self.run.world.log_rank0(
            f"note: a step and a checkpoint take {needed:.0f} s, longer than stop_seconds="
            f"{self.seconds:g}: SIGTERM would end the run without a checkpoint. Let the scheduler "
            "grant more, and say so in stop_seconds"
        )

    def allows_save(self, step: int) -> bool:
        """Whether a checkpoint that is begun now would be whole in time; if not, says so."""
        world = self.run.world
        own = [self.run.saver.expected(), -world.signals.left(self.seconds)]
        needed, over = world.all_reduce_max(torch.tensor(own, dtype=torch.double)).tolist()
        if needed + over <= 0:
            return True
        world.log_rank0(
            f"no checkpoint of step {step}: it would take about {needed:.0f} s, and "
            f"{max(0.0, -over):.0f} s are left of stop_seconds={self.seconds:g}"
        )
        return False


# The passes of one step, over all micro-batches and ranks.


def backward(run: Run, step: int) -> dict[str, float]:
    """Gradients of the step, clipped at once or by the update; its loss, this rank's part of it,
    the gradients' norm before clipping, and what else the objective logs. With
    optimizer_in_backward the weights are updated, and there are no gradients."""
    world, model, objective = run.world, run.model, run.objective
    batches = [objective.resolve(model, rows) for rows in run.feed(step)]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    sums = total(world, [objective.sums(model, batch) for batch in batches])
    watch = Watch(run, step + 1 - run.state.offset, training=True)
    parts, norm = [], None
    for i, batch in enumerate(batches):
        sync_gradients(model, i == len(batches) - 1)
        batch = watch.ask(batch)
        part = objective.loss(model, batch, sums)
        if run.in_backward is None:
            part.loss.backward()
        else:
            set_rates(run, step - run.state.offset)
            whole = world.all_reduce_sum(part.loss.detach().to(torch.double, copy=True))
            norm = run.in_backward.backward(part.loss, world.same_loss(whole))
        # What autograd knew of it goes: nodes of an eager pass must not be there in a capture
        part = replace(part, loss=part.loss.detach())
        parts.append(watch.show(part, i, batch))
    if norm is None:
        if (tensor := find_tensor(model)) is not None:
            tensor.sum_gradients(model)
        norm = clip(model, run.optimizer, run.config.max_grad_norm)
    own = torch.stack([part.loss.detach().double() for part in parts]).sum()
    values = numbers({"grad_norm": norm, "own_loss": own} | summed(run, parts))
    if run.in_backward is not None and not math.isfinite(values["loss"]):
        run.in_backward.take_back()
    return values


def set_rates(run: Run, step: int) -> None:
    """Learning rates of the update after so many steps."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, step, run.steps) * group["lr_scale"]


def summed(run: Run, parts: Sequence[Part]) -> dict[str, Tensor]:
    """The loss and what else is logged."""
    loss = run.world.all_reduce_sum(
        torch.stack([part.loss.detach().double() for part in parts]).sum()
    )
    metrics = total(run.world, [part.metrics for part in parts])
    return {"loss": run.world.same_loss(loss)} | run.objective.logged(metrics)


def total(world: World, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each sum over all micro-batches and ranks; one exchange for all of a dtype."""
    sums = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    for dtype in dict.fromkeys(value.dtype for value in sums.values()):
        same = {name: value for name, value in sums.items() if value.dtype == dtype}
        flat = world.all_reduce_sum(torch.cat([value.flatten() for value in same.values()]))
        each = flat.split([value.numel() for value in same.values()])
        sums |= {name: x.view_as(same[name]) for name, x in zip(same, each, strict=True)}
    return sums


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The values on the host, after one wait for the device: the step's only one."""
    host = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, host, strict=True))


# What an evaluation measures of each held-out data set that has a name, in its one pass over all.
#
# B lines, T tokens of a line, n sequences, S named data sets


class NamedSets:
    """Loss and accuracy of each, with the weights and the reduction of the whole.

    A packed row may hold sequences of several; each position counts for its own.
    """

    def __init__(self, names: Sequence[str], of_part: Tensor, *, by_sequence: bool):
        """`of_part` int64: which of the names each part of the corpus has, -1 for none.
        `by_sequence`: each sequence weighs the same in the loss, not each token."""
        self.names, self.for_shard, self.by_sequence = names, of_part, by_sequence
        # [S, 4]: the loss, what it is divided by, right predictions, targets
        self.sums = torch.zeros(len(names), 4, dtype=torch.double, device=of_part.device)

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """Of the run's held-out data; None if no entry of it has a name."""
        entries = [e for e in run.config.eval_data if isinstance(e, Entry)]
        names = [e.name for e in entries if e.name is not None]
        if not names or run.eval_data is None:
            return None
        assert isinstance(run.eval_data.windows, Mixture)
        of_entry = [
            names.index(e.name) if isinstance(e, Entry) and e.name is not None else -1
            for e in run.config.eval_data
        ]
        of_part = torch.tensor([of_entry[i] for i in run.eval_data.windows.entry_of_part])
        by_sequence = run.config.loss_reduction == "sequence"
        return cls(names, of_part.to(run.world.device), by_sequence=by_sequence)

    def add(self, view: View, micro_batch: MicroBatch) -> None:
        """This rank's next micro-batch."""
        if not len(micro_batch.spans):
            return  # nothing but padding
        assert view.losses is not None
        labels, starts = view.labels.flatten(), micro_batch.spans[:, 0].contiguous()
        positions = torch.arange(len(labels), device=labels.device)
        sequence = torch.searchsorted(starts, positions, right=True) - 1  # [B T]
        targets = labels != IGNORE_INDEX
        right = targets & (view.predictions.flatten() == labels)
        sets = self.for_shard[micro_batch.parts]  # [n]
        counts = torch.zeros_like(sets).index_add(0, sequence, targets.long())
        numbers = torch.arange(len(self.names), device=labels.device)[:, None]
        mine = sets[sequence] == numbers  # [S, B T]
        of_each = [
            torch.where(mine, view.losses.flatten(), 0).sum(1, dtype=torch.double),
            (mine & targets).sum(1),
            (mine & right).sum(1),
            (mine & targets).sum(1),
        ]
        if self.by_sequence:
            of_each[1] = ((sets == numbers) & (counts > 0)).sum(1)
        self.sums += torch.stack([x.double() for x in of_each], 1)

    def logged(self, world: World) -> dict[str, Tensor]:
        """loss/NAME and accuracy/NAME of the micro-batches of all ranks."""
        loss, items, right, targets = world.all_reduce_sum(self.sums).unbind(1)
        found = {"loss": loss / items, "accuracy": right / targets}
        return {
            f"{key}/{name}": values[i]
            for i, name in enumerate(self.names)
            for key, values in found.items()
        }


# Who watches the passes of a step or of an evaluation, and what they are shown.


class Watch:
    """The hooks that are due in one step or evaluation, its file of predictions and its named
    data sets, if any."""

    def __init__(
        self,
        run: Run,
        step: int,  # as in metrics.jsonl
        *,
        training: bool,
        file: Predictions | None = None,
        sets: NamedSets | None = None,
    ):
        self.run, self.file, self.sets = run, file, sets
        self.hooks = run.objective.hooks.due(step, training=training)
        self.facts = {"step": step, "training": training}

    def ask(self, inputs: Inputs) -> Inputs:
        """The inputs of a pass with what they want of it."""
        if not (self.hooks or self.file or self.sets):
            return inputs
        targets, wanted = inputs.targets, Wanted()
        if self.hooks:
            assert targets.labels is not None
            labels = targets.scatter_to_positions(targets.labels, IGNORE_INDEX)
            wanted = self.run.objective.hooks.wanted(inputs.micro_batch, labels)
        return replace(inputs, wanted=replace(wanted, losses=self.sets is not None))

    def show(self, part: Part, index: int, inputs: Inputs) -> Part:
        """Call them with the view of the pass that `ask` gave the inputs; the part without it."""
        if part.view is None:
            return part
        micro_batch = inputs.micro_batch
        if self.file is not None:  # first: a hook may change what it is shown
            self.file.write(part.view, micro_batch)
        if self.sets is not None:
            self.sets.add(part.view, micro_batch)
        if self.hooks:
            assert inputs.wanted is not None
            self.run.objective.hooks.show(
                part.view,
                inputs.wanted,
                index=index,
                micro_batch=micro_batch,
                tokenizer=self.run.tokenizer,
                world=self.run.world,
                **self.facts,
            )
        return replace(part, view=None)


# The held-out data, as one step of training would have it.


class Interrupted(Exception):
    """By a signal: the evaluation is made when the run goes on."""


def sample(run: Run) -> list[dict[str, str]]:
    """Rows of samples.jsonl, on every rank."""
    if not run.prompts:
        return []
    return generate(run.model, run.prompts, run.tokenizer, run.config.sample_tokens, run.world)


@torch.no_grad()
def evaluate(run: Run, step: int) -> dict[str, Any] | None:
    """The row of metrics.jsonl: the loss of the held-out data as one step of training would have
    it, and what else is logged; None without any.

    Every rank runs as many forward passes as the others. Raises Interrupted on all ranks once one
    of them keeps a signal for the loop.
    """
    if run.eval_data is None:
        return None
    config, world, model, objective = run.config, run.world, run.model, run.objective
    data = run.eval_data
    began = time.perf_counter()

    def batches() -> Iterator[Inputs]:
        for i in range(data.steps_per_epoch or 0):
            for rows in data.micro_batches(i):
                if world.all_reduce_max_int(world.signals.received):
                    raise Interrupted
                yield objective.resolve(model, rows.to(world.device), training=False)

    def part(index: int, inputs: Inputs) -> Part:
        inputs = watch.ask(inputs)
        return watch.show(objective.evaluate(model, inputs, sums), index, inputs)

    model.eval()
    sums = total(world, [objective.sums(model, inputs) for inputs in batches()])
    with ExitStack() as stack:
        file = None
        if config.predictions:
            file = Predictions(Path(config.run_dir), step, run.tokenizer, world)
            stack.enter_context(file)
        sets = NamedSets.of(run)
        watch = Watch(run, step, training=False, file=file, sets=sets)
        parts = [part(i, inputs) for i, inputs in enumerate(batches())]
    model.train()
    reshard(model)
    found = summed(run, parts) | ({} if sets is None else sets.logged(world))
    values = {f"eval_{name}": value for name, value in numbers(found).items()}
    tokens, seconds = data.targets, time.perf_counter() - began
    return {"step": step, **values, "eval_tokens": tokens, "seconds": seconds}


# The training loop, from top to bottom.

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
