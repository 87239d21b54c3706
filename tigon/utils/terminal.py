"""Text of unknown origin on a terminal, which follows control characters in place of showing them.

They could set its title or the clipboard, hide text, or show it in another order. File names,
messages of other libraries and what a model says all may have them. So the commands write through
`escaping_output`: nothing that is printed, warned or logged needs to think of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast

# C0, DEL and C1 but for tab and newline, line and paragraph separators, Unicode's Bidi_Control,
# and surrogates, which stand for the bytes of a file name that is not UTF-8
CODES = [*range(32), *range(127, 160), 0x2028, 0x2029, *range(0xD800, 0xE000)]
CODES += [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROL = {
    code: chr(code).encode("unicode_escape").decode() for code in CODES if chr(code) not in "\t\n"
}


def escape_controls(text: str) -> str:
    """Replaces control characters but tab and newline by what Python calls them, such as \\x1b."""
    return text.translate(CONTROL)


def one_line(text: object) -> str:
    """Formats a message to be printed as one line. Only where its next line is indented, as in a
    list of faults, a newline stays: in a file name it would begin another message.
    """
    first, *rest = str(text).rstrip().split("\n")
    lines = ["\n" + line if line.startswith("  ") else "\\n" + line for line in rest]
    return escape_controls(first + "".join(lines))


class _Escaping:
    """A text stream that escapes control characters, and keeps its first error."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes a text with control characters escaped, but for a carriage return at its start,
        with which a progress bar is written anew; returns its length."""
        # A progress bar returns to the begin of its line before it writes it anew
        returns = "\r" * text.startswith("\r")
        with self._named_error():
            self.stream.write(returns + escape_controls(text[len(returns) :].replace("\r\n", "\n")))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream; raises OSError, with its name, if it cannot be written."""
        with self._named_error():
            self.stream.flush()

    @contextmanager
    def _named_error(self) -> Iterator[None]:
        """Adds the stream's name to an OSError, and keeps it."""
        try:
            yield
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, self.stream.name)
            raise self.error from None


@contextmanager
def escaping_output() -> Iterator[None]:
    """Escapes control characters on standard output and standard error, in a pipe too."""
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, TextIOWrapper):  # text that a locale cannot write ends no command
        with suppress(OSError):  # of a closed pipe: the command will see it when it writes
            sys.stdout.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stdout, _Escaping):
        sys.stdout = cast(TextIO, _Escaping(sys.stdout))
    if not isinstance(sys.stderr, _Escaping):
        sys.stderr = cast(TextIO, _Escaping(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def check_output_written() -> None:
    """Raises the OSError of standard output under `escaping_output` that could not be written, also
    one that argparse or a log has dropped; but for a pipe that nobody reads any more."""
    error = sys.stdout.error if isinstance(sys.stdout, _Escaping) else None
    if error is not None and not isinstance(error, BrokenPipeError):
        raise error


def raw_stream(stream: TextIO) -> TextIO:
    """Returns the stream without `escaping_output`, for a text that a pipe gets unchanged."""
    return stream.stream if isinstance(stream, _Escaping) else stream
