"""`tigon data pack` fills the cache before a run needs it, and `tigon data show` previews the first
rows of a run's data as text, with what is learned of them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from tigon.data import Encoder, Examples, PairEncoder, Window, cache_root
from tigon.data.examples import EncodingReport, format_count
from tigon.data.formats import Row
from tigon.data.mixture import Corpus
from tigon.data.packing import TruncationStats
from tigon.data.sources import Block
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer, common_prefix_length
from tigon.train.build import load_tokenizer
from tigon.train.data import (
    build_loader,
    describe_truncation,
    find_entry_sources,
    set_share_prompts,
)
from tigon.train.distributed import World, start
from tigon.train.model import check_context
from tigon.train.resume import start_time
from tigon.train.tasks import TASKS, Task
from tigon.utils.json import escape
from tigon.utils.terminal import escape_controls

DIM, GREEN, YELLOW, BOLD, RESET = "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"


def pack(config: Config) -> None:
    """Fills the cache with the training and held-out data, tokenized, and prints how many examples,
    tokens and rows they have and where the cache is."""
    config = replace(config, micro_batch_size=1)  # which nothing here depends on
    if config.streaming:
        raise ValueError("streaming=true has no cache to make: leave it out")
    with start("cpu") as world:
        task = TASKS[config.task](config, world)
        tokenizer = load_tokenizer(config)
        tokenizer.strftime_now = start_time(None, world)
        check_context(config)
        build_loader(task, config.data, tokenizer)
        if config.held_out:
            build_loader(task, config.held_out, tokenizer, held_out=True)
    print(f"the cache is in {Path(cache_root(), 'data')}")


@dataclass(frozen=True)
class PreviewText:
    """Text whose tokens have one weight in the loss; it is not learned if that is 0."""

    text: str
    weight: float


@dataclass(frozen=True)
class PreviewExample:
    """One sequence of tokens that a row becomes."""

    pieces: tuple[PreviewText, ...]  # the text of its first row of seq_len tokens
    tokens: int
    learned: int  # tokens with a weight above 0, those that are cut off too
    kept: int  # tokens that the run reads; 0: the example is left out
    kept_learned: int
    rows: int  # rows of seq_len that these tokens are in
    name: str = ""  # chosen or rejected, of a pair
    values: Mapping[str, float] = field(default_factory=dict)  # such as the advantage of an answer


@dataclass(frozen=True)
class PreviewRow:
    """A row of the data, and the examples that it becomes."""

    where: str  # file:line
    examples: tuple[PreviewExample, ...] = ()
    error: str = ""  # why it is a bad row
    notes: tuple[str, ...] = ()  # special tokens in its text


@dataclass(frozen=True)
class Preview:
    """The first rows of each entry of `data`, and what a person should know of them."""

    rows: tuple[PreviewRow, ...]
    warnings: tuple[str, ...]


def preview(config: Config, count: int = 5) -> Preview:
    """Returns the first `count` rows of each entry of `data`, as the run would train on them.

    Reads the tokenizer and no more of the data than these rows; of the model its config.json where
    preference pairs may share a prompt, and no weights. Raises ValueError for settings or data with
    which no run would begin.
    """
    if count < 1:
        raise ValueError(f"-n {count} must be at least 1")
    task = TASKS[config.task](config, World(0, 1, torch.device("cpu")))
    tokenizer = load_tokenizer(config)
    with suppress(OSError, ValueError):  # a directory with nothing but a tokenizer will do
        set_share_prompts(task, None)
    encoder = task.encoder(tokenizer)
    encoder.skip_bad_rows = True  # to show the others
    rows, report, truncation = [], EncodingReport(), TruncationStats()
    try:  # of the hub too, only the first rows are fetched
        sources = find_entry_sources(config, config.data, streaming=True)
    except ValueError:  # such as a slice that counts from the end
        sources = find_entry_sources(config, config.data, streaming=config.streaming)
    for of_entry in sources:
        opened = map(encoder.open, of_entry)
        numbered = ((source, line, row) for source in opened for line, row in source.rows())
        for source, line, row in islice(numbered, count):
            examples = encoder(Block(source.name, source.format, ((line, row),)))
            report += examples.report
            previews, of_row = _preview_examples(examples, task, encoder, tokenizer)
            truncation += of_row
            notes: tuple[str, ...] = ()
            if isinstance(row, dict):
                ignored = encoder.ignored(row, source.format)
                notes = tuple(find_special_tokens(row, tokenizer, ignored))
            error = "".join(examples.report.errors).removeprefix(f"{source.name}:{line}: ")
            rows.append(PreviewRow(f"{source.name}:{line}", previews, error, notes))
    if config.bad_rows == "error":  # each says so itself, and none is skipped
        report = replace(report, skipped=0, empty=0, errors=())
    warnings = [*describe_truncation(config, truncation, task.unit), *report.lines()]
    return Preview(tuple(rows), tuple(warnings))


def _preview_examples(
    examples: Examples, task: Task, encoder: Encoder, tokenizer: Tokenizer
) -> tuple[tuple[PreviewExample, ...], TruncationStats]:
    """Returns the examples of one row, and what the limits of the run cut or leave out."""
    if not len(examples):
        return (), TruncationStats()
    rows = task.rows(Window.from_groups(Corpus([examples]), np.arange(examples.num_groups)))
    names = ("chosen", "rejected") if isinstance(encoder, PairEncoder) else ()
    previews = []
    for i, (first, stop) in enumerate(zip(examples.offsets, examples.offsets[1:], strict=False)):
        values = {name: column[i].item() for name, column in examples.per_example.items()}
        if not values.pop("matched", True):
            continue  # of another row, for KTO's estimate alone
        ids = examples.tokens[first:stop].tolist()
        weights = examples.supervised[first:stop].astype(float)
        if "loss_weights" in examples.per_token:
            weights *= examples.per_token["loss_weights"][first:stop]
        spans = rows.spans[(rows.spans[:, 0] >= first) & (rows.spans[:, 0] < stop)] - first
        weights[[0, *spans[:, 0]]] = 0  # nothing predicts the first token
        ends = [0, *sorted(spans[:, 1].tolist())]
        end = ends[1] if ends[1:] else min(len(ids), task.config.seq_len)
        previews.append(
            PreviewExample(
                tuple(_split_by_weight(ids[:end], weights[:end].tolist(), tokenizer)),
                tokens=len(ids),
                learned=int((weights > 0).sum()),
                kept=ends[-1],
                kept_learned=int((weights[: ends[-1]] > 0).sum()),
                rows=len(ends) - 1,
                name=names[i] if names else "",
                values=values,
            )
        )
    return tuple(previews), rows.truncation


def _split_by_weight(
    ids: list[int], weights: list[float], tokenizer: Tokenizer
) -> Iterator[PreviewText]:
    """Yields the text of tokens, divided where the weight changes.

    A piece is what its tokens add to the text before them, since decoders treat the beginning of a
    text specially. A character that only later tokens complete is in their piece.
    """
    text, end, at = tokenizer.decode(ids), 0, 0
    whole = [(0, 0), (0, 0)]  # tokens and characters up to the last two places between characters
    for weight, tokens in groupby(weights):
        end += len(list(tokens))
        (before, _), (start, stop) = whole
        known = tokenizer.decode(ids[before:start])
        added = tokenizer.decode(ids[before:end])[len(known) :]
        if text.startswith(added, stop):
            whole = [whole[1], (end, stop := stop + len(added))]
        else:  # the end is inside a character
            stop = common_prefix_length(tokenizer.decode(ids[:end]), text)
        stop = len(text) if end == len(ids) else stop
        if stop > at:
            yield PreviewText(text[at:stop], weight)
            at = stop


def find_special_tokens(row: Row, tokenizer: Tokenizer, ignored: set[str]) -> Iterator[str]:
    """Yields a line for each text of a row that the tokenizer makes special tokens of."""
    backend = tokenizer.backend
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    named = map(backend.token_to_id, tokenizer.special_tokens.values())
    special |= {i for i in named if i is not None}
    for path, text in _find_texts(row, "", "", ignored):
        with suppress(ValueError):  # no Unicode: a bad row, which says so itself
            ids = tokenizer.encode(text, add_special_tokens=False)
            if found := dict.fromkeys(i for i in ids if i in special):
                names = ", ".join(str(backend.id_to_token(i)) for i in found)
                yield f"special tokens in the text of {path}: {names}"


def _find_texts(value: Any, path: str, key: str, ignored: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the texts in a value with their paths, such as messages[0].content."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            full = f"{key}.{name}" if key else str(name)
            if full not in ignored:
                inner_path = f"{path}.{name}" if path else str(name)
                yield from _find_texts(inner, inner_path, full, ignored)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _find_texts(inner, f"{path}[{i}]", key, ignored)


# As text: colored on a terminal, in brackets elsewhere


def has_color(output: TextIO) -> bool:
    """Returns whether it is a terminal and colors are not turned off (https://no-color.org)."""
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def format_preview(content: Preview, config: Config, *, color: bool) -> Iterator[str]:
    """Yields the lines of a preview.

    Without color, learned text is in [[...]], and [[x0.5|...]] has the weight 0.5; where the text
    itself has [[ or ]], a backslash divides them.
    """
    marks = f"{GREEN}learned{RESET} {DIM}not learned{RESET}" if color else "[[learned]] not learned"
    yield f"task={config.task} seq_len={config.seq_len}: {marks}"
    for row in content.rows:
        yield ""
        yield from _format_row(row, config, color)
    if content.warnings:
        yield ""
    for line in content.warnings:
        yield _paint(f"note: {escape_controls(line)}", YELLOW, color)
    if config.bad_rows == "error" and any(row.error for row in content.rows):
        yield "bad_rows=error: a run would end at the first bad row; bad_rows=skip leaves them out"


def _format_row(row: PreviewRow, config: Config, color: bool) -> Iterator[str]:
    """Yields the lines that show a row: its place, its tokens, and what is learned of them."""
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
        if end := _describe_cut(example):
            yield _paint(end, YELLOW, color)
    for note in row.notes:
        yield _paint(f"note: {escape_controls(note)}", YELLOW, color)


def _describe(example: PreviewExample, config: Config) -> str:
    """Returns a text with an example's tokens, those that are learned, and its values."""
    learned = f"{example.learned:,} learned"
    if config.labels:
        learned = f"{example.learned:,} of them in the answer, whose score is learned"
    values = [
        f"{name} {str(value).lower() if isinstance(value, bool) else f'{value:.4g}'}"
        for name, value in example.values.items()
    ]
    return ", ".join([format_count(example.tokens, "token"), learned, *values])


def _describe_cut(example: PreviewExample) -> str:
    """Returns a line on an example that is cut, left out or in several rows; else ""."""
    if not example.kept:
        return "--- left out of the run"
    if lost := example.tokens - example.kept:
        learned = example.learned - example.kept_learned
        return f"--- cut here: {format_count(lost, 'token')} lost, {learned:,} of them learned"
    if example.rows > 1:
        return f"--- goes on in {format_count(example.rows - 1, 'more row')} of seq_len tokens"
    return ""


def _mark(piece: PreviewText, color: bool) -> str:
    """Returns the text with control characters escaped, marked as learned or not by color, or
    without `color` in brackets if it is learned; a weight other than 0 and 1 stands before it."""
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
    """Returns the text between the terminal's `code` and RESET, or without `color` unchanged."""
    return f"{code}{text}{RESET}" if color else text
