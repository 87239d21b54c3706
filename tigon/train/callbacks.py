"""What watches the passes of a run: functions of the user, which `hooks` in the config names.

# B lines, T tokens of a line, n chosen positions, V vocab
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from tigon.data import MicroBatch
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.utils.config import suggest
from tigon.weights import explain_full_disk


@dataclass(frozen=True)
class Wanted:
    """What those that watch a pass want of it beside predictions and metrics."""

    at: tuple[Tensor | None, ...] = ()  # of each hook: int64 [n], positions in the flattened batch
    losses: bool = False  # of each position

    @property
    def positions(self) -> Tensor | None:
        """Those of all hooks, one after the other."""
        given = [at for at in self.at if at is not None]
        return torch.cat(given) if given else None


@dataclass(frozen=True, kw_only=True)
class View:
    """What a pass says about each position of its micro-batch. Nothing in it has a gradient."""

    loss: Tensor  # this micro-batch's part of the loss of the step, or of the evaluation
    labels: Tensor  # int64 [B, T]: the token to predict there, -100 where none counts
    predictions: Tensor  # int64 [B, T]: the likeliest token, -100 where none counts
    metrics: dict[str, Tensor]  # [B, T] each, 0 where no token counts
    logits: Tensor | None  # with return_logits: [B, T, V], or fewer with logits_to_keep
    logits_at: Tensor | None  # [n, V], of the positions that hooks chose
    losses: Tensor | None = None  # [B, T] where wanted, weighted and not divided; they add up


@dataclass(frozen=True, kw_only=True)
class Seen(View):
    """What a hook is called with; `logits_at` are those of the positions that it chose itself."""

    at: Tensor | None  # int64 [n]: these positions, in the flattened batch
    step: int  # as in metrics.jsonl
    training: bool  # or evaluation
    index: int  # of the micro-batch, among those of this rank
    micro_batch: MicroBatch  # tokens, columns; `spans` and `origins` of its sequences
    tokenizer: Tokenizer
    world: World  # rank, size, device; `world.all_reduce_sum` adds over those with other rows


class Hook:
    """A callable of the user, and the positions that it chooses, if it does."""

    def __init__(self, name: str):
        """`name`: module:function or file.py:function. ValueError if there is no such thing."""
        self.name = name
        call = _find(name)
        if isinstance(call, type):
            call = self._run(call)
        if not callable(call):
            raise ValueError(
                f"hooks={name}: {type(call).__name__} is not callable: name a function"
            )
        self._call, self._positions = call, getattr(call, "positions", None)

    def positions(self, micro_batch: MicroBatch, labels: Tensor) -> Tensor | None:
        """The positions that it chooses, as int64 [n] in the flattened batch."""
        if self._positions is None:
            return None
        chosen = self._run(self._positions, micro_batch, labels)
        if chosen is None:
            return None
        if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
            kind = chosen.dtype if isinstance(chosen, Tensor) else type(chosen).__name__
            raise TypeError(f"hook {self.name}: positions gave {kind}, not bool [B, T] or None")
        if chosen.shape != labels.shape:
            shapes = f"{tuple(chosen.shape)}, not [B, T] = {tuple(labels.shape)}"
            raise ValueError(f"hook {self.name}: positions gave a mask {shapes}")
        return chosen.to(labels.device).flatten().nonzero().squeeze(1)

    def __call__(self, seen: Seen) -> None:
        self._run(self._call, seen)

    def _run(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            with torch.no_grad():
                return call(*given)
        except Exception as error:
            raise RuntimeError(f"hook {self.name}: {type(error).__name__}: {error}") from error


class Hooks:
    """All hooks of a run, in the order of the config. Each rank calls all of them equally often."""

    def __init__(self, names: Sequence[str], every: int):
        self.hooks, self.every = [Hook(name) for name in names], every

    def due(self, step: int, *, training: bool) -> bool:
        """Whether they are called in this step, counted from 1, or in this evaluation."""
        in_training = self.every > 0 and step % self.every == 0
        return bool(self.hooks) and (in_training or not training)

    def wanted(self, micro_batch: MicroBatch, labels: Tensor) -> Wanted:
        """`labels` [B, T] are what is to be predicted at each position."""
        return Wanted(tuple(hook.positions(micro_batch, labels) for hook in self.hooks))

    def show(self, view: View, wanted: Wanted, **facts: Any) -> None:
        """Call them, each with its own part of the logits; `facts` are the rest of `Seen`."""
        mine: list[Tensor | None] = [None] * len(self.hooks)
        if view.logits_at is not None:
            sizes = [0 if at is None else len(at) for at in wanted.at]
            parts = view.logits_at.split(sizes)
            mine = [None if at is None else p for at, p in zip(wanted.at, parts, strict=True)]
        for hook, at, logits in zip(self.hooks, wanted.at, mine, strict=True):
            hook(Seen(**vars(view) | facts | {"at": at, "logits_at": logits}))


def _find(name: str) -> Any:
    """What module:function or file.py:function names."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise ValueError(f"hooks={name}: give module:function or file.py:function")
    try:
        module = _load(Path(source)) if source.endswith(".py") else _import(source)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"hooks={name}: {source} cannot be imported: {problem}") from error
    if not hasattr(module, attribute):
        hint = suggest(attribute, vars(module))
        raise ValueError(f"hooks={name}: {source} has no {attribute}{hint and '; '}{hint}")
    return getattr(module, attribute)


