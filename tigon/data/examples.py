"""Files to token ids and named columns of values, once, in memory.

# N tokens, E examples, G groups of examples
"""

import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.sources import read_chats, read_texts
from tigon.tokenizer import Tokenizer

BATCH = 1000  # documents that are tokenised together, in parallel
SUPERVISED = {"supervised": np.bool_}  # the column of the tokens that are to be learned
NONE: Mapping[str, Any] = MappingProxyType({})


class Example(NamedTuple):
    """The tokens of one sequence, and its values for the columns of both kinds."""

    ids: Sequence[int]
    per_token: Mapping[str, Any]  # as many values as ids
    per_example: Mapping[str, Any] = NONE  # one value


Group = tuple[int, int, Sequence[Example]]  # index of its file, its line, the examples of that line


@dataclass(frozen=True)
class Examples:
    """Tokenised examples, end to end, with columns of values per token and per example.

    The column "supervised" says which tokens are to be learned; without it, all are. Consecutive
    examples can form groups, such as a chosen and a rejected answer, which share a micro-batch.
    """

    tokens: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [E + 1], example e is tokens[offsets[e] : offsets[e + 1]]
    origin: np.ndarray  # int32 [E, 2], index into files, line
    files: tuple[str, ...]
    per_token: Mapping[str, np.ndarray]  # [N, ...] each
    per_example: Mapping[str, np.ndarray] = field(default_factory=dict)  # [E, ...] each
    groups: np.ndarray | None = None  # int64 [G + 1], offsets into the examples; None: no groups
    ignored_keys: tuple[str, ...] = ()  # keys of the files' rows that are not read

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def supervised(self) -> np.ndarray:
        """bool [N], the tokens that are to be learned."""
        if "supervised" in self.per_token:
            return self.per_token["supervised"]
        return np.ones(len(self.tokens), dtype=bool)

    def index(self, positions: np.ndarray) -> np.ndarray:
        """The example that holds each token position."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def where(self, position: int) -> str:
        """The "file:line" of the example that holds token `position`."""
        file, line = self.origin[self.index(np.asarray(position))]
        return f"{self.files[file]}:{line}"

    def fingerprint(self) -> int:
        """A checksum that changes with any token, value of a column, or group."""
        value = zlib.crc32(self.tokens.tobytes())
        for columns in (self.per_token, self.per_example):
            for name in sorted(columns):
                value = zlib.crc32(columns[name].tobytes(), value)
        return value if self.groups is None else zlib.crc32(self.groups.tobytes(), value)


def text_examples(files: Sequence[Path], tokenizer: Tokenizer, *, separator: str = "") -> Examples:
    """Documents for pretraining: every token is learned, and each document ends with eos."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no eos token to end a document with")

    ignored: set[str] = set()

    def read() -> Iterable[Group]:
        for i, file in enumerate(files):
            texts = read_texts(file, separator, ignored)
            while some := list(islice(texts, BATCH)):
                encoded = tokenizer.encode_batch([text for _, text in some])
                for (line, _), ids in zip(some, encoded, strict=True):
                    ids = ids if ids[-1:] == [eos] else [*ids, eos]
                    yield i, line, [Example(ids, {"supervised": [True] * len(ids)})]

    return collect(files, read(), ignored)


def chat_examples(files: Sequence[Path], tokenizer: Tokenizer) -> Examples:
    """Conversations for fine-tuning: only what the assistant says is learned."""

    ignored: set[str] = set()

    def read() -> Iterable[Group]:
        for i, file in enumerate(files):
            for line, (messages, tools) in read_chats(file, ignored):
                try:
                    ids, mask = tokenizer.encode_chat(messages, tools=tools)
                except ValueError as error:
                    raise ValueError(f"{file}:{line}: {error}") from error
                yield i, line, [Example(ids, {"supervised": mask})]

    return collect(files, read(), ignored)


def collect(
    files: Sequence[Path],
    groups: Iterable[Group],
    ignored: Iterable[str] = (),
    *,
    per_token: Mapping[str, DTypeLike] = SUPERVISED,
    per_example: Mapping[str, DTypeLike] = NONE,
) -> Examples:
    """Examples from groups of them, one group a line of a file, with columns of these dtypes.

    A value may be an array, if all of its column have one shape. ValueError if an example lacks
    a column or has another, and if a file has no rows.
    """
    tokens, offsets, origin, ends = array("i"), array("q", [0]), array("i"), array("q", [0])
    token_columns, example_columns = _Columns(per_token), _Columns(per_example)
    for file, line, examples in groups:
        where = f"{files[file]}:{line}"
        for ids, token_values, example_values in examples:
            tokens.extend(ids)
            token_columns.extend(token_values, len(ids), where)
            values = {name: [value] for name, value in example_values.items()}
            example_columns.extend(values, 1, where)
            offsets.append(len(tokens))
            origin.extend((file, line))
        if examples:
            ends.append(len(offsets) - 1)
    counts = np.bincount(np.array(origin[::2], dtype=np.int64), minlength=len(files))
    for path, count in zip(files, counts, strict=True):
        if not count:
            raise ValueError(f"{path} has no rows")
    return Examples(
        np.array(tokens, dtype=np.int32),
        np.array(offsets, dtype=np.int64),
        np.array(origin, dtype=np.int32).reshape(-1, 2),
        tuple(map(str, files)),
        token_columns.arrays(),
        example_columns.arrays(),
        None if len(ends) == len(offsets) else np.array(ends, dtype=np.int64),
        tuple(sorted(ignored)),
    )


class _Columns:
    """Values end to end in buffers: as Python objects they would take many times the memory."""

    def __init__(self, dtypes: Mapping[str, DTypeLike]):
        self.dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.buffers = {name: bytearray() for name in dtypes}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of one value

    def extend(self, values: Mapping[str, Any], count: int, where: str) -> None:
        if values.keys() != self.dtypes.keys():
            given, declared = (", ".join(names) or "none" for names in (values, self.dtypes))
            raise ValueError(f"{where}: has the columns {given}, and not {declared}")
        for name, dtype in self.dtypes.items():
            new = np.asarray(values[name], dtype=dtype)
            if len(new) != count:
                raise ValueError(f"{where}: {name} has {len(new)} values for {count} tokens")
            if not count:
                continue
            shape = self.shapes.setdefault(name, new.shape[1:])
            if new.shape[1:] != shape:
                raise ValueError(
                    f"{where}: a value of {name} has shape {new.shape[1:]}, not {shape} as before"
                )
            self.buffers[name] += new.tobytes()

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            name: np.frombuffer(bytes(buffer), self.dtypes[name]).reshape(
                -1, *self.shapes.get(name, ())
            )
            for name, buffer in self.buffers.items()
        }
