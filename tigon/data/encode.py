"""Texts and conversations to examples."""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import DTypeLike

from tigon.data.content_check import ContentCheck, EmptyAnswer
from tigon.data.examples import (
    PAD_VALUES,
    SUPERVISED_COLUMN,
    WEIGHTED_COLUMNS,
    Encoded,
    Encoder,
    EncodingReport,
    Example,
    result_or_error,
)
from tigon.data.formats import (
    CHAT_FORMATS,
    JSON_MESSAGE_KEYS,
    MAX_FLOAT,
    AnswerSample,
    Format,
    Row,
    WeightedChat,
    WeightedText,
    check_token_ids,
    is_token_list,
    parse_chat,
    parse_labeled,
    parse_pair,
    parse_rewarded,
    parse_text,
    read_number,
)
from tigon.data.sources import Source
from tigon.tokenizer import (
    REASONING,
    Span,
    Tokenizer,
    TrainOn,
    common_prefix_length,
    learned_turns,
    skip_empty_thinking,
)
from tigon.utils.json import escape

ENCODER_VERSION = 2  # of what these make of a row; another one makes caches anew
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
            if not self.skip_bad_rows or skipped == MAX_BAD_ROWS:
                raise problem from format
        raise problem or ValueError(f"{source.name} has no rows")

    def detect(self, row: Row, format: Format) -> Format:
        """Finds the format of a row among `formats`; ValueError if none or several fit."""
        return format.detect(row, self.formats)

    def check_first_row(self, row: Row, format: Format) -> Format:
        """Completes the format of a source by its first row; ValueError if it cannot be encoded.
        Here the format is returned as it is."""
        return format

    def append_eos(self, ids: list[int]) -> list[int]:
        """Returns the ids with an eos at their end, unless they have one; ValueError if the
        tokenizer has no eos."""
        if self.eos is None:
            raise ValueError("the tokenizer has no eos token to end a text with")
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def ignored(self, row: Row, format: Format) -> set[str]:
        """Collects the keys that nothing reads: of a row, and, as "column.key", of its messages and
        template variables."""
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
        for key in JSON_MESSAGE_KEYS:
            messages = format.get(row, key) if format.column(key) in read_keys else None
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message, dict):
                    ignored |= {f"{format.column(key)}.{k}" for k in message.keys() - readable}
        return ignored

    def options(self) -> dict[str, Any]:
        """Returns the settings, besides the tokenizer, that change the examples; for the digest."""
        return {}

    def digest(self) -> str:
        """Returns a digest of the encoder's class and version, of `options`, and of the tokenizer,
        with its chat template if the encoder uses it."""
        parts = type(self).__name__, ENCODER_VERSION, tokenizers.__version__, self.options()
        tokenizer = self.tokenizer.digest(chats=self.uses_chat_template)
        return hashlib.sha256(f"{tokenizer} {parts}".encode()).hexdigest()


class TextEncoder(FormatEncoder):
    """Documents for pretraining: every token is learned, and each document ends with eos."""

    formats = ("text",)

    def options(self) -> dict[str, Any]:
        return {"eos": self.eos}

    def batch(self, rows: Sequence[Row], format: Format) -> Iterator[Encoded]:
        """Yields the example of each row's text, all tokenized in one call, or row by row if one is
        bad."""
        try:
            texts = [parse_text(row, format) for row in rows]
            encoded = self.tokenizer.encode_batch([text.completion for text in texts])
        except ValueError:  # a bad row: find out which
            yield from super().batch(rows, format)
            return
        for ids, text in zip(encoded, texts, strict=True):
            yield self._example(ids, text.weight)

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes the example of the row's text."""
        text = parse_text(row, format)
        return self._example(self.tokenizer.encode(text.completion), text.weight)

    def _example(self, ids: list[int], weight: float) -> Sequence[Example]:
        """Makes the example of a text, which ends with eos; all its tokens are learned with this
        loss weight. None if the weight is 0."""
        ids = self.append_eos(ids)
        return weighted_example(ids, np.full(len(ids), weight))


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


