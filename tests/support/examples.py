"""Examples of several blocks as one, and a checksum of them, to compare ways of encoding."""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from tigon.data.examples import EncodingReport, Examples, pad_columns


def join(pieces: Sequence[Examples]) -> Examples:
    """Concatenates examples; where one lacks a column, fill in the value in FILL_VALUES."""
    files = tuple(dict.fromkeys(file for piece in pieces for file in piece.files))
    origins = []
    for piece in pieces:
        indices = np.array([files.index(file) for file in piece.files], dtype=np.int32)
        origins.append(np.stack([indices[piece.origin[:, 0]], piece.origin[:, 1]], axis=1))

    def ends(offsets: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(o) for o in offsets]))])

    def columns(kind: str) -> dict[str, np.ndarray]:
        names = dict.fromkeys(name for piece in pieces for name in getattr(piece, kind))
        arrays = {name: [piece.column(kind, name) for piece in pieces] for name in names}
        return {name: np.concatenate(pad_columns(name, values)) for name, values in arrays.items()}

    grouped = any(piece.groups is not None for piece in pieces)
    return Examples(
        np.concatenate([piece.tokens for piece in pieces]),
        ends(piece.offsets for piece in pieces),
        np.concatenate(origins),
        files,
        columns("per_token"),
        columns("per_example"),
        ends(np.arange(len(p) + 1) if p.groups is None else p.groups for p in pieces)
        if grouped
        else None,
        sum((piece.report for piece in pieces), EncodingReport()),
    )


def fingerprint(examples: Examples) -> int:
    """A checksum that changes with any token, value of a column, or group."""
    value = zlib.crc32(examples.tokens.tobytes())
    for columns in (examples.per_token, examples.per_example):
        for name in sorted(columns):
            value = zlib.crc32(columns[name].tobytes(), value)
    return value if examples.groups is None else zlib.crc32(examples.groups.tobytes(), value)
