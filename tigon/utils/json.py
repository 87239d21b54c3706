"""JSON that others have written: read within bounds, and shown in messages without harm."""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MOST_BYTES = 16 * 2**20  # of a file, unless the caller knows better
MOST_MEMORY = 768 * 2**20  # bytes, as `_check_memory` estimates it
VALUE_BYTES = 250  # memory of one value with its key, its text aside
MOST_DEPTH = 100
MOST_DIGITS = 100  # of a number; tokenizer_config.json's model_max_length has 31
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Path = str | os.PathLike[str]


def read_json(path: Path, *, most_bytes: int = MOST_BYTES, nan: bool = False) -> dict[str, Any]:
    """The object in a JSON file; raises ValueError with the file's name as `parse_json` does.

    A file that is larger than `most_bytes` or no regular file is refused before it is read.
    """
    return parse_object(read_bytes(path, most_bytes), path, nan=nan)


def parse_object(data: bytes, where: Path, *, nan: bool = False) -> dict[str, Any]:
    """As `parse_json`, for what must be an object."""
    content = parse_json(data, where, nan=nan)
    if not isinstance(content, dict):
        raise ValueError(f"{escape(where)} is not a JSON object but {_KINDS[type(content)]}")
    return content


def parse_json(data: bytes, where: Path, *, nan: bool = False) -> Any:
    """The content of JSON in UTF-8. `where` it is from begins every message.

    Raises ValueError for what is no JSON, takes too much memory, is nested too deeply, names a key
    twice, has a number of too many digits, or text that UTF-8 cannot hold (half a surrogate pair);
    unless `nan` is true, for NaN and infinity too.
    """
    name = escape(where)
    _check_memory(data, name)
    refused: list[_Refused] = []
    parse_float, parse_constant = (float, float) if nan else (_finite(refused), _constant(refused))
    try:
        content = json.loads(
            data.decode(),
            object_pairs_hook=object_from_pairs,
            parse_int=_whole(refused),
            parse_float=parse_float,
            parse_constant=parse_constant,
        )
    except RecursionError:
        raise ValueError(f"{name} is nested deeper than {MOST_DEPTH} levels") from None
    except DuplicateKeyError as error:
        raise ValueError(f"{name}: {error}") from None
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{name} is not valid JSON: {escape(error)}") from None
    _check_depth(content, name)
    if refused or _SURROGATE.search(data):
        _check_leaves(content, name)
    return content


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file that has at most so many."""
    with open(path, "rb", opener=_open) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{escape(path)} is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(
            f"{escape(path)} has {found.st_size} bytes, and such a file {most_bytes} at most"
        )
    return data


class DuplicateKeyError(ValueError):
    """A key that an object names twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it names {quote(key)} twice")
        self.key = key


def object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, as `json.loads` calls its object_pairs_hook; raises Twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return result


def quote(value: Any, most: int = 100) -> str:
    """A value of a file, for a message: as Python writes it (text in quotes, control characters
    and terminal escapes escaped), cut behind `most` characters."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most + 2:  # the quotes
            return f"{text[:most]}..."
    return text


def escape(text: object, most: int = 1000) -> str:
    """As `shown`, without quotes: for paths and other libraries' messages."""
    text = str(text)
    plain = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most]
    )
    return f"{plain}..." if len(text) > most else plain


class _Refused:
    """In the place of a number that is refused, until its key is known."""

    def __init__(self, fault: str) -> None:
        self.fault = fault


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
    _Refused: "a number",
}


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer


def _check_memory(data: bytes, name: str) -> None:
    """Before parsing: `[],` a million times over is small as a file only."""
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    width = 1 if data.isascii() and b"\\u" not in data else 4  # of a character in memory
    if 2 * width * len(data) + VALUE_BYTES * values > MOST_MEMORY:
        raise ValueError(
            f"{name} has {len(data)} bytes with about {values} values, more than are read: "
            f"they could take {MOST_MEMORY // 2**20} MiB of memory"
        )


def _whole(refused: list[_Refused]) -> Callable[[str], int | _Refused]:
    def parse(text: str) -> int | _Refused:
        if len(text) <= MOST_DIGITS:
            return int(text)
        refused.append(_Refused(f"is a number of {len(text)} digits"))
        return refused[-1]

    return parse


def _finite(refused: list[_Refused]) -> Callable[[str], float | _Refused]:
    def parse(text: str) -> float | _Refused:
        value = float(text)
        if math.isfinite(value):
            return value
        refused.append(_Refused(f"is {escape(text, 20)}, which no number can hold"))
        return refused[-1]

    return parse


def _constant(refused: list[_Refused]) -> Callable[[str], _Refused]:
    def parse(text: str) -> _Refused:
        refused.append(_Refused(f"is {text}, which JSON does not have"))
        return refused[-1]

    return parse


def _check_depth(content: Any, name: str) -> None:
    level = _containers([content])
    for _ in range(MOST_DEPTH):
        level = _containers(
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
        )
        if not level:
            return
    raise ValueError(f"{name} is nested deeper than {MOST_DEPTH} levels")


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


def _check_leaves(content: Any, name: str) -> None:
    """Raises for the first refused number or text, with its key."""
    for key, value in _leaves(content):
        where = f"{name}: {key}" if key else name
        if isinstance(value, _Refused):
            raise ValueError(f"{where} {value.fault}")
        if isinstance(value, str) and not _is_utf8(value):
            raise ValueError(f"{where} is {quote(value)}, which has half a surrogate pair")


def _leaves(content: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values that are no container, in order, with the path to each."""
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            for key in value:
                if not _is_utf8(key):
                    yield path, key
            dot = f"{path}." if path else ""
            stack += [(f"{dot}{escape(k, 100)}"[-300:], v) for k, v in reversed(value.items())]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", value[i]) for i in reversed(range(len(value)))]
        else:
            yield path, value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pieces(value: Any, most: int) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield repr(value[: most + 3])  # so that `shown` sees that it is cut
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _pieces(key, most)
            yield ": "
            yield from _pieces(item, most)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "[" if isinstance(value, list) else "("
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(item, most)
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    elif isinstance(value, int) and value.bit_length() > 4 * most:
        yield f"a number of {value.bit_length()} bits"
    else:
        yield escape(repr(value), most + 3)
