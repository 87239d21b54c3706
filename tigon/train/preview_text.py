"""A preview of data as text for a person: colored on a terminal, in brackets elsewhere."""

import os
from collections.abc import Iterator
from typing import TextIO

from tigon.data.examples import format_count
from tigon.train.config import Config
from tigon.train.preview import Preview, PreviewExample, PreviewRow, PreviewText
from tigon.utils.json import escape
from tigon.utils.terminal import escape_controls

DIM, GREEN, YELLOW, BOLD, RESET = "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"


def has_color(output: TextIO) -> bool:
    """Whether it is a terminal on which nobody has turned colors off (https://no-color.org)."""
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def format_preview(shown: Preview, config: Config, *, color: bool) -> Iterator[str]:
    """The lines of a preview.

    Without color, learned text is in [[...]], and [[x0.5|...]] has the weight 0.5; where the text
    itself has [[ or ]], a backslash divides them.
    """
    marks = f"{GREEN}learned{RESET} {DIM}not learned{RESET}" if color else "[[learned]] not learned"
    yield f"task={config.task} seq_len={config.seq_len}: {marks}"
    for row in shown.rows:
        yield ""
        yield from _row(row, config, color)
    if shown.warnings:
        yield ""
    for line in shown.warnings:
        yield _paint(f"note: {escape_controls(line)}", YELLOW, color)
    if config.bad_rows == "error" and any(row.error for row in shown.rows):
        yield "bad_rows=error: a run would end at the first bad row; bad_rows=skip leaves them out"


def _row(row: PreviewRow, config: Config, color: bool) -> Iterator[str]:
    where = escape(row.where)
    if row.error:
        yield _paint(f"--- {where}: bad row", BOLD, color)
        yield escape_controls(row.error)
    elif not row.examples:
        yield _paint(f"--- {where}: nothing to learn", BOLD, color)
    for number, example in enumerate(row.examples, start=1):
        name = example.name or (f"{number} of {len(row.examples)}" if len(row.examples) > 1 else "")
        head = f"--- {where}{' ' * bool(name)}{name}: {_describe(example, config)}"
        yield _paint(head, BOLD, color)
        yield "".join(_mark(piece, color) for piece in example.pieces)
        if end := _end(example):
            yield _paint(end, YELLOW, color)
    for note in row.notes:
        yield _paint(f"note: {escape_controls(note)}", YELLOW, color)


def _describe(example: PreviewExample, config: Config) -> str:
    learned = f"{example.learned:,} learned"
    if config.labels:
        learned = f"{example.learned:,} of them in the answer, whose score is learned"
    values = [f"{name} {_value(value)}" for name, value in example.values.items()]
    return ", ".join([format_count(example.tokens, "token"), learned, *values])


def _value(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"


def _end(example: PreviewExample) -> str:
    """What is said after the text of an example that a limit cuts."""
    lost = example.tokens - example.kept
    if not example.kept:
        return "--- left out of the run"
    if lost:
        learned = example.learned - example.kept_learned
        return f"--- cut here: {format_count(lost, 'token')} lost, {learned:,} of them learned"
    if example.rows > 1:
        return f"--- goes on in {format_count(example.rows - 1, 'more row')} of seq_len tokens"
    return ""


def _mark(piece: PreviewText, color: bool) -> str:
    text = escape_controls(piece.text)
    weight = "" if piece.weight in (0, 1) else f"x{piece.weight:.4g}"
    if color:
        before = f"{YELLOW}[{weight}]{RESET}" if weight else ""
        return before + _paint(text, GREEN if piece.weight else DIM, color)
    while "[[" in text or "]]" in text:
        text = text.replace("[[", r"[\[").replace("]]", r"]\]")
    if not piece.weight:
        return text
    return f"[[{weight}|{text}]]" if weight else f"[[{text}]]"


def _paint(text: str, code: str, color: bool) -> str:
    return f"{code}{text}{RESET}" if color else text
