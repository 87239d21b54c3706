"""Callbacks, which see each pass of a step or an evaluation: the user's, and two of our own.

# B lines, T tokens of a line, n chosen positions or sequences, S named data sets, V vocab
"""

import importlib
import importlib.util
import json
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from tigon.data import Entry, Loader, MicroBatch, Mixture
from tigon.kernels.loss.logits import IGNORE_INDEX, METRICS
from tigon.models import Targets
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.utils.config import suggest
from tigon.utils.paths import new_file
from tigon.weights.files import explain_full_disk

# Metrics with a value for each position that callbacks may ask for; all get the predictions
POSITION_METRICS = tuple(name for name in METRICS if name not in ("accuracy", "predicted_tokens"))


@dataclass(frozen=True)
class OutputRequest:
    """Names what a pass returns for its callbacks besides predictions."""

    # For each callback int64 [n], the positions in the flattened batch whose logits it gets
    at: tuple[Tensor | None, ...] = ()
    metrics: tuple[str, ...] = ()  # besides those of the settings
    losses: bool = False  # the loss of each position

    @property
    def positions(self) -> Tensor | None:
        """Returns the positions of all callbacks, one after the other; None without any."""
        positions = [at for at in self.at if at is not None]
        return torch.cat(positions) if positions else None


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """Holds what a pass computed for each position of its micro-batch, without gradients."""

    loss: Tensor  # this micro-batch's part of the loss of the step, or of the evaluation
    labels: Tensor  # int64 [B, T]: the token to predict there, -100 where none counts
    predictions: Tensor  # int64 [B, T]: the likeliest token, -100 where none counts
    metrics: dict[str, Tensor]  # [B, T] each, 0 where no token counts
    logits: Tensor | None  # with return_logits: [B, T, V], or fewer with logits_to_keep
    logits_at: Tensor | None  # [n, V], of the positions that callbacks chose
    losses: Tensor | None = None  # [B, T] where wanted, weighted and not divided; they add up


@dataclass(frozen=True, kw_only=True)
class CallbackContext:
    """Holds what every call of a callback is told of the run."""

    step: int  # as in metrics.jsonl
    training: bool  # or evaluation
    run_dir: Path
    tokenizer: Tokenizer
    world: World  # rank, size, device; `world.all_reduce_sum` adds over those with other rows


@dataclass(frozen=True, kw_only=True)
class PassContext(PassOutput, CallbackContext):
    """Holds what a callback gets after a pass, with `logits_at` of its own positions."""

    at: Tensor | None  # int64 [n]: these positions, in the flattened batch
    index: int  # of the micro-batch, among those of this rank
    micro_batch: MicroBatch  # tokens, columns; `spans` and `origins` of its sequences


@dataclass(frozen=True, kw_only=True)
class EvaluationContext(CallbackContext):
    """Holds what `on_evaluate` is called with after an evaluation."""

    metrics: dict[str, Any]  # the evaluation's row of metrics.jsonl, on every rank


class Callback:
    """Sees the passes of a step or an evaluation; a subclass overrides what it has a use for."""

    metrics: Sequence[str] = ()  # to compute for it, besides those of the settings
    needs_losses = False  # whether it reads the loss of each position

    def positions(self, micro_batch: MicroBatch, labels: Tensor) -> Tensor | None:
        """Returns positions whose logits it gets, int64 [n] in the flattened batch; None for none.
        `labels` [B, T] are the tokens to predict."""
        return None

    def on_pass(self, context: PassContext) -> None:
        """Called after the pass, and in training the backward, of each micro-batch."""

    def on_evaluate(self, context: EvaluationContext) -> None:
        """Called at the end of an evaluation."""