def _import(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # as `python -m` has it, `tigon` does not
        sys.path.append(here)
    return importlib.import_module(name)


def _load(path: Path) -> ModuleType:
    """The file as a module, run once however many hooks are in it."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"hooks of {path.resolve()}"
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


# What an evaluation predicted, token by token, as a file.
#
# B lines, T tokens of a line


class Predictions:
    """run_dir/predictions-step-N.jsonl: a line for each sequence, batch after batch.

    Each rank with other rows writes a file of its own; the first one merges them, so that the
    result is the same on any number of ranks, and there is no file by that name until it is
    complete. All ranks see one run_dir.
    """

    def __init__(self, directory: Path, step: int, tokenizer: Tokenizer, world: World):
        self.target = directory / f"predictions-step-{step:08d}.jsonl"
        self.tokenizer, self.world = tokenizer, world
        self.parts = [
            self.target.with_name(f".{self.target.name}.rank-{rank}.partial")
            for rank in range(world.data.size)
        ]

    def __enter__(self) -> Self:
        if self.world.is_data_leader:
            self._part.unlink(missing_ok=True)  # never written through, should it be a link
        self.file = open(self._part, "w", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        part = self._part
        if kind is not None:
            with suppress(OSError):  # what could not be written still cannot
                self.file.close()
            self._remove()
            return
        try:
            with explain_full_disk(part, part.stat().st_size):
                self.file.close()
            self.world.barrier()
            if self.world.main:
                with explain_full_disk(
                    self.target, sum(part.stat().st_size for part in self.parts)
                ):
                    merge(self.parts, self.target)
                self._remove()
        except OSError:  # a full disk needs the room
            self._remove()
            raise

    @property
    def _part(self) -> Path:
        """Ranks with the same rows predict the same: one writes it, the others nowhere."""
        return self.parts[self.world.data.rank] if self.world.is_data_leader else Path(os.devnull)

    def _remove(self) -> None:
        """The files of all ranks, which end with this one if it fails, and of more ranks before."""
        for part in self.target.parent.glob(f".{self.target.name}.rank-*.partial"):
            part.unlink(missing_ok=True)

    def write(self, view: View, micro_batch: MicroBatch) -> None:
        """This rank's next micro-batch; an empty line is its end."""
        for row in rows(view, micro_batch):
            for name in ("target", "predicted"):
                row[name] = self.tokenizer.decode(row[f"{name}_ids"])
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.write("\n")


def rows(view: View, micro_batch: MicroBatch) -> list[dict[str, Any]]:
    """For each sequence with targets: where it is from, and what each target and prediction is."""
    labels, predictions = view.labels.flatten(), view.predictions.flatten()
    metrics = {n: x.flatten().tolist() for n, x in view.metrics.items()}
    counted = (labels != IGNORE_INDEX).nonzero().squeeze(1).tolist()
    targets, predicted = labels.tolist(), predictions.tolist()
    found = []
    at = 0
    spans = micro_batch.spans.tolist()
    for (start, stop), origin in zip(spans, micro_batch.origins, strict=True):
        begin = at
        while at < len(counted) and counted[at] < stop:
            at += 1
        mine = counted[begin:at]
        if not mine:
            continue
        row: dict[str, Any] = {"source": origin}
        row["positions"] = [i - start + 1 for i in mine]  # of the tokens, in the sequence
        row["target_ids"] = [targets[i] for i in mine]
        row["predicted_ids"] = [predicted[i] for i in mine]
        row["correct"] = [targets[i] == predicted[i] for i in mine]
        found.append(row | {name: [values[i] for i in mine] for name, values in metrics.items()})
    return found


def merge(parts: Sequence[Path], target: Path) -> None:
    """The micro-batches of the ranks' files in turn, as one rank would have written them."""
    temporary = target.with_name(f".{target.name}.partial")
    temporary.unlink(missing_ok=True)  # never written through, should it be a link
    with ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        files = [stack.enter_context(open(part, encoding="utf-8")) for part in parts]
        merged = stack.enter_context(open(temporary, "w", encoding="utf-8"))
        line = "\n"
        while line:  # all have equally many micro-batches, so the last file ends with the others
            for file in files:
                while (line := file.readline()) not in ("", "\n"):
                    merged.write(line)
        merged.flush()
        os.fsync(merged.fileno())
        temporary.replace(target)
