"""Files to token ids, once, in memory."""

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from tigon.data.sources import read_chats, read_texts
from tigon.tokenizer import Tokenizer

BATCH = 1000  # documents that are tokenised together, in parallel
Row = tuple[int, int, list[int], list[bool]]  # file, line, token ids, supervised


@dataclass(frozen=True)
class Examples:
    """Tokenised documents or conversations, end to end."""

    tokens: np.ndarray  # int32 [N]
    supervised: np.ndarray  # bool [N], the tokens that are to be learned
    offsets: np.ndarray  # int64 [E + 1], example e is tokens[offsets[e] : offsets[e + 1]]
    origin: np.ndarray  # int32 [E, 2], index into files, line
    files: tuple[str, ...]
    ignored_keys: tuple[str, ...] = ()  # keys of the files' rows that nothing here reads

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def where(self, position: int) -> str:
        """The "file:line" of the example that holds token `position`."""
        file, line = self.origin[np.searchsorted(self.offsets, position, side="right") - 1]
        return f"{self.files[file]}:{line}"

    def fingerprint(self) -> int:
        """A checksum that changes when any token or label does."""
        return zlib.crc32(self.supervised.tobytes(), zlib.crc32(self.tokens.tobytes()))


def text_examples(files: Sequence[Path], tokenizer: Tokenizer, *, separator: str = "") -> Examples:
    """Documents for pretraining: every token is learned, and each document ends with eos."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no eos token to end a document with")

    ignored: set[str] = set()

    def rows() -> Iterable[Row]:
        for i, file in enumerate(files):
            texts = read_texts(file, separator, ignored)
            while some := list(islice(texts, BATCH)):
                encoded = tokenizer.encode_batch([text for _, text in some])
                for (line, _), ids in zip(some, encoded, strict=True):
                    ids = ids if ids[-1:] == [eos] else [*ids, eos]
                    yield i, line, ids, [True] * len(ids)

    return _collect(files, rows(), ignored)


def chat_examples(files: Sequence[Path], tokenizer: Tokenizer) -> Examples:
    """Conversations for fine-tuning: only what the assistant says is learned."""

    ignored: set[str] = set()

    def rows() -> Iterable[Row]:
        for i, file in enumerate(files):
            for line, (messages, tools) in read_chats(file, ignored):
                try:
                    ids, mask = tokenizer.encode_chat(messages, tools=tools)
                except ValueError as error:
                    raise ValueError(f"{file}:{line}: {error}") from error
                yield i, line, ids, mask

    return _collect(files, rows(), ignored)


def _collect(files: Sequence[Path], rows: Iterable[Row], ignored: set[str]) -> Examples:
    tokens, supervised, offsets, origin = array("i"), bytearray(), array("q", [0]), array("i")
    for file, line, ids, mask in rows:
        tokens.extend(ids)
        supervised.extend(mask)
        offsets.append(len(tokens))
        origin.extend((file, line))
    counts = np.bincount(np.array(origin[::2], dtype=np.int64), minlength=len(files))
    for path, count in zip(files, counts, strict=True):
        if not count:
            raise ValueError(f"{path} has no rows")
    return Examples(
        np.array(tokens, dtype=np.int32),
        np.frombuffer(bytes(supervised), dtype=bool),
        np.array(offsets, dtype=np.int64),
        np.array(origin, dtype=np.int32).reshape(-1, 2),
        tuple(map(str, files)),
        tuple(sorted(ignored)),
    )
