"""Names of splits and slices, and the rows that `eval_fraction` holds out."""

import hashlib
import json
import re
from typing import NamedTuple

from tigon.data.formats import KEY_ALIASES, ROW_KEYS, Format, Row

_BOUND = r"(-?\d{1,18})(%?)"
_SPLIT = re.compile(rf"(\w[\w.-]*)(?:\[(?:{_BOUND})?:(?:{_BOUND})?\])?")


class Split(NamedTuple):
    """A split of a data set and a slice of its rows; bounds are rows, or percent of them."""

    name: str = "train"
    start: int | None = None
    stop: int | None = None
    percent: bool = False


def parse_split(text: str) -> list[Split]:
    """Parses a text such as "train[80%:]" or "train+test[:10]", as in `datasets`; ValueError if it
    is no split."""
    splits = []
    for part in text.split("+"):
        match = _SPLIT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"split={text!r} is no split: write train, train[:100], train[80%:] or train+test"
            )
        name, start, start_unit, stop, stop_unit = match.groups()
        units = {unit for unit in (start_unit, stop_unit) if unit is not None}
        if len(units) > 1:
            raise ValueError(f"split={text!r} mixes rows and percent: give both bounds in one unit")
        first, last = (int(bound) if bound else None for bound in (start, stop))
        split = Split(name, first, last, percent="%" in units)
        if split.percent and max(abs(split.start or 0), abs(split.stop or 0)) > 100:
            raise ValueError(f"split={text!r} has a bound beyond 100%")
        splits.append(split)
    return splits


def is_held_out(row: Row, format: Format, fraction: float) -> bool:
    """Whether a row is in the held-out fraction, by a digest of the keys that formats read.

    So the answer is the same on every machine, in any order, and for each copy of a row.
    """
    read = {
        key: row[format.column(key)] for key in ROW_KEYS if row.get(format.column(key)) is not None
    }
    for name, key in KEY_ALIASES.items():
        if key not in read and row.get(name) is not None:
            read[key] = row[name]
    text = json.dumps(read or row, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < fraction * 2**64
