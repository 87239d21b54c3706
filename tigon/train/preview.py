"""The first rows of a run's data as text, with what is learned of them: `tigon data show`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch

from tigon.data import Encoder, Examples, PairEncoder, Source, Window
from tigon.data.examples import EncodingReport
from tigon.data.formats import Row
from tigon.data.mixture import Corpus
from tigon.data.packing import TruncationStats
from tigon.data.sources import Block
from tigon.tokenizer import Tokenizer, common_prefix_length
from tigon.train import sharing
from tigon.train.build import load_tokenizer
from tigon.train.config import Config
from tigon.train.data import as_entries, find_entry_sources, limits
from tigon.train.distributed import World
from tigon.train.tasks import Task, find_task


@dataclass(frozen=True)
class PreviewText:
    """Text whose tokens have one weight in the loss; 0: it is not learned."""

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
    """The first `count` rows of each entry of `data`, as the run would train on them.

    Reads the tokenizer and no more of the data than these rows; of the model its config.json where
    preference pairs may share a prompt, and no weights. Raises ValueError for settings or data with
    which no run would begin.
    """
    if count < 1:
        raise ValueError(f"-n {count} must be at least 1")
    task = find_task(config.task)(config, World(0, 1, torch.device("cpu")))
    tokenizer = load_tokenizer(config)
    with suppress(OSError, ValueError):  # a directory with nothing but a tokenizer will do
        sharing.set_share_prompts(task, None)
    encoder = task.encoder(tokenizer)
    encoder.skip_bad_rows = True  # to show the others
    rows, report, truncation = [], EncodingReport(), TruncationStats()
    entries = as_entries(config, config.data)
    try:  # of the hub too, only the first rows are fetched
        found = find_entry_sources(config, entries, streaming=True)
    except ValueError:  # such as a slice that counts from the end
        found = find_entry_sources(config, entries, streaming=config.streaming)
    for sources in found:
        for source, line, row in islice(_rows(sources, encoder), count):
            examples = encoder(Block(source.name, source.format, ((line, row),)))
            report += examples.report
            shown, of_row = _examples(examples, task, encoder, tokenizer)
            truncation += of_row
            notes: tuple[str, ...] = ()
            if isinstance(row, dict):
                ignored = encoder.ignored(row, source.format)
                notes = tuple(special_tokens(row, tokenizer, ignored))
            error = "".join(examples.report.errors).removeprefix(f"{source.name}:{line}: ")
            rows.append(PreviewRow(f"{source.name}:{line}", shown, error, notes))
    if config.bad_rows == "error":  # each says so itself, and none is skipped
        report = replace(report, skipped=0, empty=0, errors=())
    warnings = [*limits(config, truncation, task.unit), *report.lines()]
    return Preview(tuple(rows), tuple(warnings))


def _rows(
    sources: Sequence[Source], encoder: Encoder
) -> Iterator[tuple[Source, int, Row | ValueError]]:
    for source in map(encoder.open, sources):
        for line, row in source.rows():
            yield source, line, row


def _examples(
    examples: Examples, task: Task, encoder: Encoder, tokenizer: Tokenizer
) -> tuple[tuple[PreviewExample, ...], TruncationStats]:
    """Those of one row, and what the limits of the run take away from them."""
    if not len(examples):
        return (), TruncationStats()
    rows = task.rows(Window.of(Corpus([examples]), np.arange(examples.num_groups)))
    names = ("chosen", "rejected") if isinstance(encoder, PairEncoder) else ()
    shown = []
    for i, (start, stop) in enumerate(zip(examples.offsets, examples.offsets[1:], strict=False)):
        values = {name: column[i].item() for name, column in examples.per_example.items()}
        if not values.pop("matched", True):
            continue  # of another row, for KTO's estimate alone
        ids = examples.tokens[start:stop].tolist()
        weights = examples.supervised[start:stop].astype(float)
        if "loss_weights" in examples.per_token:
            weights *= examples.per_token["loss_weights"][start:stop]
        spans = rows.spans[(rows.spans[:, 0] >= start) & (rows.spans[:, 0] < stop)] - start
        weights[[0, *spans[:, 0]]] = 0  # nothing predicts the first token
        ends = [0, *sorted(spans[:, 1].tolist())]
        end = ends[1] if ends[1:] else min(len(ids), task.config.seq_len)
        shown.append(
            PreviewExample(
                tuple(_pieces(ids[:end], weights[:end].tolist(), tokenizer)),
                tokens=len(ids),
                learned=int((weights > 0).sum()),
                kept=ends[-1],
                kept_learned=int((weights[: ends[-1]] > 0).sum()),
                rows=len(ends) - 1,
                name=names[i] if names else "",
                values=values,
            )
        )
    return tuple(shown), rows.truncation


def _pieces(ids: list[int], weights: list[float], tokenizer: Tokenizer) -> Iterator[PreviewText]:
    """The text of tokens, divided where the weight changes.

    Each piece is what its tokens add to the text before them, since decoders treat the beginning of
    a text specially. A character that only later tokens complete is in their piece.
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


def special_tokens(row: Row, tokenizer: Tokenizer, ignored: set[str]) -> Iterator[str]:
    """A line for each text of a row that the tokenizer makes special tokens of; keys that are
    `ignored` are not looked at."""
    backend = tokenizer.backend
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    named = tokenizer.special_tokens.values()
    special |= {i for i in map(backend.token_to_id, named) if i is not None}
    for path, text in _texts(row, "", "", ignored):
        with suppress(ValueError):  # no Unicode: a bad row, which says so itself
            ids = tokenizer.encode(text, add_special_tokens=False)
            found = dict.fromkeys(i for i in ids if i in special)
            if found:
                names = ", ".join(str(backend.id_to_token(i)) for i in found)
                yield f"special tokens in the text of {path}: {names}"


def _texts(value: Any, path: str, key: str, ignored: set[str]) -> Iterator[tuple[str, str]]:
    """The texts in a value, with where they are, such as messages[0].content."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            full = f"{key}.{name}" if key else str(name)
            if full not in ignored:
                yield from _texts(inner, f"{path}.{name}" if path else str(name), full, ignored)
    elif isinstance(value, list):
        each = (_texts(inner, f"{path}[{i}]", key, ignored) for i, inner in enumerate(value))
        yield from chain.from_iterable(each)