class UserCallback(Callback):
    """Wraps a callable that `hooks` names, with its optional `positions`, `metrics` and
    `on_evaluate`. All are called without gradients; an error in one becomes a RuntimeError."""

    def __init__(self, name: str):
        """Imports `name`, module:function or file.py:function; raises ValueError if it cannot be
        found, or asks for metrics that there are not."""
        self.name = name
        call = _import_function(name)
        if isinstance(call, type):
            call = self._run(call)
        if not callable(call):
            kind = type(call).__name__
            raise ValueError(f"hooks={name}: {kind} is not callable: name a function")
        self._call = call
        self.metrics = tuple(getattr(call, "metrics", ()))
        for metric in self.metrics:
            if metric not in POSITION_METRICS:
                known = ", ".join(POSITION_METRICS)
                raise ValueError(f"hooks={name}: its metric {metric!r} is not one of {known}")

    def positions(self, micro_batch: MicroBatch, labels: Tensor) -> Tensor | None:
        """Returns the positions that the user's method chooses; raises TypeError or ValueError
        unless it returns None or bool [B, T]."""
        choose = getattr(self._call, "positions", None)
        chosen = None if choose is None else self._run(choose, micro_batch, labels)
        if chosen is None:
            return None
        if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
            kind = chosen.dtype if isinstance(chosen, Tensor) else type(chosen).__name__
            raise TypeError(f"callback {self.name}: positions gave {kind}, not bool [B, T] or None")
        if chosen.shape != labels.shape:
            shapes = f"{tuple(chosen.shape)}, not [B, T] = {tuple(labels.shape)}"
            raise ValueError(f"callback {self.name}: positions gave a mask {shapes}")
        return chosen.to(labels.device).flatten().nonzero().squeeze(1)

    def on_pass(self, context: PassContext) -> None:
        self._run(self._call, context)

    def on_evaluate(self, context: EvaluationContext) -> None:
        on_evaluate = getattr(self._call, "on_evaluate", None)
        if on_evaluate is not None:
            self._run(on_evaluate, context)

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's callable without gradients; its error becomes one that names it."""
        try:
            with torch.no_grad():
                return call(*args)
        except torch.OutOfMemoryError:  # the step may be repeated with less
            raise
        except Exception as error:
            raise RuntimeError(f"callback {self.name}: {type(error).__name__}: {error}") from error


class CallbackHandler:
    """Calls the callbacks of one step or evaluation, in order, equally often on every rank."""

    def __init__(self, callbacks: Sequence[Callback], **context: Any):
        """`context`: the fields of `CallbackContext`."""
        self.callbacks, self.context = callbacks, context

    def request(self, micro_batch: MicroBatch, targets: Targets) -> OutputRequest | None:
        """Returns what the callbacks need of a pass; None without any callback."""
        if not self.callbacks:
            return None
        assert targets.labels is not None
        labels = targets.scatter_to_positions(targets.labels, IGNORE_INDEX)
        return OutputRequest(
            tuple(callback.positions(micro_batch, labels) for callback in self.callbacks),
            tuple(name for callback in self.callbacks for name in callback.metrics),
            any(callback.needs_losses for callback in self.callbacks),
        )

    def on_pass(
        self,
        output: PassOutput | None,
        request: OutputRequest | None,
        index: int,
        micro_batch: MicroBatch,
    ) -> None:
        """Shows the output of a pass, if it was requested, each callback the logits it chose."""
        if output is None or request is None:
            return
        logits_at: list[Tensor | None] = [None] * len(self.callbacks)
        if output.logits_at is not None:
            chunks = output.logits_at.split([0 if at is None else len(at) for at in request.at])
            pairs = zip(request.at, chunks, strict=True)
            logits_at = [None if at is None else chunk for at, chunk in pairs]
        fields = vars(output) | self.context | {"index": index, "micro_batch": micro_batch}
        for callback, at, logits in zip(self.callbacks, request.at, logits_at, strict=True):
            callback.on_pass(PassContext(**fields | {"at": at, "logits_at": logits}))

    def on_evaluate(self, metrics: dict[str, Any]) -> None:
        """Shows the evaluation's row of metrics.jsonl, each callback a copy."""
        for callback in self.callbacks:
            callback.on_evaluate(EvaluationContext(metrics=dict(metrics), **self.context))


