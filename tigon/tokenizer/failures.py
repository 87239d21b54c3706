"""What the tokenizers library raises, as errors that name the file."""

from contextlib import suppress
from pathlib import Path
from types import TracebackType

import tokenizers

from tigon.utils.json import escape

PROBE = "A probe: 1, 2\n"


class Failures:
    """`with Failures(path):` makes a ValueError of what the library raises where it fails.

    Its own errors are plain Exceptions, such as of a token that its vocabulary lacks; a panic of
    its Rust code is no Exception at all.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.where = "" if path is None else f"{escape(path)}: "

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is Exception or is_panic(kind):
            raise ValueError(f"{self.where}the tokenizer failed: {escape(error)}") from None


def check_runs(backend: tokenizers.Tokenizer) -> None:
    """ValueError if the library panics on a plain text, with the part of the file that does it.

    What fails on other texts only, such as those with accents, is an error when it does; so is a
    text that the tokenizer has no token for.
    """
    found = _panic(backend)
    if not found:
        return
    for part in ("decoder", "post_processor", "normalizer", "pre_tokenizer"):
        setattr(backend, part, None)  # it is refused in any case
        if not _panic(backend):
            break
    else:
        part = "model"
    raise ValueError(f"its {part} makes the library fail on the text {PROBE!r}: {found}")


def _panic(backend: tokenizers.Tokenizer) -> str:
    try:
        with suppress(Exception):
            backend.decode([])  # what a stream ends with
            backend.decode(backend.encode(PROBE).ids)
    except BaseException as error:
        if not is_panic(type(error)):
            raise
        return escape(error) or "panic"
    return ""


def is_panic(kind: type[BaseException] | None) -> bool:
    return kind is not None and kind.__name__ == "PanicException"
