"""Texts, conversations and a teacher's distributions to examples."""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import DTypeLike

from tigon.data.answers import check_token_ids, is_token_list
from tigon.data.content_check import ContentCheck, EmptyAnswer
from tigon.data.examples import (
    PAD_VALUES,
    WEIGHTED_COLUMNS,
    Encoded,
    Encoder,
    EncodingReport,
    Example,
    Examples,
    result_or_error,
)
from tigon.data.formats import (
    CHAT_FORMATS,
    JSON_MESSAGE_KEYS,
    Format,
    Row,
    WeightedChat,
    WeightedText,
    get_role,
    parse_chat,
    parse_text,
)
from tigon.data.messages import ROLE_ALIASES, ROLES
from tigon.data.sources import Block, Source
from tigon.tokenizer import REASONING, Span, Tokenizer, TrainOn, learned_turns
from tigon.utils.json import escape

ENCODER_VERSION = 5  # of what these make of a row; another one makes caches anew
MAX_BAD_ROWS = 100  # rows that may be bad before a source is refused, where bad rows are skipped


class FormatEncoder(Encoder):
    """Base class of encoders of rows in one of the formats of `formats.py`."""

    per_token: Mapping[str, DTypeLike] = WEIGHTED_COLUMNS
    formats: Sequence[str] = ()
    message_keys: Collection[str] = ()  # keys of messages that are read

    def __init__(self, tokenizer: Tokenizer, *, skip_bad_rows: bool = False):
        # A copy: the end of a turn may become the tokenizer's eos when training begins
        self.tokenizer, self.eos = copy(tokenizer), tokenizer.eos_token_id
        self.skip_bad_rows = skip_bad_rows

    def open(self, source: Source) -> Source:
        """Returns the source with the format of its rows, detected from the first good one."""

        def read_format(row: Row | ValueError) -> Format:
            if isinstance(row, ValueError):
                raise row
            return self.check_first_row(row, self.detect(row, source.format))

        problem = None
        for skipped, (line, row) in enumerate(source.rows()):
            format = result_or_error(read_format, row)
            if isinstance(format, Format):
                return replace(source, format=format)
            problem = problem or ValueError(f"{source.name}:{line}: {escape(format)}")
            if not self.skip_bad_rows:
                raise problem from format
            if skipped == MAX_BAD_ROWS:
                break
        if problem is None:
            raise ValueError(f"{source.name} has no rows")
        raise ValueError(f"{source.name} has no good row of {skipped + 1}: {problem}")

    def detect(self, row: Row, format: Format) -> Format:
        """Finds the format of a row among `formats`; ValueError if none or several fit."""
        return format.detect(row, self.formats)

    def check_first_row(self, row: Row, format: Format) -> Format:
        """Completes a source's format by its first row, or raises ValueError; here as it is."""
        return format

    def append_eos(self, ids: list[int]) -> list[int]:
        """Returns the ids with one eos at their end; ValueError if the tokenizer has none."""
        if self.eos is None:
            raise ValueError("the tokenizer has no eos token to end a text with")
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def ignored(self, row: Row, format: Format) -> set[str]:
        """Collects the keys that nothing reads, "column.key" of messages and variables."""
        read_keys = format.read_keys()
        ignored = row.keys() - read_keys
        if not self.uses_chat_template:
            return ignored
        readable = set(self.message_keys)
        tools, column = format.column("tools"), format.column("chat_template_kwargs")
        variables = row.get(column)
        names = variables.keys() if isinstance(variables, dict) else set()
        ignored |= {f"{column}.{name}" for name in names - readable}
        if row.get(tools) and "tools" not in readable:
            ignored.add(tools)
        if format.kind == "sharegpt":
            readable = readable - {"role", "content"} | {"from", "value"}
        for column, message in _messages(row, format):
            ignored |= {f"{column}.{key}" for key in message.keys() - readable}
        return ignored

    def unknown_roles(self, row: Row, format: Format) -> set[str]:
        """Collects roles that are neither usual nor a word of the chat template."""
        if not self.uses_chat_template or format.kind == "sharegpt":  # whose speakers are checked
            return set()
        roles = {get_role(message) for _, message in _messages(row, format)}
        names = {role for role in roles if isinstance(role, str)}
        return names.difference(ROLES, ROLE_ALIASES, self.message_keys)

    def options(self) -> dict[str, Any]:
        """Returns the settings, besides the tokenizer, that change the examples; for the digest."""
        return {}

    def digest(self) -> str:
        """Returns a digest of the encoder's class and version, of `options`, and of the tokenizer,
        with its chat template if the encoder uses it."""
        parts = type(self).__name__, ENCODER_VERSION, tokenizers.__version__, self.options()
        tokenizer = self.tokenizer.digest(chats=self.uses_chat_template)
        return hashlib.sha256(f"{tokenizer} {parts}".encode()).hexdigest()