def weighted_example(ids: list[int], weights: np.ndarray) -> Sequence[Example]:
    """Makes a list with an example of these tokens, its columns supervised (where a weight is above
    0) and, unless all are 0 or 1, loss_weights; an empty list if all weights are 0."""
    supervised = weights > 0
    if not supervised.any():
        return []
    columns = {"supervised": supervised}
    if (weights != supervised).any():
        columns["loss_weights"] = weights
    return [Example(ids, columns)]


# Prompts with answers to examples: sequences of which the answers alone are learned.


class AnswerEncoder(TemplateEncoder):
    """Base class: tokenizes a prompt and its answers as TRL does.

    An answer begins where the tokens of the prompt, as generation would have it, and those of
    prompt and answer part. A text ends with eos. Everything from there on is learned.
    """

    per_token: Mapping[str, DTypeLike] = SUPERVISED_COLUMN

    def tokenize_answers(
        self, sample: AnswerSample, *, train_on_empty_thinking: bool = False
    ) -> tuple[int, list[list[int]]]:
        """Returns the number of tokens that belong to the prompt, and the tokens of the prompt with
        each answer.

        An empty block of reasoning that all answers begin with belongs to the prompt, unless it is
        learned. Raises ValueError for an answer without tokens of its own.
        """
        tokenizer = self.tokenizer
        if isinstance(sample.prompt, list):
            prompt_text, texts = self._render(sample)
            if not (train_on_empty_thinking or self.train_on_empty_thinking):
                prompt_text = append_empty_thinking(prompt_text, texts)
            prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
            sequences = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            prompt = [] if sample.learns_all else tokenizer.encode(sample.prompt)
            texts = [sample.prompt + answer for answer in sample.answers if isinstance(answer, str)]
            sequences = [self.append_eos(tokenizer.encode(text)) for text in texts]
        shared = min(common_prefix_length(prompt, ids) for ids in sequences)
        if any(len(ids) == shared for ids in sequences):
            raise ValueError("an answer has no tokens of its own behind the prompt")
        return shared, sequences

    def _render(self, sample: AnswerSample) -> tuple[str, list[str]]:
        """Renders the prompt for generation, and the prompt with each answer, as texts; raises
        ValueError for an answer of which the chat template leaves something out."""
        options: dict[str, Any] = {"tools": sample.tools, **sample.variables}

        def render(messages: Any, **more: Any) -> str:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options, **more)
            assert isinstance(text, str)
            return text

        def convert(messages: Any) -> list[Any]:
            return self.tokenizer.convert_messages(messages, sample.tools)

        prompt = ""
        if not sample.learns_all:
            prompt = render(convert(sample.prompt), add_generation_prompt=True)
        texts = []
        for answer, names in zip(sample.answers, sample.names, strict=True):
            messages = convert([*sample.prompt, *answer])
            texts.append(render(messages))
            turns = range(len(sample.prompt), len(messages))
            learned = [i for i in turns if messages[i]["role"] == "assistant"]
            self.content.check(messages, learned, names, **options)
        return prompt, texts

    def options(self) -> dict[str, Any]:
        return {"eos": self.eos, "train_on_empty_thinking": self.train_on_empty_thinking}

    def example(self, ids: Sequence[int], prompt: int, **values: Any) -> Example:
        """Makes an example whose tokens behind the first `prompt` are learned."""
        return Example(ids, {"supervised": np.arange(len(ids)) >= prompt}, values)


