"""PEFT's patterns: regular expressions of names, of which files of others may have many.

A pattern means a name if it fits the name or what follows one of its dots. Most are such ends
themselves, as PEFT writes one for each projection: these are looked up. The others are tried one by
one, and are few and simple, so that no file can take long. Source: PEFT's get_pattern_key.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tigon.utils.json import quote

REPEAT = re.compile(r"[*+?{]")
PLAIN = re.compile(r"(?:[\w.-]|\\[.-])+")
LONGEST_PATTERN, MOST_REPEATS = 200, 3
MOST_REPEATING = 20  # patterns of one setting that have any
MOST_TRIED = 200  # patterns of one setting that are no ends of names


def ends_of(name: str) -> Iterator[str]:
    """A name, and what follows each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


class Patterns:
    """The numbers that a setting has for some names; the first pattern that means one counts.

    `names`: all that will be asked for. ValueError for what is no dictionary from patterns to
    numbers of this kind, and for patterns that could take long.
    """

    def __init__(self, values: Mapping[str, Any], key: str, kind: Any, names: Iterable[str]):
        patterns = values.get(key) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{key}={quote(patterns)} is no dictionary")
        known = {end for name in names for end in ends_of(name)}
        self._ends: dict[str, tuple[int, Any]] = {}  # of each its place among all, and its number
        self._tried: list[tuple[int, re.Pattern[str], Any]] = []
        if sum(bool(REPEAT.search(pattern)) for pattern in patterns) > MOST_REPEATING:
            raise ValueError(
                f"{key} has more than {MOST_REPEATING} patterns that repeat something: write whole "
                "names"
            )
        for i, (pattern, value) in enumerate(patterns.items()):
            number = checked(f"{key}[{quote(pattern)}]", value, kind)
            plain = re.sub(r"\\(.)", r"\1", pattern) if PLAIN.fullmatch(pattern) else None
            if plain in known:
                self._ends.setdefault(plain, (i, number))
                continue
            if len(self._tried) == MOST_TRIED:
                raise ValueError(
                    f"{key} has {len(patterns):,} patterns, and more than {MOST_TRIED} of them, "
                    f"such as {quote(pattern)}, are no names of this model's projections: leave "
                    "those out"
                )
            self._tried.append((i, compiled(key, pattern), number))

    def of(self, name: str, default: Any) -> Any:
        """The number of the first pattern that means this name."""
        found = [self._ends[end] for end in ends_of(name) if end in self._ends]
        first, value = min(found, default=(math.inf, default))
        for i, pattern, number in self._tried:
            if i > first:
                break
            if pattern.fullmatch(name):
                return number
        return value


def checked(name: str, value: Any, kind: Any) -> Any:
    """The number; ValueError for one of another kind."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}={quote(value)} is no number that it can be")
    return value


def quick(key: str, pattern: str) -> re.Pattern[str] | None:
    """A regular expression of whole names; None for one that may take long."""
    try:
        compiled(key, pattern)
    except ValueError:
        return None
    return re.compile(pattern)


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """A pattern, if no name can take it long."""
    if len(pattern) > LONGEST_PATTERN or len(REPEAT.findall(pattern)) > MOST_REPEATS:
        raise ValueError(f"{key}[{quote(pattern)}] is too complicated: write whole names")
    if re.search(r"\(\?(?!:)", pattern):  # with (?x:...) repeats of groups look otherwise
        raise ValueError(
            f"{key}[{quote(pattern)}] has a group of a special kind: write whole names"
        )
    if re.search(r"\)[*+?{]", pattern):
        raise ValueError(f"{key}[{quote(pattern)}] repeats a group: write whole names")
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{key}[{quote(pattern)}] is no regular expression: {error}") from None