def _messages(row: Row, format: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the messages of a row that are read, each with the row's key of its list."""
    read_keys = format.read_keys()
    for key in JSON_MESSAGE_KEYS:
        column = format.column(key)
        messages = format.get(row, key) if column in read_keys else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield column, message


class TextEncoder(FormatEncoder):
    """Documents for pretraining: every token is learned, and each document ends with eos."""

    formats = ("text",)

    def options(self) -> dict[str, Any]:
        return {"eos": self.eos}

    def batch(self, rows: Sequence[Row], format: Format) -> Iterator[Encoded]:
        """Yields the example of each text, tokenized in one call unless a row is bad."""
        try:
            texts = [parse_text(row, format) for row in rows]
            encoded = self.tokenizer.encode_batch([text.completion for text in texts])
        except ValueError:  # a bad row: find out which
            yield from super().batch(rows, format)
            return
        for ids, text in zip(encoded, texts, strict=True):
            yield weighted_example(self.append_eos(ids), text.weight)

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        text = parse_text(row, format)
        ids = self.append_eos(self.tokenizer.encode(text.completion))
        return weighted_example(ids, text.weight)


def read_texts(source: Source) -> Iterator[str]:
    """Yields the text of each row of a source; ValueError for a row without one."""
    format = None
    for line, row in source.rows():
        try:
            if isinstance(row, ValueError):
                raise row
            format = format or source.format.detect(row, ("text",))
            yield parse_text(row, format).completion
        except ValueError as error:
            raise ValueError(f"{source.name}:{line}: {error}") from error


class TemplateEncoder(FormatEncoder):
    """Base class: rows that become text by the chat template, which must write all of them."""

    uses_chat_template = True
    message_keys: Collection[str] = ("role", "content")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_on_empty_thinking: bool = False,
        skip_bad_rows: bool = False,
    ) -> None:
        super().__init__(tokenizer, skip_bad_rows=skip_bad_rows)
        self.train_on_empty_thinking = train_on_empty_thinking
        self.content = ContentCheck(self.tokenizer)
        self.message_keys = {*self.message_keys, *template_words(tokenizer)}

    def __call__(self, block: Block) -> Examples:
        self.tokenizer.times = {}
        return super().__call__(block)

    def times(self) -> Mapping[str, str]:
        return self.tokenizer.times

    def write_time(self, format: str) -> str:
        return self.tokenizer.write_time(format)


