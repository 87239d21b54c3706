"""Token ids with named columns of values, and how the rows of files become them.

# N tokens, E examples, G groups of examples
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.content_check import EmptyAnswer
from tigon.data.formats import Format, Row
from tigon.data.messages import ROLES
from tigon.data.sources import MAX_ROW_CHARS, Block, Source, measure
from tigon.utils.config import find_misspelled
from tigon.utils.json import escape

SUPERVISED_COLUMN = {"supervised": np.bool_}  # the column of the tokens that are to be learned
# A column that only some examples have, and what it is for the others. Examples in which it would
# say nothing else have no such column.
FILL_VALUES = {"loss_weights": 1.0}
WEIGHTED_COLUMNS = {**SUPERVISED_COLUMN, "loss_weights": np.float32}
NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
TOKEN_COLUMNS = ("teacher_tokens",)  # columns of tokens, besides those of the sequences
MAX_ERRORS = 5  # bad rows that a report shows
MAX_IGNORED_KEYS = 100


class Example(NamedTuple):
    """The tokens of one sequence, and its values for the columns of both kinds."""

    ids: Sequence[int]
    per_token: Mapping[str, Any]  # as many values as ids
    per_example: Mapping[str, Any] = NO_COLUMNS  # one value


T = TypeVar("T")
Encoded = Sequence[Example] | ValueError  # a row's examples, or what is wrong with it
Group = tuple[int, Sequence[Example]]  # a line, and the examples of its row


@dataclass(frozen=True)
class EncodingReport:
    """Counts how many rows were encoded, skipped or left out; reports of blocks add up."""

    rows: int = 0
    skipped: int = 0  # rows that could not be read or encoded, with bad_rows=skip
    unlearned: int = 0  # rows left out, because the weights of all that they say are 0
    errors: tuple[str, ...] = ()  # of the first rows that were skipped
    ignored_keys: tuple[str, ...] = ()  # keys of rows and of messages that nothing reads
    unknown_roles: dict[str, str] = field(default_factory=dict)  # role -> the first row with it
    empty: int = 0  # rows among those skipped whose answer is empty
    rewritten: int = 0  # turns not learned: the chat template writes them differently in the row
    extra: int = 0  # examples besides one for each row, for turns that would be rewritten
    missing_openers: tuple[str, ...] = ()  # in which prompts end, and which conversations lack

    def __add__(self, other: "EncodingReport") -> "EncodingReport":
        # In the order in which they came, each with its first row
        roles = {**self.unknown_roles, **other.unknown_roles, **self.unknown_roles}
        names = [f.name for f in fields(self) if f.name != "unknown_roles"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        sums["unknown_roles"] = dict(list(roles.items())[:MAX_ERRORS])
        sums["errors"] = sums["errors"][:MAX_ERRORS]
        for name, limit in (("ignored_keys", MAX_IGNORED_KEYS), ("missing_openers", MAX_ERRORS)):
            sums[name] = tuple(sorted(set(sums[name])))[:limit]
        return EncodingReport(**sums)

    def lines(self) -> list[str]:
        """Describes in sentences what was skipped, left out or not read."""
        pronoun = "it" if self.rewritten == 1 else "them"
        skipped = "\n  ".join([f"{format_count(self.rows, 'row')} skipped as bad:", *self.errors])
        lines = {
            f"{self.skipped:,} of {skipped}": self.skipped,
            f"{format_count(self.empty, 'row')} with an empty answer, of those skipped": self.empty,
            f"{format_count(self.unlearned, 'row')} left out, whose weights are all 0": (
                self.unlearned
            ),
            f"{format_count(self.rewritten, 'turn')} of the assistant not learned, as the chat "
            f"template writes {pronoun} differently when others follow: train_on=all_turns learns "
            "each in an example of its own": self.rewritten,
            f"{format_count(self.extra, 'extra example')}, for turns that the chat template writes "
            "differently when others follow": self.extra,
            **{
                f"the chat template's prompt ends in {opener!r}, and its conversations do not have "
                "it: answers are learned without it": True
                for opener in self.missing_openers
            },
            f"keys of its rows that nothing reads: {', '.join(self.ignored_keys)}": (
                self.ignored_keys
            ),
            **{
                f"{place} has a message of the role {role!r}, which the chat template does not "
                f"name: {_explain_role(role)}": True
                for role, place in self.unknown_roles.items()
            },
        }
        return [line for line, applies in lines.items() if applies]

    def explain_empty(self) -> str:
        """Say, after a source's name, why these rows gave no example."""
        if not self.rows:
            return "has no rows"
        if self.unlearned:
            return (
                f"has nothing to learn: the weights are 0 in {self.unlearned:,} of "
                f"{format_count(self.rows, 'row')}"
            )
        return f"has no good row of {self.rows}: {self.errors[0]}"


