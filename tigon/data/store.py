"""Examples in a directory of memory-mapped .npy files, written piece by piece, complete or absent.

# N tokens, E examples, G groups of examples
"""

import json
import mmap
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np

from tigon.data.disk import sync
from tigon.data.examples import FILLS, Examples, Report
from tigon.data.widths import widened, widest
from tigon.utils.json import read_json

VERSION = 1  # of the files; others are made anew
MANIFEST = "manifest.json"
CHUNK = 2**20  # values
TOKENS = "teacher_tokens"  # a column of tokens, besides those of the sequence
PACKAGES = ("numpy", "tokenizers")


@dataclass(frozen=True, eq=False)
class Part:
    """Examples, and what is known of them without reading them."""

    count: int  # examples
    tokens: int
    groups: int
    targets: int  # tokens that are predicted
    highest: int  # token
    columns: Mapping[str, Mapping[str, np.ndarray]]  # of both kinds: empty arrays, dtype and shape
    report: Report
    files: tuple[str, ...]

    def open(self) -> tuple[Examples, np.ndarray]:
        """The examples, and how many targets each has, int32 [E]."""
        raise NotImplementedError

    def identity(self) -> str:
        """Changes with the content."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Memory(Part):
    """Examples in memory."""

    examples: Examples

    @classmethod
    def of(cls, examples: Examples) -> "Memory":
        both = {"per_token": examples.per_token, "per_example": examples.per_example}
        return cls(
            len(examples),
            len(examples.tokens),
            len(examples) if examples.groups is None else len(examples.groups) - 1,
            int(count_targets(examples).sum()),
            int(examples.tokens.max(initial=-1)),
            {kind: {k: v[:0] for k, v in columns.items()} for kind, columns in both.items()},
            examples.report,
            examples.files,
            examples,
        )

    @cached_property
    def _targets(self) -> np.ndarray:
        return count_targets(self.examples)

    def open(self) -> tuple[Examples, np.ndarray]:
        return self.examples, self._targets

    def identity(self) -> str:
        return f"{self.examples.fingerprint():08x}"


@dataclass(frozen=True, eq=False)
class Stored(Part):
    """Examples in a directory."""

    directory: Path
    grouped: bool
    key: str

    @classmethod
    def at(cls, directory: Path, name: str | None = None) -> "Stored | None":
        """What `Store` has written; None if it is absent, damaged or of another version.

        `name` is what the only file is called now: the same content may have moved.
        """
        try:
            manifest = read_json(directory / MANIFEST)
            if manifest["version"] != VERSION:
                return None
            for file, size in manifest["bytes"].items():
                if not (path := directory / file).is_file() or path.stat().st_size != size:
                    return None
            columns = {
                kind: {k: np.empty((0, *shape), dtype) for k, (dtype, shape) in found.items()}
                for kind, found in manifest["columns"].items()
            }
            return cls(
                count=manifest["examples"],
                tokens=manifest["tokens"],
                groups=manifest["groups"],
                targets=manifest["targets"],
                highest=manifest["highest"],
                columns=columns,
                report=_report(manifest["report"]),
                files=tuple(manifest["files"]) if name is None else (name,),
                directory=directory,
                grouped=manifest["grouped"],
                key=manifest["key"],
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
            return None

    def open(self) -> tuple[Examples, np.ndarray]:
        def read(name: str) -> np.ndarray:
            return np.load(self.directory / f"{name}.npy", mmap_mode="r")

        columns = {
            kind: {name: read(f"{kind}-{name}") for name in found}
            for kind, found in self.columns.items()
        }
        examples = Examples(
            read("tokens"),
            read("offsets"),
            read("origin"),
            self.files,
            columns["per_token"],
            columns["per_example"],
            read("groups") if self.grouped else None,
            self.report,
        )
        return examples, read("targets")

    def identity(self) -> str:
        return self.key


def release(examples: Examples, targets: np.ndarray) -> None:
    """Give back the memory of what was read of mapped files; it stays in the system's cache."""
    columns = (*examples.per_token.values(), *examples.per_example.values())
    for array in (examples.tokens, examples.offsets, examples.origin, targets, *columns):
        mapped = getattr(array, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def count_targets(examples: Examples) -> np.ndarray:
    """int32 [E], the supervised tokens of each example but for its first."""
    before = np.concatenate([[0], np.cumsum(examples.supervised)])
    starts, stops = examples.offsets[:-1], examples.offsets[1:]
    return (before[stops] - before[np.minimum(starts + 1, stops)]).astype(np.int32)


class Store:
    """Writes examples into a new directory as they come."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True)
        self.directory = directory
        self.arrays: dict[str, _Array] = {}
        self.columns: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
            "per_token": {},
            "per_example": {},
        }
        self.files: dict[str, int] = {}
        self.count = self.tokens = self.groups = self.targets = 0
        self.highest = -1
        self.grouped = False
        self.report = Report()

    def append(self, examples: Examples) -> None:
        self.report += examples.report
        if not len(examples):
            return
        for kind, columns, before, new in (
            ("per_token", examples.per_token, self.tokens, len(examples.tokens)),
            ("per_example", examples.per_example, self.count, len(examples)),
        ):
            self._columns(kind, columns, before, new)
        files = np.array([self.files.setdefault(f, len(self.files)) for f in examples.files])
        file, line = np.asarray(examples.origin).T
        targets = count_targets(examples)
        if not self.count:
            self._array("offsets", np.zeros(0, np.int64)).append(np.zeros(1, np.int64))
        if examples.groups is not None and not self.grouped:
            self.grouped = True
            for some in _ranges(self.count + 1):
                self._array("groups", some).append(some)
        groups = np.arange(len(examples) + 1) if examples.groups is None else examples.groups
        values = {
            "tokens": examples.tokens,
            "offsets": examples.offsets[1:] + self.tokens,
            "origin": np.stack([files[file], line], axis=1).astype(np.int32),
            "targets": targets,
        }
        if self.grouped:
            values["groups"] = groups[1:] + self.count
        for name, value in values.items():
            self._array(name, value).append(value)
        self.tokens += len(examples.tokens)
        self.count += len(examples)
        self.groups += len(groups) - 1
        self.targets += int(targets.sum())
        others = [examples.per_token[TOKENS]] if TOKENS in examples.per_token else []
        highest = (int(tokens.max(initial=-1)) for tokens in (examples.tokens, *others))
        self.highest = max(self.highest, *highest)

    def finish(self, key: str, *, durable: bool = True, **more: Any) -> None:
        """Write what is left, and the manifest; when `durable`, wait until the disk has it."""
        for array in self.arrays.values():
            array.close(durable)
        sizes = {f"{n}.npy": (self.directory / f"{n}.npy").stat().st_size for n in self.arrays}
        manifest = {
            "version": VERSION,
            "key": key,
            "examples": self.count,
            "tokens": self.tokens,
            "groups": self.groups,
            "targets": self.targets,
            "highest": self.highest,
            "grouped": self.grouped,
            "columns": self.columns,
            "files": list(self.files),
            "report": self.report.to_dict(),
            "bytes": sizes,
            "made_by": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
            **more,
        }
        with (self.directory / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if durable:
            sync(self.directory)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays.values())

    def abandon(self) -> None:
        for array in self.arrays.values():
            array.abandon()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _array(self, name: str, like: np.ndarray) -> "_Array":
        if name not in self.arrays:
            self.arrays[name] = _Array(self.directory / f"{name}.npy", like.dtype, like.shape[1:])
        return self.arrays[name]

    def _columns(self, kind: str, columns: Mapping[str, np.ndarray], before: int, new: int) -> None:
        known = self.columns[kind]
        for name in {*known, *columns}:
            if name in columns:
                value = np.asarray(columns[name])
                if name not in known:
                    if before:
                        self._fill(f"{kind}-{name}", value, before, self._filler(name))
                    known[name] = (value.dtype.str, value.shape[1:])
                dtype, shape = known[name]
                if (wider := widest(name, shape, value.shape[1:])) != shape:
                    self._widen(name, f"{kind}-{name}", wider)
                    known[name] = (dtype, wider)
                value = widened(name, value, wider)
                if known[name] != (value.dtype.str, value.shape[1:]):
                    raise ValueError(
                        f"{', '.join(self.files)}: values of {name} have shape "
                        f"{value.shape[1:]}, not {known[name][1]} as before"
                    )
                self._array(f"{kind}-{name}", value).append(value)
            else:
                dtype, shape = known[name]
                self._fill(f"{kind}-{name}", np.empty((0, *shape), dtype), new, self._filler(name))

    def _widen(self, name: str, file: str, shape: tuple[int, ...]) -> None:
        """Write a column that is in PADS anew, with values of another width."""
        self.arrays.pop(file).close(durable=False)
        narrow = (self.directory / f"{file}.npy").rename(self.directory / "narrow.npy")
        values, size = np.load(narrow, mmap_mode="r"), max(1, CHUNK // shape[0])
        for start in range(0, len(values), size):
            some = widened(name, values[start : start + size], shape)
            self._array(file, some).append(some)
        narrow.unlink()

    def _filler(self, name: str) -> float:
        if name not in FILLS:
            raise ValueError(f"{', '.join(self.files)}: only some rows have the column {name}")
        return FILLS[name]

    def _fill(self, name: str, like: np.ndarray, count: int, value: float) -> None:
        array = self._array(name, like)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            array.append(np.full((size, *like.shape[1:]), value, like.dtype))


class _Array:
    """A .npy file that grows; NumPy leaves room in its header for the final length."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape, self.length, self.bytes = dtype, shape, 0, 0
        self.file: IO[bytes] = path.open("wb")
        self._header()

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, self.dtype)
        self.file.write(data.data if data.size else b"")
        self.length += len(values)
        self.bytes += data.nbytes

    def close(self, durable: bool) -> None:
        self.file.seek(0)
        self._header()
        self.file.flush()
        if durable:
            os.fsync(self.file.fileno())
        self.file.close()

    def abandon(self) -> None:
        with suppress(OSError):  # what could not be written still cannot
            self.file.close()

    def _header(self) -> None:
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, *self.shape), self.dtype))
        header["shape"] = (self.length, *self.shape)
        np.lib.format.write_array_header_1_0(self.file, header)


def _ranges(stop: int) -> Iterator[np.ndarray]:
    for start in range(0, stop, CHUNK):
        yield np.arange(start, min(start + CHUNK, stop))


def _report(values: dict[str, Any]) -> Report:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Report(**plain)