class ChatEncoder(TemplateEncoder):
    """Conversations, and prompts with completions, for fine-tuning.

    `train_on` says what is learned: the assistant's turns or completions (with all_turns, also
    those that the chat template rewrites when others follow, in examples of their own), a
    conversation's last such turn, or everything. With `must_end`, the first row's last turn has to
    end in a token that is learned and generation can stop at; `ends` collects these tokens.
    """

    formats = CHAT_FORMATS
    grouped = False
    message_keys = ("role", "content", "weight", "train")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_on: TrainOn = "assistant",
        must_end: bool = True,
        **options: bool,
    ):
        super().__init__(tokenizer, **options)
        self.train_on, self.must_end = train_on, must_end
        self.ends: set[int] = set()

    def check_first_row(self, row: Row, format: Format) -> Format:
        """Return the format, with the eos that ends its texts if the row has no messages; add to
        `ends` what the row's last turn ends in, if that must be, or else raise ValueError."""
        chat = self._parse(row, format)
        if isinstance(chat, WeightedText):
            self.ends.update(self.append_eos([]))
            return replace(format, eos=self.eos)
        speaks = any(isinstance(m, dict) and m.get("role") == "assistant" for m in chat.messages)
        if self.must_end and (speaks or self.train_on != "all"):
            options: dict[str, Any] = {"tools": chat.tools, **chat.variables}
            self.ends.add(self.tokenizer.end_of_turn(chat.messages, **options))
        return format

    def _parse(self, row: Row, format: Format) -> WeightedChat | WeightedText:
        """Reads the row, with its messages converted to what the chat template needs."""
        chat = parse_chat(row, format)
        if isinstance(chat, WeightedText):
            return chat
        return replace(chat, messages=self.tokenizer.convert_messages(chat.messages, chat.tools))

    def options(self) -> dict[str, Any]:
        return {"train_on": self.train_on, "train_on_empty_thinking": self.train_on_empty_thinking}

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes the examples of the row's conversation or completion: one, with all_turns one for
        each turn that the template rewrites too, or none if its weights are 0."""
        chat = self._parse(row, format)
        if isinstance(chat, WeightedText) != (format.eos is not None):
            first = "lists of messages" if format.eos is None else "texts"
            raise ValueError(f"prompt and completion must be {first}, as in its source's first row")
        if isinstance(chat, WeightedText):
            return self._completion(chat)
        weights = list(chat.weights)
        if self.train_on != "all":
            weights[: chat.prompt] = [0.0 if w is None else w for w in weights[: chat.prompt]]
        options: dict[str, Any] = {"tools": chat.tools, **chat.variables}
        learned = learned_turns(chat.messages, self.train_on, weights) if chat.weight else []
        self.content.check(chat.messages, learned, chat.names, **options)
        options |= {"train_on_empty_thinking": self.train_on_empty_thinking}
        encoded = self.tokenizer.encode_chat_rows(
            chat.messages, train_on=self.train_on, weights=weights, **options
        )
        examples = [
            example
            for ids, counted in encoded.rows
            for example in weighted_example(ids, np.array(counted) * chat.weight)
        ]
        self.pass_report += EncodingReport(
            rewritten=encoded.rewritten,
            extra=max(0, len(examples) - 1),
            missing_openers=tuple(filter(None, [encoded.missing_opener])),
        )
        return examples

    def _completion(self, text: WeightedText) -> Sequence[Example]:
        """Encodes prompt and completion as one text that ends with eos, without a chat template;
        learned are completion and eos, and with train_on=all the prompt too."""
        if text.weight and not text.completion.strip():
            raise EmptyAnswer("the completion is empty: leave the row out, or give it weight: 0")
        start = 0 if self.train_on == "all" else len(text.prompt)
        full = text.prompt + text.completion
        ids, counted = self.tokenizer.encode_weighted(full, [Span(start, len(full), 1.0)])
        ids = self.append_eos(ids)
        counted = [*counted[: len(ids) - 1], 1.0]
        return weighted_example(ids, np.array(counted) * text.weight)


def template_words(tokenizer: Tokenizer) -> set[str]:
    """Collects the words of a chat template: any of them may be a key of messages that it reads."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, dict) else [template]
    words = set(re.findall(r"\w+", " ".join(texts)))
    words |= {"function_call"} if "tool_calls" in words else set()  # which it becomes
    return words | set(REASONING) if words & set(REASONING) else words


def weighted_example(ids: list[int], weights: np.ndarray | float) -> Sequence[Example]:
    """Makes a list with an example of these tokens, its columns supervised (where a weight is above
    0) and, unless all are 0 or 1, loss_weights; an empty list if all weights are 0."""
    weights = np.broadcast_to(weights, len(ids))
    supervised = weights > 0
    if not supervised.any():
        return []
    columns = {"supervised": supervised}
    if (weights != supervised).any():
        columns["loss_weights"] = weights
    return [Example(ids, columns)]