def _explain_role(role: str) -> str:
    """Returns the advice on a role that is none of ROLES."""
    if meant := find_misspelled(role, ROLES):
        return f"did you mean {meant!r}?"
    return f"the usual ones are {', '.join(ROLES)}"


@dataclass(frozen=True)
class Examples:
    """Tokenised examples, end to end, with columns of values per token and per example.

    The column "supervised" says which tokens are to be learned; without it, all are. The column
    "loss_weights" multiplies the tokens' losses; without it, all are 1. Consecutive examples can
    form groups, such as a chosen and a rejected answer, which share a micro-batch.
    """

    tokens: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [E + 1], example e is tokens[offsets[e] : offsets[e + 1]]
    origin: np.ndarray  # int32 [E, 2], index into files, line
    files: tuple[str, ...]
    per_token: Mapping[str, np.ndarray]  # [N, ...] each
    per_example: Mapping[str, np.ndarray] = field(default_factory=dict)  # [E, ...] each
    groups: np.ndarray | None = None  # int64 [G + 1], offsets into the examples; None: no groups
    report: EncodingReport = EncodingReport()
    key: str = ""  # in the cache; changes with the content

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_groups(self) -> int:
        """The number of groups; without groups, that of examples."""
        return len(self) if self.groups is None else len(self.groups) - 1

    @cached_property
    def targets(self) -> np.ndarray:
        """int32 [E], the number of supervised tokens in each example, its first token left out."""
        before = np.concatenate([[0], np.cumsum(self.supervised)])
        starts, stops = self.offsets[:-1], self.offsets[1:]
        return (before[stops] - before[np.minimum(starts + 1, stops)]).astype(np.int32)

    @cached_property
    def highest(self) -> int:
        """The highest token, of a teacher's too; -1 without any."""
        columns = [self.tokens, *(self.per_token[n] for n in TOKEN_COLUMNS if n in self.per_token)]
        return max(int(column.max(initial=-1)) for column in columns)

    def slice_groups(self, start: int, stop: int) -> "Examples":
        """The examples of groups `start` to `stop` - 1, as views; the first has the report."""
        first, last = start, stop
        if self.groups is not None:
            first, last = int(self.groups[start]), int(self.groups[stop])
        a, b = int(self.offsets[first]), int(self.offsets[last])
        return Examples(
            self.tokens[a:b],
            self.offsets[first : last + 1] - a,
            self.origin[first:last],
            self.files,
            {name: values[a:b] for name, values in self.per_token.items()},
            {name: values[first:last] for name, values in self.per_example.items()},
            None if self.groups is None else self.groups[start : stop + 1] - first,
            EncodingReport() if start else self.report,
        )

    @property
    def supervised(self) -> np.ndarray:
        """bool [N], the tokens that are to be learned."""
        if "supervised" in self.per_token:
            return self.per_token["supervised"]
        return np.broadcast_to(True, len(self.tokens))

    def column(self, kind: str, name: str) -> np.ndarray:
        """A column per_token or per_example; a missing one has its value in FILL_VALUES."""
        columns: Mapping[str, np.ndarray] = getattr(self, kind)
        if name in columns or name not in FILL_VALUES:
            return columns[name]
        return np.broadcast_to(np.float32(FILL_VALUES[name]), len(self.tokens))

    def index(self, positions: np.ndarray) -> np.ndarray:
        """The index of the example that holds each token position."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def location(self, position: int) -> str:
        """The "file:line" of the example that holds token `position`."""
        file, line = self.origin[self.index(np.asarray(position))]
        return f"{self.files[file]}:{line}"


def format_count(number: int, noun: str) -> str:
    """Writes a number with its noun, such as "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class BadRow(ValueError):
    """A row that cannot be read or encoded, in a source whose first row can."""