def _import_function(name: str) -> Any:
    """Returns what module:function or file.py:function names, or raises ValueError."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ValueError(f"hooks={name}: give module:function or file.py:function")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else _import(source)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"hooks={name}: {source} cannot be imported: {problem}") from error
    if not hasattr(module, attribute):
        hint = suggest(attribute, vars(module))
        raise ValueError(f"hooks={name}: {source} has no {attribute}{hint and '; '}{hint}")
    return getattr(module, attribute)


def _import(name: str) -> ModuleType:
    """Imports a module by its name; leaves the working directory in sys.path, at the end."""
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:  # `python -m` has it, `tigon` lacks it
        sys.path.append(directory)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Imports the file as a module, once for all callbacks in it."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"callbacks of {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# The predictions of an evaluation as a file, token by token.


class PredictionsWriter(Callback):
    """Writes run_dir/predictions-step-N.jsonl: a line for each sequence, batch after batch.

    Rank 0 writes the lines of all ranks: the file appears whole, equal on any number of ranks.
    """

    def __init__(self, directory: Path, step: int, tokenizer: Tokenizer, world: World):
        self.target = directory / f"predictions-step-{step:08d}.jsonl"
        self.tokenizer, self.world = tokenizer, world
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        if self.world.main:
            temporary = self._opened.enter_context(new_file(self.target))
            self.file = self._opened.enter_context(temporary.open("x", encoding="utf-8"))
        return self

    def __exit__(self, *error: Any) -> None:
        with explain_full_disk(self.target):
            self._opened.__exit__(*error)

    def on_pass(self, context: PassContext) -> None:
        """Writes the next micro-batch of every rank, equal rows once; all ranks call it."""
        rows = prediction_rows(context) if self.world.is_data_leader else []
        for row in rows:
            for name in ("target", "predicted"):
                row[name] = self.tokenizer.decode(row[f"{name}_ids"])
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        texts = self.world.gather("".join(lines))
        if self.world.main:
            self.file.writelines(texts)


def prediction_rows(context: PassContext) -> list[dict[str, Any]]:
    """Returns for each sequence with targets its source, targets, predictions and metrics."""
    labels, predictions = context.labels.flatten(), context.predictions.flatten()
    metrics = {n: x.flatten().tolist() for n, x in context.metrics.items()}
    micro_batch = context.micro_batch
    target_positions = (labels != IGNORE_INDEX).nonzero().squeeze(1).tolist()
    targets, predicted = labels.tolist(), predictions.tolist()
    rows = []
    end = 0
    for (start, stop), origin in zip(micro_batch.spans.tolist(), micro_batch.origins, strict=True):
        begin, end = end, bisect_left(target_positions, stop, end)
        positions = target_positions[begin:end]
        if positions:
            row = {
                "source": origin,
                "positions": [i - start + 1 for i in positions],  # of the tokens, in the sequence
                "target_ids": [targets[i] for i in positions],
                "predicted_ids": [predicted[i] for i in positions],
                "correct": [targets[i] == predicted[i] for i in positions],
            }
            rows.append(row | {n: [x[i] for i in positions] for n, x in metrics.items()})
    return rows


# Losses of named data sets.


class NamedSets(Callback):
    """Measures loss and accuracy of each named data set in the evaluation's one pass over all.

    A packed row may hold sequences of several sets; each position counts for its own.
    """

    needs_losses = True

    def __init__(self, names: Sequence[str], set_of_part: Tensor, *, by_sequence: bool):
        """`set_of_part` int64: the index in `names` of each part of the corpus, -1 for none.
        `by_sequence`: each sequence weighs the same in the loss, not each token."""
        self.names, self.set_of_part, self.by_sequence = names, set_of_part, by_sequence
        # [S, 4]: loss, its denominator, right predictions, targets
        self.sums = torch.zeros(len(names), 4, dtype=torch.double, device=set_of_part.device)

    @classmethod
    def of(cls, config: Config, loader: Loader, device: torch.device) -> Self | None:
        """Returns the named sets of the held-out data; None if no entry has a name."""
        entries = [e.name if isinstance(e, Entry) else None for e in config.eval_data]
        names = [name for name in entries if name is not None]
        if not names:
            return None
        assert isinstance(loader.windows, Mixture)
        set_of_entry = [-1 if name is None else names.index(name) for name in entries]
        sets = [set_of_entry[i] for i in loader.windows.entry_of_part]
        by_sequence = config.loss_reduction == "sequence"
        return cls(names, torch.tensor(sets, device=device), by_sequence=by_sequence)

    def on_pass(self, context: PassContext) -> None:
        micro_batch = context.micro_batch
        if not len(micro_batch.spans):
            return  # nothing but padding
        assert context.losses is not None
        labels, starts = context.labels.flatten(), micro_batch.spans[:, 0].contiguous()
        positions = torch.arange(len(labels), device=labels.device)
        sequence = torch.searchsorted(starts, positions, right=True) - 1  # [B T]
        targets = labels != IGNORE_INDEX
        right = targets & (context.predictions.flatten() == labels)
        sets = self.set_of_part[micro_batch.parts]  # [n]
        counts = torch.zeros_like(sets).index_add(0, sequence, targets.long())
        indices = torch.arange(len(self.names), device=labels.device)[:, None]
        in_set = sets[sequence] == indices  # [S, B T]
        losses = torch.where(in_set, context.losses.flatten(), 0).sum(1, dtype=torch.double)
        items = num_targets = (in_set & targets).sum(1)
        if self.by_sequence:
            items = ((sets == indices) & (counts > 0)).sum(1)
        columns = losses, items, (in_set & right).sum(1), num_targets
        self.sums += torch.stack([x.double() for x in columns], 1)

    def metrics_to_log(self, world: World) -> dict[str, Tensor]:
        """Returns loss/NAME and accuracy/NAME over the micro-batches of all ranks."""
        loss, items, right, targets = world.all_reduce_sum(self.sums).unbind(1)
        metrics = {"loss": loss / items, "accuracy": right / targets}
        return {
            f"{key}/{name}": values[i]
            for i, name in enumerate(self.names)
            for key, values in metrics.items()
        }