# Rows of tokens with what a teacher makes of each: its most likely tokens and their
# log-probabilities.
#
# N tokens of a row, K of them at a place

PROBABILITY_TOLERANCE = 1e-3  # rounded probabilities may add up to so much more than 1
MIN_LOGPROB = float(np.finfo(np.float32).min)  # log-probability that a column can hold


class TopEncoder(FormatEncoder):
    """Tokens with a teacher's likeliest tokens and log-probabilities at each place, to distill.

    `teacher_tokens[i]` and `teacher_logprobs[i]` are those of token i after the ones before it, as
    vLLM's prompt_logprobs are; the first token has none, and any may have fewer than others, in its
    row or another. Learned is where `completion_mask` is 1; without it, everything.
    """

    formats = ("distributions",)
    per_token: Mapping[str, DTypeLike] = {
        "supervised": np.bool_,
        "teacher_tokens": np.int32,
        "teacher_logprobs": np.float32,
    }

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes the example of the row's tokens; ValueError if none is learned, or for a bad
        distribution of a learned one."""
        ids = format.get(row, "input_ids")
        name = format.column("input_ids")
        if not is_token_list(ids):
            raise ValueError(f"{name!r} must be a list of whole numbers, not {ids!r:.100}")
        check_token_ids(ids, name)
        names = ("teacher_tokens", "teacher_logprobs")
        tokens, logprobs = (format.get(row, name) for name in names)
        for name, lists in zip(names, (tokens, logprobs), strict=True):
            if not isinstance(lists, list) or len(lists) != len(ids):
                column = format.column(name)
                raise ValueError(f"{column!r} must have a list for each of the {len(ids)} tokens")
        learned = np.ones(len(ids), dtype=bool)
        if (mask := format.get(row, "completion_mask")) is not None:
            name = repr(format.column("completion_mask"))
            if not isinstance(mask, list) or not all(
                type(v) in (int, bool) and v in (0, 1) for v in mask
            ):
                raise ValueError(f"{name} must be a list of 0 and 1, not {mask!r:.100}")
            if len(mask) != len(ids):
                raise ValueError(f"{name} has {len(mask)} values for {len(ids)} tokens")
            learned = np.array(mask, dtype=bool)
        learned[:1] = False  # nothing predicts it
        if not learned.any():
            raise ValueError("has no token to learn behind its first")
        positions = np.flatnonzero(learned).tolist()
        for i in positions:
            _check_distribution(i, tokens[i], logprobs[i])
        shape = len(ids), max(len(tokens[i]) for i in positions)
        columns = {name: np.full(shape, PAD_VALUES[name]) for name in names}
        for i in positions:
            count = len(tokens[i])
            columns["teacher_tokens"][i, :count] = tokens[i]
            columns["teacher_logprobs"][i, :count] = logprobs[i]
        return [Example(ids, {"supervised": learned, **columns})]


def _check_distribution(position: int, tokens: Any, logprobs: Any) -> None:
    """Raises ValueError unless a teacher's tokens at one position are distinct ids, with as many
    log-probabilities whose probabilities add up to at most 1."""
    name = f"the teacher's distribution of token {position}"
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or not tokens:
        raise ValueError(f"{name} is empty: give its tokens and their log-probabilities")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{name} has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    are_ids = all(type(token) is int and 0 <= token < 2**31 for token in tokens)
    if not are_ids or len(set(tokens)) < len(tokens):
        raise ValueError(f"{name} has a duplicate or negative id: {tokens!r:.100}")
    in_range = all(
        type(p) in (int, float) and MIN_LOGPROB <= p <= PROBABILITY_TOLERANCE for p in logprobs
    )
    if not in_range or np.exp(np.array(logprobs, np.float64)).sum() > 1 + PROBABILITY_TOLERANCE:
        raise ValueError(f"{name} is none: its log-probabilities are {logprobs!r:.100}")