class Encoder:
    """Rows to examples: what a task makes of its data.

    Picklable, since worker processes have a copy each. A new one says its columns, `digest`, and
    what `row` makes of a row.
    """

    per_token: Mapping[str, DTypeLike] = SUPERVISED_COLUMN
    per_example: Mapping[str, DTypeLike] = NO_COLUMNS
    skip_bad_rows = False
    uses_chat_template = False  # whether a chat template makes text of rows
    pass_report = EncodingReport()  # of a block's rows, besides what `row` returns
    grouped = True  # whether the examples of a row have to share a micro-batch

    def open(self, source: Source) -> Source:
        """Returns the source with what its first rows decide, here unchanged; raises ValueError."""
        return source

    def digest(self) -> str:
        """Returns a text that changes with whatever changes the examples of a row."""
        raise NotImplementedError

    def times(self) -> Mapping[str, str]:
        """Returns what the last block has of the present time, by strftime's format; here none."""
        return {}

    def write_time(self, format: str) -> str:
        """Writes the present time as `times` has it."""
        raise NotImplementedError

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes the examples of a row, none if nothing is learned; ValueError if it is bad."""
        raise NotImplementedError

    def batch(self, rows: Sequence[Row], format: Format) -> Iterator[Encoded]:
        """Yields what `row` makes of each row, or its error; some encode many at once."""
        for row in rows:
            yield result_or_error(self.row, row, format)

    def group_examples(self, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
        """Divides the examples of a row into groups: one if `grouped`, else each alone."""
        return [examples] if self.grouped else [[example] for example in examples]

    def ignored(self, row: Row, format: Format) -> set[str]:
        """Collects the keys of a row that are not read; here none."""
        return set()

    def unknown_roles(self, row: Row, format: Format) -> set[str]:
        """Collects the roles of a row's messages that are probably misspelled; here none."""
        return set()

    def __call__(self, block: Block) -> Examples:
        """Encodes a block, whose name is the examples' only file.

        A bad row raises ValueError with its file and line, or with `skip_bad_rows` is left out; the
        report counts these, and rows without examples.
        """
        lines = [(line, _check_size(row)) for line, row in block.rows()]
        self.pass_report = EncodingReport()
        encoded = self.batch([row for _, row in lines if isinstance(row, dict)], block.format)
        groups: list[Group] = []
        ignored: set[str] = set()
        roles: dict[str, str] = {}
        report = EncodingReport(len(lines))
        for line, row in lines:
            examples: Sequence[Example] | ValueError
            if isinstance(row, ValueError):
                examples = row
            else:
                ignored |= self.ignored(row, block.format)
                for role in sorted(self.unknown_roles(row, block.format)):
                    roles.setdefault(escape(role, 100), f"{block.name}:{line}")
                examples = next(encoded)
            if isinstance(examples, ValueError):
                message = f"{block.name}:{line}: {escape(examples)}"
                if not self.skip_bad_rows:
                    raise BadRow(message) from examples
                empty = isinstance(examples, EmptyAnswer)
                report += EncodingReport(skipped=1, errors=(message,), empty=int(empty))
            elif examples:
                groups += [(line, group) for group in self.group_examples(examples)]
            else:
                report += EncodingReport(unlearned=1)
        keys = tuple(escape(key, 100) for key in ignored)
        report += EncodingReport(ignored_keys=keys, unknown_roles=roles)
        report += self.pass_report
        return collect(block.name, groups, report, self.per_token, self.per_example)