class PairEncoder(AnswerEncoder):
    """Pairs: a group of two examples, the chosen answer and the rejected one, each after the
    prompt.

    `margin`: the examples have a column with the row's margin, by how much the chosen one is
    better, or 0. `shared_prompt`: a pair without a prompt in common is an error; otherwise its
    sequences are learned whole.
    """

    formats = ("preference",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        margin: bool = False,
        shared_prompt: bool = True,
        **options: bool,
    ) -> None:
        super().__init__(tokenizer, **options)
        self.shared_prompt = shared_prompt
        self.per_example = {"margin": np.float32} if margin else {}

    def options(self) -> dict[str, Any]:
        """As the base's, and whether there is a column of margins."""
        # Not shared_prompt: rows that are no error without it are the same with it
        return super().options() | {"margin": "margin" in self.per_example}

    def ignored(self, row: Row, format: Format) -> set[str]:
        """As the base's, and the margin if it is no column."""
        unread = set() if self.per_example else {format.column("margin")} & row.keys()
        return super().ignored(row, format) | unread

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes the examples of the chosen and of the rejected answer; ValueError if their tokens
        are equal."""
        sample = parse_pair(row, format, shared_prompt=self.shared_prompt)
        prompt, (chosen, rejected) = self.tokenize_answers(sample)
        if chosen == rejected:
            raise ValueError("chosen and rejected are the same tokens")
        values = {name: read_number(row, format, name, 0.0) for name in self.per_example}
        return [self.example(ids, prompt, **values) for ids in (chosen, rejected)]


class LabelledEncoder(AnswerEncoder):
    """Answers that are desired or not, as for KTO. A row of a pair has one of each.

    Each is in a group with a second sequence: the row's prompt with the answer of the row before
    it, of a pair the one of its own kind, from which the divergence from the reference is
    estimated. The first row of a block (about a megabyte of a file) has the last one's answer. A
    row that is alone in its block has none. So what goes together depends on the file alone, and on
    no batch and no rank.
    """

    formats = ("unpaired", "preference")
    per_example = {"desired": np.bool_, "matched": np.bool_}

    def detect(self, row: Row, format: Format) -> Format:
        """Finds the format of a row; one with the keys of both formats is an answer with its
        label."""
        try:
            return format.detect(row, ("unpaired",))
        except ValueError:
            return format.detect(row, self.formats)

    def ignored(self, row: Row, format: Format) -> set[str]:
        """As the base's, and the margin of a pair."""
        return super().ignored(row, format) | ({format.column("margin")} & row.keys())

    def batch(self, rows: Sequence[Row], format: Format) -> Iterator[Encoded]:
        """Yields the examples of each row, or its error: each answer, followed by the prompt with
        the answer of the good row before, if there are several."""
        encoded = [result_or_error(self._encode_answers, row, format) for row in rows]
        good = [answers for answers in encoded if not isinstance(answers, ValueError)]
        previous = dict(zip(map(id, good), [*good[-1:], *good[:-1]], strict=True))
        for answers in encoded:
            if isinstance(answers, ValueError):
                yield answers
                continue
            examples = []
            pairs = zip(answers, previous[id(answers)], strict=True)
            for (prompt, ids, label), (mismatched_prompt, mismatched_ids, _) in pairs:
                examples.append(self.example(ids, prompt, desired=label, matched=True))
                if len(good) > 1:
                    mixed = [*ids[:prompt], *mismatched_ids[mismatched_prompt:]]
                    examples.append(self.example(mixed, prompt, desired=label, matched=False))
            yield examples

    def group_examples(self, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
        """Divides the examples of a row into groups, each an answer with its mismatched one: a
        pair's two need not share a micro-batch."""
        starts = [i for i, example in enumerate(examples) if example.per_example["matched"]]
        ends = [*starts[1:], len(examples)]
        return [examples[i:end] for i, end in zip(starts, ends, strict=True)]

    def _encode_answers(self, row: Row, format: Format) -> list[tuple[int, list[int], bool]]:
        """Returns the prompt length, the ids and the label of each answer."""
        if format.kind == "preference":
            sample, labels = parse_pair(row, format), [True, False]
        else:
            sample, label = parse_labeled(row, format)
            labels = [label]
        encoded = []
        for i, (answer, label) in enumerate(zip(sample.answers, labels, strict=True)):
            single = replace(sample, answers=(answer,), names=sample.names[i : i + 1])
            prompt, (ids,) = self.tokenize_answers(single)
            encoded.append((prompt, ids, label))
        return encoded


class RewardedEncoder(AnswerEncoder):
    """Answers of a policy to a prompt, with the advantage that each has over the row's others.

    A row's rewards become advantages as in GRPO (arXiv 2402.03300): less their mean and, with
    `scale`, over their standard deviation. They are a column, too, and so are log-probabilities by
    the policy that gave the answers; NaN where the row has none.
    """

    formats = ("completions",)
    per_token = SUPERVISED_COLUMN | {"old_logprobs": np.float32}
    per_example = {"advantage": np.float32, "reward": np.float64}
    grouped = False

    def __init__(self, tokenizer: Tokenizer, *, scale: bool = True, **options: bool) -> None:
        super().__init__(tokenizer, **options)
        self.scale = scale

    def options(self) -> dict[str, Any]:
        """As the base's, and `scale`."""
        return super().options() | {"scale": self.scale}

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes an example for each answer, with its advantage and reward, the one that the row
        lacks as NaN."""
        rewarded = parse_rewarded(row, format)
        logprobs = rewarded.old_logprobs
        if isinstance(rewarded.answers, AnswerSample):
            # With log-probabilities for an empty block of reasoning, the policy wrote it itself
            prompt, sequences = self.tokenize_answers(
                rewarded.answers, train_on_empty_thinking=logprobs is not None
            )
        else:
            prompt, sequences = rewarded.answers
        values = np.array(rewarded.values)
        advantages, rewards = values, np.full(len(values), np.nan)
        if not rewarded.are_advantages:
            advantages, rewards = compute_advantages(values, scale=self.scale), values
            largest = advantages[np.abs(advantages).argmax()]
            if abs(largest) > MAX_FLOAT:
                raise ValueError(
                    f"{format.column('rewards')!r} are too far apart: less their mean, one is "
                    f"{largest:.3g}, which float32 does not hold"
                )
        examples = []
        for i, ids in enumerate(sequences):
            column = np.full(len(ids), np.nan)
            if logprobs is not None:
                if len(logprobs[i]) != len(ids) - prompt:
                    raise ValueError(
                        f"{format.column('old_logprobs')!r} has {len(logprobs[i])} numbers for the "
                        f"{len(ids) - prompt} tokens of answer {i}: give completions as tokens"
                    )
                column[prompt:] = logprobs[i]
            columns = {"supervised": np.arange(len(ids)) >= prompt, "old_logprobs": column}
            scores = {"advantage": advantages[i], "reward": rewards[i]}
            examples.append(Example(ids, columns, scores))
        return examples


def compute_advantages(rewards: np.ndarray, *, scale: bool = True) -> np.ndarray:
    """Computes the advantages of answers to one prompt: rewards less their mean and, with `scale`,
    over their standard deviation + 1e-4; exactly 0 where all are equal."""
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centered = rewards - rewards.mean()
    return centered / (rewards.std(ddof=1) + 1e-4) if scale else centered


def append_empty_thinking(prompt: str, texts: Sequence[str]) -> str:
    """Returns the prompt, extended by the empty block of reasoning after it if all these texts go
    on with the same."""
    prompts = set()
    for text in texts:
        start = common_prefix_length(prompt, text)
        end = skip_empty_thinking(text, start)
        prompts.add(text[:end] if end > start else prompt)
    return prompts.pop() if len(prompts) == 1 else prompt


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

    def options(self) -> dict[str, Any]:
        """Returns a constant, which keeps caches of earlier versions from being used."""
        return {"tokens": "counted"}  # makes caches anew from before the teacher's tokens counted

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
