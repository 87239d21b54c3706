"""JSON files of unknown origin, read within limits, and values of them in messages."""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 16 * 2**20  # of a file, unless the caller knows better
MAX_VALUES = 3_200_000  # `[],` a million times over is small as a file only
MAX_DEPTH = 100
MAX_DIGITS = 100  # of a number; tokenizer_config.json's model_max_length has 31
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Path = str | os.PathLike[str]


class DuplicateKeyError(ValueError):
    """Names a key that an object has twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it names {quote(key)} twice")
        self.key = key


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, nan: bool = False) -> dict[str, Any]:
    """Reads the object in a JSON file; raises ValueError with the file's name as `parse_json` does.

    A file that is no regular file is refused before it is read, and one larger than `max_bytes`
    before it is parsed.
    """
    return parse_object(read_bytes(path, max_bytes), path, nan=nan)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Reads the bytes of a regular file; raises ValueError if it is another or has more."""
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{escape(path)} is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        size = f"{status.st_size} bytes, and such a file {max_bytes} at most"
        raise ValueError(f"{escape(path)} has {size}")
    return data


def _open(path: str, flags: int) -> int:
    """Opens a file without waiting, as a pipe would for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_object(data: bytes, name: Path, *, nan: bool = False) -> dict[str, Any]:
    """Parses JSON that must be an object; raises ValueError as `parse_json` does."""
    content = parse_json(data, name, nan=nan)
    if not isinstance(content, dict):
        raise ValueError(f"{escape(name)} is not a JSON object but {quote(content)}")
    return content


def parse_json(data: bytes, name: Path, *, nan: bool = False) -> Any:
    """Parses JSON in UTF-8. `name` begins every message.

    Raises ValueError for what is no JSON, has too many values, is nested too deeply, has a key
    twice, a number of too many digits, or half a surrogate pair; and unless `nan` is true, for NaN
    and infinity.
    """
    name = escape(name)
    if (values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise ValueError(f"{name} has about {values} values, and such a file {MAX_VALUES} at most")
    try:
        content = json.loads(
            data.decode(),
            object_pairs_hook=object_from_pairs,
            parse_int=_parse_int,
            parse_float=float if nan else _parse_float,
            parse_constant=float if nan else _parse_float,
        )
        _check_depth(content)
        if SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH} levels") from None
    except DuplicateKeyError as error:
        raise ValueError(f"{name}: {error}") from None
    except UnicodeEncodeError as error:
        text = quote(error.object[error.start : error.end])
        raise ValueError(f"{name} has {text}, which is half a surrogate pair") from None
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{name} is not valid JSON: {escape(error)}") from None
    return content


def object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object, as object_pairs_hook of `json.loads`; raises DuplicateKeyError."""
    result = dict(pairs)
    if len(result) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise DuplicateKeyError(key)
    return result


def _parse_int(text: str) -> int:
    """Parses a whole number; raises ValueError if it has more than MAX_DIGITS characters."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    """Parses a number; raises ValueError if it is NaN or infinite."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{escape(text, 20)} is not a finite number")
    return value


def _check_depth(content: Any) -> None:
    """Raises RecursionError for JSON that is nested deeper than MAX_DEPTH."""
    level = [content]
    for _ in range(MAX_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = [v for c in containers for v in (c.values() if isinstance(c, dict) else c)]
    if any(isinstance(value, dict | list) for value in level):
        raise RecursionError


def quote(value: Any, limit: int = 100) -> str:
    """Formats a value of a file for a message: as Python writes it (text in quotes, control
    characters escaped), cut behind `limit` characters and the quotes."""
    try:
        return escape(repr(value), limit + 2)
    except (RecursionError, ValueError):  # of many levels, or of thousands of digits
        return f"a value too large to show ({type(value).__name__})"


def escape(text: object, limit: int = 1000) -> str:
    """Formats a path or another library's message for a message: as `quote`, without quotes."""
    text = str(text)
    plain = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )
    return f"{plain}..." if len(text) > limit else plain


def list_first(texts: Sequence[str], most: int = 3) -> str:
    """Returns the first texts, with commas between them, and how many follow."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"