def result_or_error(function: Callable[..., T], *arguments: Any) -> T | ValueError:
    """Calls a function of a row; returns its ValueError, or one for a row nested too deeply."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("is nested too deeply")


def _check_size(row: Row | ValueError) -> Row | ValueError:
    """Returns the row, or a ValueError if it is too large for a tokenizer."""
    if isinstance(row, ValueError) or (size := measure(row)) <= MAX_ROW_CHARS:
        return row
    limit = f"tokenizing takes at most {MAX_ROW_CHARS:,} at a time"
    return ValueError(f"has {size:,} characters, and {limit}: divide the row, or leave it out")


def read(sources: Iterable[Source], encoder: Encoder) -> list[Examples]:
    """Encodes all rows of the sources in memory, one item for each block; ValueError for a source
    without any example."""
    pieces: list[Examples] = []
    for source in sources:
        opened = encoder.open(source)
        parts = [encoder(block) for block in opened.blocks()]
        if not any(map(len, parts)):
            report = sum((part.report for part in parts), EncodingReport())
            raise ValueError(f"{source.name} {report.explain_empty()}")
        pieces += parts
    return pieces


def collect(
    file: str,
    groups: Iterable[Group],
    report: EncodingReport = EncodingReport(),
    per_token: Mapping[str, DTypeLike] = SUPERVISED_COLUMN,
    per_example: Mapping[str, DTypeLike] = NO_COLUMNS,
) -> Examples:
    """Joins groups of examples, each from one line of the file, with columns of these dtypes.

    A value may be an array, if the whole column has one shape or is in PAD_VALUES. ValueError if an
    example lacks a column or has one that is not declared.
    """
    numbered = [(line, list(examples)) for line, examples in groups]
    examples = [example for _, group in numbered for example in group]
    lines = np.array([line for line, group in numbered for _ in group], dtype=np.int32)
    locations = [f"{file}:{line}" for line in lines.tolist()]
    lengths = [len(example.ids) for example in examples]
    ends = np.cumsum([0, *(len(group) for _, group in numbered)])
    return Examples(
        np.array([token for example in examples for token in example.ids], dtype=np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.stack([np.zeros_like(lines), lines], axis=1),
        (file,),
        _collect_columns(per_token, [e.per_token for e in examples], lengths, locations),
        _collect_columns(
            per_example,
            [{name: [value] for name, value in e.per_example.items()} for e in examples],
            [1] * len(examples),
            locations,
        ),
        None if len(ends) == len(examples) + 1 else ends,
        report,
    )


def _collect_columns(
    declared: Mapping[str, DTypeLike],
    values: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    locations: Sequence[str],
) -> dict[str, np.ndarray]:
    """Joins the columns of examples, `counts` values of each; ValueError if they do not fit."""
    for columns, location in zip(values, locations, strict=True):
        if not declared.keys() - FILL_VALUES.keys() <= columns.keys() <= declared.keys():
            names, accepted = (", ".join(keys) or "none" for keys in (columns, declared))
            raise ValueError(f"{location}: has the columns {names}, and not {accepted}")
    joined = {}
    for name, dtype in declared.items():
        if name in FILL_VALUES and not any(name in columns for columns in values):
            continue
        pieces = [np.zeros((0, 0) if name in PAD_VALUES else 0, dtype)]
        for columns, count, location in zip(values, counts, locations, strict=True):
            column = columns[name] if name in columns else np.full(count, FILL_VALUES[name])
            piece = np.array(column, dtype=dtype)
            if len(piece) != count:
                raise ValueError(f"{location}: {name} has {len(piece)} values for {count} tokens")
            shape, expected = piece.shape[1:], pieces[-1].shape[1:]
            if count and len(pieces) > 1 and shape != expected and name not in PAD_VALUES:
                text = f"a value of {name} has shape {shape}, not {expected} as before"
                raise ValueError(f"{location}: {text}")
            pieces += [piece] if count else []
        joined[name] = np.concatenate(pad_columns(name, pieces[1:] or pieces))
    return joined


# Columns whose values are lists of different lengths, and what fills the end of a shorter list
PAD_VALUES = {"teacher_tokens": -1, "teacher_logprobs": 0.0}


def pad_columns(name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pad the arrays [N, k] of a column in PAD_VALUES to the widest; return others as they are."""
    if name not in PAD_VALUES:
        return list(arrays)
    width = max(array.shape[1] for array in arrays)
    return [
        np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=PAD_VALUES[name])
        if a.shape[1] < width
        else a
        for a in arrays
    ]
