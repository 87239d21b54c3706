"""Texts and conversations to examples."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import DTypeLike

from tigon.data.content_check import ContentCheck, EmptyAnswer
from tigon.data.examples import WEIGHTED, Encoder, Example, Report
from tigon.data.formats import CHATS, TEXTS, Chat, Format, Row, Text, as_chat, as_text
from tigon.data.messages import read_json
from tigon.data.sources import Source
from tigon.json_file import escaped
from tigon.tokenizer import REASONING, Span, Tokenizer, TrainOn, learned_turns

VERSION = 2  # of what these make of a row; another one makes caches anew
TRIED = 100  # rows that may be bad before a source is refused, where bad rows are skipped

MESSAGE_KEYS = {"role", "content", "weight", "train"}


class FormatEncoder(Encoder):
    """Rows in one of the formats of `formats.py`."""

    per_token: Mapping[str, DTypeLike] = WEIGHTED
    formats: Sequence[str] = ()

    def __init__(self, tokenizer: Tokenizer, *, skip_bad_rows: bool = False):
        # A copy: the end of a turn may become the tokenizer's eos when training begins
        self.tokenizer, self.eos = copy(tokenizer), tokenizer.eos_token_id
        self.skip_bad_rows = skip_bad_rows

    def open(self, source: Source) -> Source:
        """The source with the format of its rows, told from the first one."""
        first = None
        for tried, (line, row) in enumerate(source.rows()):
            try:
                if isinstance(row, ValueError):
                    raise row
                form = self.told(row, source.format)
                return source.as_format(self.begin(row, form))
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                what = "is nested too deeply" if deep else escaped(error)
                first = first or ValueError(f"{source.name}:{line}: {what}")
                if not self.skip_bad_rows or tried == TRIED:
                    raise first from error
        raise first or ValueError(f"{source.name} has no rows")

    def told(self, row: Row, form: Format) -> Format:
        """The format of a row, one of `formats`; ValueError if none or several fit."""
        return form.told(row, self.formats)

    def begin(self, row: Row, form: Format) -> Format:
        """The format of a source with this first row."""
        return form

    def ended(self, ids: list[int]) -> list[int]:
        """With eos at the end."""
        if self.eos is None:
            raise ValueError("the tokenizer has no eos token to end a text with")
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def ignored(self, row: Row, form: Format) -> set[str]:
        return row.keys() - form.read_keys()

    def options(self) -> dict[str, Any]:
        """What changes the examples besides the tokenizer."""
        return {}

    def digest(self) -> str:
        parts = type(self).__name__, VERSION, tokenizers.__version__, self.options()
        tokenizer = self.tokenizer.digest(chats=self.uses_chat_template)
        return hashlib.sha256(f"{tokenizer} {parts}".encode()).hexdigest()


class TextEncoder(FormatEncoder):
    """Documents for pretraining: every token is learned, and each document ends with eos."""

    formats = TEXTS

    def options(self) -> dict[str, Any]:
        return {"eos": self.eos}

    def batch(self, rows: Sequence[Row], form: Format) -> Iterator[Sequence[Example] | ValueError]:
        try:
            texts = [as_text(row, form) for row in rows]
            encoded = self.tokenizer.encode_batch([text.completion for text in texts])
        except ValueError:  # a bad row: find out which
            yield from super().batch(rows, form)
            return
        for ids, text in zip(encoded, texts, strict=True):
            yield self._example(ids, text.weight)

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        text = as_text(row, form)
        return self._example(self.tokenizer.encode(text.completion), text.weight)

    def _example(self, ids: list[int], weight: float) -> Sequence[Example]:
        ids = self.ended(ids)
        return weighted(ids, np.full(len(ids), weight))


def read_texts(source: Source) -> Iterator[str]:
    """The texts of a source, as they are; ValueError for a row without."""
    form = None
    for line, row in source.rows():
        try:
            if isinstance(row, ValueError):
                raise row
            form = form or source.format.told(row, TEXTS)
            yield as_text(row, form).completion
        except ValueError as error:
            raise ValueError(f"{source.name}:{line}: {error}") from error


class ChatEncoder(FormatEncoder):
    """Conversations, and prompts with completions, for fine-tuning.

    `train_on` says what is learned: the assistant's turns or completions (with all_turns, also
    those that the chat template rewrites when others follow, in examples of their own), a
    conversation's last such turn, or everything. With `must_end`, the first row's last turn has to
    end in a token that is learned and generation can stop at; `ends` collects these tokens.
    """

    formats = CHATS
    uses_chat_template = True
    grouped = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_on: TrainOn = "assistant",
        train_on_empty_thinking: bool = False,
        must_end: bool = True,
        skip_bad_rows: bool = False,
    ):
        super().__init__(tokenizer, skip_bad_rows=skip_bad_rows)
        self.train_on, self.must_end = train_on, must_end
        self.train_on_empty_thinking = train_on_empty_thinking
        self.content = ContentCheck(self.tokenizer)
        self.ends: set[int] = set()
        self.read_in_messages = MESSAGE_KEYS | words_of_template(tokenizer)

    def begin(self, row: Row, form: Format) -> Format:
        chat = self._read(row, form)
        if isinstance(chat, Text):
            self.ends.update(self.ended([]))
            return replace(form, eos=self.eos)
        speaks = any(isinstance(m, dict) and m.get("role") == "assistant" for m in chat.messages)
        if self.must_end and (speaks or self.train_on != "all"):
            given: dict[str, Any] = {"tools": chat.tools, **chat.variables}
            self.ends.add(self.tokenizer.end_of_turn(chat.messages, **given))
        return form

    def _read(self, row: Row, form: Format) -> Chat | Text:
        """The row with messages as the chat template reads them."""
        chat = as_chat(row, form)
        if isinstance(chat, Text):
            return chat
        return replace(chat, messages=self.tokenizer.convert_messages(chat.messages, chat.tools))

    def options(self) -> dict[str, Any]:
        return {"train_on": self.train_on, "train_on_empty_thinking": self.train_on_empty_thinking}

    def ignored(self, row: Row, form: Format) -> set[str]:
        """Those of messages, as "messages.KEY", that neither formats.py nor the template reads."""
        found = super().ignored(row, form) | unread_by_template(row, form, self.read_in_messages)
        known = self.read_in_messages
        if form.kind == "sharegpt":
            known = known - {"role", "content"} | {"from", "value"}
        for ours in ("messages", "prompt", "completion"):
            messages = form.get(row, ours)
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message, dict) and not message.keys() <= known:
                    found |= {f"{form.key(ours)}.{key}" for key in message.keys() - known}
        return found

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        chat = self._read(row, form)
        if isinstance(chat, Text) != (form.eos is not None):
            first = "lists of messages" if form.eos is None else "texts"
            raise ValueError(f"prompt and completion must be {first}, as in its source's first row")
        if isinstance(chat, Text):
            return self._completion(chat)
        weights = list(chat.weights)
        if self.train_on != "all":
            weights[: chat.prompt] = [0.0 if w is None else w for w in weights[: chat.prompt]]
        options: dict[str, Any] = {"tools": chat.tools, **chat.variables}
        learned = learned_turns(chat.messages, self.train_on, weights) if chat.weight else []
        name = partial(message_name, row, form, chat.prompt)
        self.content.check(chat.messages, learned, name, **options)
        options |= {"train_on_empty_thinking": self.train_on_empty_thinking}
        encoded = self.tokenizer.encode_chat_rows(
            chat.messages, train_on=self.train_on, weights=weights, **options
        )
        examples = [
            example
            for ids, counted in encoded.rows
            for example in weighted(ids, np.array(counted) * chat.weight)
        ]
        self.noted += Report(
            rewritten=encoded.rewritten,
            extra=max(0, len(examples) - 1),
            missing_openers=tuple(filter(None, [encoded.missing_opener])),
        )
        return examples

    def _completion(self, text: Text) -> Sequence[Example]:
        """As one text without a chat template, and eos at its end, which is learned."""
        if text.weight and not text.completion.strip():
            raise EmptyAnswer("the completion is empty: leave the row out, or give it weight: 0")
        start = 0 if self.train_on == "all" else len(text.prompt)
        full = text.prompt + text.completion
        ids, counted = self.tokenizer.encode_weighted(full, [Span(start, len(full), 1.0)])
        ids = self.ended(ids)
        counted = [*counted[: len(ids) - 1], 1.0]
        return weighted(ids, np.array(counted) * text.weight)


def message_name(row: Row, form: Format, prompt: int, i: int) -> str:
    """What a row calls messages[i] of its conversation, of which the first `prompt` are asked."""
    if form.get(row, "system"):
        if not i:
            return form.key("system")
        i, prompt = i - 1, prompt - 1
    if form.kind == "instruction":
        history = read_json(form.get(row, "history"), "history") or []
        if i // 2 < len(history):
            return f"{form.key('history')}[{i // 2}]"
        return form.key("output" if i % 2 else "instruction")
    if form.kind in ("messages", "sharegpt"):
        return f"{form.key('messages')}[{i}]"
    if i < prompt:
        return f"{form.key('prompt')}[{i}]"
    return f"{form.key('completion')}[{i - prompt}]"


def words_of_template(tokenizer: Tokenizer) -> set[str]:
    """The keys of messages that a chat template may read, among all its words."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, dict) else [template]
    words = set(re.findall(r"\w+", " ".join(texts)))
    words |= {"function_call"} if "tool_calls" in words else set()  # which it becomes
    return words | set(REASONING) if words & set(REASONING) else words


def unread_by_template(row: Row, form: Format, words: set[str]) -> set[str]:
    """What a row gives to the chat template, of these words, that it does not have."""
    tools, variables = form.key("tools"), form.key("chat_template_kwargs")
    given = row.get(variables)
    found = {f"{variables}.{key}" for key in (given if isinstance(given, dict) else {})}
    found = {name for name in found if name.rpartition(".")[2] not in words}
    return found | ({tools} if row.get(tools) and "tools" not in words else set())


def weighted(ids: list[int], weights: np.ndarray) -> Sequence[Example]:
    """One example, or none if all weights are 0. Tokens of weight 0 are not supervised."""
    supervised = weights > 0
    if not supervised.any():
        return []
    columns = {"supervised": supervised}
    if (weights != supervised).any():
        columns["loss_weights"] = weights
    return [Example(ids, columns)]
