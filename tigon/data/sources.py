"""Documents and conversations from files, each with the place it came from."""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]  # messages, tools


def find_files(patterns: str | Sequence[str]) -> list[Path]:
    """Paths and glob patterns, in the order given, each glob sorted; every one must match."""
    files = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        if not found:
            raise FileNotFoundError(f"no data file matches {pattern!r}")
        files += sorted(found)
    for file in files:
        if file.is_dir():
            raise IsADirectoryError(
                f"{file} is a directory; name its files, as in '{file}/*.jsonl'"
            )
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    return files


def read_texts(
    path: Path, separator: str = "", ignored: set[str] | None = None
) -> Iterator[tuple[int, str]]:
    """(line, text) of each document; keys of a row that are not read are added to `ignored`.

    A .jsonl file has one {"text": ...} a line. A .txt file is one document, or several that
    `separator` divides (blank ends are trimmed, empty documents skipped).
    """
    if path.suffix == ".jsonl":
        for line, row in _read_jsonl(path, {"text"}, ignored):
            if not isinstance(row.get("text"), str):
                raise ValueError(f'{path}:{line}: needs a string "text"; its keys are {_keys(row)}')
            yield line, row["text"]
        return
    if path.suffix != ".txt":
        raise ValueError(f"{path}: text data is read from .txt or .jsonl files")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    line = 1
    for document in text.split(separator) if separator else [text]:
        body = document.strip() if separator else document
        if body.strip():
            yield line + document[: document.index(body)].count("\n"), body
        line += (document + separator).count("\n")


def read_chats(path: Path, ignored: set[str] | None = None) -> Iterator[tuple[int, Chat]]:
    """(line, (messages, tools)) of each conversation of a .jsonl file; `ignored` as above.

    A row is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}, tools optional.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: chat data is read from .jsonl files, one conversation a line")
    for line, row in _read_jsonl(path, {"messages", "tools"}, ignored):
        where = f"{path}:{line}"
        messages, tools = row.get("messages"), row.get("tools")
        if not isinstance(messages, list):
            raise ValueError(f'{where}: needs a list "messages"; its keys are {_keys(row)}')
        if tools is not None and not isinstance(tools, list):
            raise ValueError(f'{where}: "tools" must be a list, not {type(tools).__name__}')
        yield line, (messages, tools)


def _read_jsonl(
    path: Path, known: set[str], ignored: set[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except ValueError as error:  # bad JSON and bad UTF-8 alike
                raise ValueError(f"{path}:{line}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{line}: needs a JSON object, not {type(row).__name__}")
            if ignored is not None:
                ignored |= row.keys() - known
            yield line, row


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"
