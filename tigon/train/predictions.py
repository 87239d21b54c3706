"""What an evaluation predicted, token by token, as a file.

# B lines, T tokens of a line
"""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from tigon.data import MicroBatch
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.train.hooks import View
from tigon.weights import named_if_full


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
            with named_if_full(part, part.stat().st_size):
                self.file.close()
            self.world.barrier()
            if self.world.main:
                with named_if_full(self.target, sum(part.stat().st_size for part in self.parts)):
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
