"""Sources of numbered rows, and what encodes them: small enough to compare every value."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tigon.data.examples import Encoder, Example, Examples
from tigon.data.formats import Format
from tigon.data.sources import Block, Source

PER_BLOCK = 7


class File(Source):
    """Blocks of PER_BLOCK rows."""

    def read(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        lines = Path(self.name).read_text().splitlines()
        yield from ((i, json.loads(text)) for i, text in enumerate(lines[start:], start + 1))

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[Block]:
        records = list(self.records(first, last))
        for i in range(0, len(records), PER_BLOCK):
            yield Block(self.name, self.format, records[i : i + PER_BLOCK])


class Count(Encoder):
    """A row {"first": id, "sizes": [n, ...]} is a group of examples that count from the id.

    Every third token is not supervised; "weight" weighs a row; a row without sizes is left out, and
    one with "bad" is bad.
    """

    per_token = {"supervised": np.bool_, "loss_weights": np.float32}

    def __init__(self, option: int = 0, skip_bad_rows: bool = False):
        self.option, self.skip_bad_rows = option, skip_bad_rows

    def digest(self) -> str:
        return f"count {self.option}"

    def row(self, row: dict[str, Any], format: Format) -> list[Example]:
        if "bad" in row:
            raise ValueError(row["bad"])
        examples = []
        for size in row["sizes"]:
            ids = np.arange(row["first"], row["first"] + size)
            weights = {"loss_weights": np.full(size, row["weight"])} if "weight" in row else {}
            examples.append(Example(ids, {"supervised": ids % 3 != 0, **weights}))
        return examples


class Killed(Count):
    """Kills the process that tokenizes."""

    def __call__(self, block: Block) -> Examples:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def write_rows(path: Path, count: int, seed: int = 0, *, groups: bool = False) -> File:
    """Rows of uneven sizes; some weigh less, some have nothing."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        sizes = draw.integers(2, 30, size=draw.integers(1, 4) if groups else 1).tolist()
        row = {"first": int(draw.integers(1, 10**6)), "sizes": sizes}
        if draw.random() < 0.1:
            row["weight"] = 0.5
        if draw.random() < 0.1:
            row["sizes"] = []
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
    return File(str(path), Format())
