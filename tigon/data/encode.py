"""Texts and conversations to examples."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import DTypeLike

from tigon.data.content_check import ContentCheck, EmptyAnswer
from tigon.data.examples import PAD_VALUES, SUPERVISED, WEIGHTED, Encoder, EncodingReport, Example
from tigon.data.formats import (
    CHATS,
    DISTRIBUTED,
    LABELLED,
    LARGEST_FLOAT,
    PAIRS,
    REWARDED,
    TEXTS,
    Conversation,
    Format,
    Prompted,
    Row,
    Text,
    as_chat,
    as_labelled,
    as_pair,
    as_rewarded,
    as_text,
    check_tokens,
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
        """The source with the format of its rows, detected from the first one."""
        first = None
        for tried, (line, row) in enumerate(source.rows()):
            try:
                if isinstance(row, ValueError):
                    raise row
                form = self.detect(row, source.format)
                return source.as_format(self.begin(row, form))
            except (ValueError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                what = "is nested too deeply" if deep else escape(error)
                first = first or ValueError(f"{source.name}:{line}: {what}")
                if not self.skip_bad_rows or tried == MAX_BAD_ROWS:
                    raise first from error
        raise first or ValueError(f"{source.name} has no rows")

    def detect(self, row: Row, form: Format) -> Format:
        """The format of a row, one of `formats`; ValueError if none or several fit."""
        return form.detect(row, self.formats)

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
        parts = type(self).__name__, ENCODER_VERSION, tokenizers.__version__, self.options()
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
        return weighted_example(ids, np.full(len(ids), weight))


def read_texts(source: Source) -> Iterator[str]:
    """The texts of a source, as they are; ValueError for a row without."""
    form = None
    for line, row in source.rows():
        try:
            if isinstance(row, ValueError):
                raise row
            form = form or source.format.detect(row, TEXTS)
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
        self.read_in_messages = MESSAGE_KEYS | template_words(tokenizer)

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

    def _read(self, row: Row, form: Format) -> Conversation | Text:
        """The row with messages as the chat template reads them."""
        chat = as_chat(row, form)
        if isinstance(chat, Text):
            return chat
        return replace(chat, messages=self.tokenizer.convert_messages(chat.messages, chat.tools))

    def options(self) -> dict[str, Any]:
        return {"train_on": self.train_on, "train_on_empty_thinking": self.train_on_empty_thinking}

    def ignored(self, row: Row, form: Format) -> set[str]:
        """Those of messages, as "messages.KEY", that neither formats.py nor the template reads."""
        found = super().ignored(row, form) | ignored_template_keys(row, form, self.read_in_messages)
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

    def _completion(self, text: Text) -> Sequence[Example]:
        """As one text without a chat template, and eos at its end, which is learned."""
        if text.weight and not text.completion.strip():
            raise EmptyAnswer("the completion is empty: leave the row out, or give it weight: 0")
        start = 0 if self.train_on == "all" else len(text.prompt)
        full = text.prompt + text.completion
        ids, counted = self.tokenizer.encode_weighted(full, [Span(start, len(full), 1.0)])
        ids = self.ended(ids)
        counted = [*counted[: len(ids) - 1], 1.0]
        return weighted_example(ids, np.array(counted) * text.weight)


def template_words(tokenizer: Tokenizer) -> set[str]:
    """The keys of messages that a chat template may read, among all its words."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, dict) else [template]
    words = set(re.findall(r"\w+", " ".join(texts)))
    words |= {"function_call"} if "tool_calls" in words else set()  # which it becomes
    return words | set(REASONING) if words & set(REASONING) else words


def ignored_template_keys(row: Row, form: Format, words: set[str]) -> set[str]:
    """What a row gives to the chat template, of these words, that it does not have."""
    tools, variables = form.key("tools"), form.key("chat_template_kwargs")
    given = row.get(variables)
    found = {f"{variables}.{key}" for key in (given if isinstance(given, dict) else {})}
    found = {name for name in found if name.rpartition(".")[2] not in words}
    return found | ({tools} if row.get(tools) and "tools" not in words else set())


def weighted_example(ids: list[int], weights: np.ndarray) -> Sequence[Example]:
    """One example, or none if all weights are 0. Tokens of weight 0 are not supervised."""
    supervised = weights > 0
    if not supervised.any():
        return []
    columns = {"supervised": supervised}
    if (weights != supervised).any():
        columns["loss_weights"] = weights
    return [Example(ids, columns)]


# Prompts with answers to examples: sequences of which the answers alone are learned.

ANSWER_KEYS = (
    "prompt",
    "chosen",
    "rejected",
    "completion",
)  # of rows, that may be lists of messages


class AnswerEncoder(FormatEncoder):
    """A prompt and its answers, as TRL makes tokens of them.

    An answer begins where the tokens of the prompt, as generation would have it, and those of
    prompt and answer part. A text ends with eos. Everything from there on is learned.
    """

    per_token: Mapping[str, DTypeLike] = SUPERVISED
    uses_chat_template = True

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
        self.read_in_messages = {"role", "content"} | template_words(tokenizer)

    def tokens(
        self, said: Prompted, *, train_on_empty_thinking: bool = False
    ) -> tuple[int, list[list[int]]]:
        """How many tokens the prompt has, and the ids of it with each answer.

        An empty block of reasoning that all answers begin with belongs to the prompt, unless it is
        learned.
        """
        tokenizer = self.tokenizer
        if said.is_chat:
            prompt_text, texts = self._render(said)
            if not (train_on_empty_thinking or self.train_on_empty_thinking):
                prompt_text = append_empty_thinking(prompt_text, texts)
            prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
            whole = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            assert isinstance(said.prompt, str)
            prompt = [] if said.whole else tokenizer.encode(said.prompt)
            texts = [said.prompt + a for a in said.answers if isinstance(a, str)]
            whole = [self.ended(tokenizer.encode(text)) for text in texts]
        shared = min(common_prefix_length(prompt, ids) for ids in whole)
        for ids in whole:
            if len(ids) == shared:
                raise ValueError("an answer has no tokens of its own behind the prompt")
        return shared, whole

    def _render(self, said: Prompted) -> tuple[str, list[str]]:
        """The text of a prompt of messages, as generation would have it, and that of each answer
        behind it."""
        options: dict[str, Any] = {"tools": said.tools, **said.variables}

        def render(messages: Any, **more: Any) -> str:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options, **more)
            assert isinstance(text, str)
            return text

        convert: Callable[[Any], list[Any]] = partial(
            self.tokenizer.convert_messages, tools=said.tools
        )
        prompt = "" if said.whole else render(convert(said.prompt), add_generation_prompt=True)
        texts = []
        for answer, names in zip(said.answers, said.names, strict=True):
            messages = convert([*said.prompt, *answer])
            texts.append(render(messages))
            turns = range(len(said.prompt), len(messages))
            learned = [i for i in turns if messages[i]["role"] == "assistant"]
            self.content.check(messages, learned, names, **options)
        return prompt, texts

    def options(self) -> dict[str, Any]:
        return {"eos": self.eos, "train_on_empty_thinking": self.train_on_empty_thinking}

    def example(self, ids: Sequence[int], prompt: int, **values: Any) -> Example:
        """The tokens behind the first `prompt` are learned."""
        return Example(ids, {"supervised": np.arange(len(ids)) >= prompt}, values)

    def ignored(self, row: Row, form: Format) -> set[str]:
        """Those of messages too, as "chosen.KEY"."""
        found = super().ignored(row, form) | ignored_template_keys(row, form, self.read_in_messages)
        known = self.read_in_messages
        for name in ANSWER_KEYS:
            messages = form.get(row, name)
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message, dict) and not message.keys() <= known:
                    found |= {f"{form.key(name)}.{key}" for key in message.keys() - known}
        return found


class PairEncoder(AnswerEncoder):
    """Pairs: a group of the chosen answer and the rejected one, each after the prompt.

    `margin`: a column of what the row says of by how much the one is better. `of_one_prompt`: a
    pair without a prompt in common is an error; otherwise its sequences are learned whole.
    """

    formats = PAIRS

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        margin: bool = False,
        of_one_prompt: bool = True,
        **options: bool,
    ) -> None:
        super().__init__(tokenizer, **options)
        self.of_one_prompt = of_one_prompt
        self.per_example = {"margin": np.float32} if margin else {}

    def options(self) -> dict[str, Any]:
        # Not of_one_prompt: rows that are no error without it are the same with it
        return super().options() | {"margin": "margin" in self.per_example}

    def ignored(self, row: Row, form: Format) -> set[str]:
        unread = set() if self.per_example else {form.key("margin")} & row.keys()
        return super().ignored(row, form) | unread

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        said = as_pair(row, form, of_one_prompt=self.of_one_prompt)
        prompt, both = self.tokens(said)
        if both[0] == both[1]:
            raise ValueError("chosen and rejected are the same tokens")
        values: Mapping[str, float] = {}
        if self.per_example:
            values = {"margin": read_number(row, form, "margin", 0.0)}
        return [self.example(ids, prompt, **values) for ids in both]


class LabelledEncoder(AnswerEncoder):
    """Answers that are desired or not, as for KTO. A row of a pair has one of each.

    Each is in a group with a second sequence: the row's prompt with the answer of the row before
    it, of a pair the one of its own kind, from which the divergence from the reference is
    estimated. The first row of a block (about a megabyte of a file) has the last one's answer. A
    row that is alone in its block has none. So what goes together depends on the file alone, and on
    no batch and no rank.
    """

    formats = (*LABELLED, *PAIRS)
    per_example = {"desired": np.bool_, "matched": np.bool_}

    def detect(self, row: Row, form: Format) -> Format:
        """A row with the keys of both formats is an answer with its label."""
        try:
            return form.detect(row, LABELLED)
        except ValueError:
            return form.detect(row, self.formats)

    def ignored(self, row: Row, form: Format) -> set[str]:
        return super().ignored(row, form) | ({form.key("margin")} & row.keys())

    def batch(self, rows: Sequence[Row], form: Format) -> Iterator[Sequence[Example] | ValueError]:
        encoded = [self._attempt(row, form) for row in rows]
        good = [found for found in encoded if not isinstance(found, ValueError)]
        before = dict(zip(map(id, good), [*good[-1:], *good[:-1]], strict=True))
        for found in encoded:
            if isinstance(found, ValueError):
                yield found
                continue
            examples = []
            for own, (other_prompt, other, _) in zip(found, before[id(found)], strict=True):
                prompt, ids, label = own
                examples.append(self.example(ids, prompt, desired=label, matched=True))
                if len(good) > 1:
                    mixed = [*ids[:prompt], *other[other_prompt:]]
                    examples.append(self.example(mixed, prompt, desired=label, matched=False))
            yield examples

    def group_examples(self, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
        """Each answer with its mismatched one: a pair's two need not share a micro-batch."""
        starts = [i for i, example in enumerate(examples) if example.per_example["matched"]]
        ends = [*starts[1:], len(examples)]
        return [examples[i:end] for i, end in zip(starts, ends, strict=True)]

    def _attempt(self, row: Row, form: Format) -> list[tuple[int, list[int], bool]] | ValueError:
        """Of each answer of the row how many tokens its prompt has, both, and its label."""
        found = []
        try:
            if form.kind in PAIRS:
                said, labels = as_pair(row, form), [True, False]
            else:
                said, label = as_labelled(row, form)
                labels = [label]
            for i, (answer, label) in enumerate(zip(said.answers, labels, strict=True)):
                one = replace(said, answers=(answer,), names=said.names[i : i + 1])
                prompt, (ids,) = self.tokens(one)
                found.append((prompt, ids, label))
        except ValueError as error:
            return error
        except RecursionError:
            return ValueError("is nested too deeply")
        return found


class RewardedEncoder(AnswerEncoder):
    """Answers of a policy to a prompt, with the advantage that each has over the row's others.

    A row's rewards become advantages as in GRPO (arXiv 2402.03300): less their mean and, with
    `scale`, over their standard deviation. They are a column, too, and so are log-probabilities by
    the policy that gave the answers; NaN where the row has none.
    """

    formats = REWARDED
    per_token = SUPERVISED | {"old_logprobs": np.float32}
    per_example = {"advantage": np.float32, "reward": np.float64}
    grouped = False

    def __init__(self, tokenizer: Tokenizer, *, scale: bool = True, **options: bool) -> None:
        super().__init__(tokenizer, **options)
        self.scale = scale

    def options(self) -> dict[str, Any]:
        return super().options() | {"scale": self.scale}

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        given = as_rewarded(row, form)
        if given.said is None:
            prompt, whole = len(given.prompt), [given.prompt + answer for answer in given.answers]
        else:
            # The policy has said an empty block itself if it has log-probabilities for it
            sampled = given.old_logprobs is not None
            prompt, whole = self.tokens(given.said, train_on_empty_thinking=sampled)
        values = np.array(given.values)
        advantages, rewards = values, np.full(len(values), np.nan)
        if not given.are_advantages:
            advantages, rewards = compute_advantages(values, scale=self.scale), values
            if np.abs(advantages).max() > LARGEST_FLOAT:
                raise ValueError(
                    f"{form.key('rewards')!r} are too far apart: less their mean, one is "
                    f"{advantages[np.abs(advantages).argmax()]:.3g}, which float32 does not hold"
                )
        examples = []
        for i, ids in enumerate(whole):
            old = np.full(len(ids), np.nan)
            if given.old_logprobs is not None:
                theirs = given.old_logprobs[i]
                if len(theirs) != len(ids) - prompt:
                    raise ValueError(
                        f"{form.key('old_logprobs')!r} has {len(theirs)} numbers for the "
                        f"{len(ids) - prompt} tokens of answer {i}: give completions as the tokens "
                        "that they are of"
                    )
                old[prompt:] = theirs
            columns = {"supervised": np.arange(len(ids)) >= prompt, "old_logprobs": old}
            own = {"advantage": advantages[i], "reward": rewards[i]}
            examples.append(Example(ids, columns, own))
        return examples


def compute_advantages(rewards: np.ndarray, *, scale: bool = True) -> np.ndarray:
    """Of the answers to one prompt; exactly 0 where all rewards are equal."""
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + 1e-4) if scale else centred


def append_empty_thinking(prompt: str, texts: Sequence[str]) -> str:
    """The prompt, with the empty block of reasoning that all these texts have at its end."""
    begins = set()
    for text in texts:
        parted = common_prefix_length(prompt, text)
        end = skip_empty_thinking(text, parted)
        begins.add(text[:end] if end > parted else prompt)
    return begins.pop() if len(begins) == 1 else prompt


# Rows of tokens with what a teacher makes of each: its most likely tokens and their
# log-probabilities.
#
# N tokens of a row, K of them at a place

PROBABILITY_TOLERANCE = (
    1e-3  # by which probabilities may add up to more than 1, as they are rounded
)
LOWEST_LOGPROB = float(np.finfo(np.float32).min)  # log-probability that a column can hold


class TopEncoder(FormatEncoder):
    """Sequences of tokens, each with the teacher's distribution that it stands in.

    `teacher_tokens[i]` and `teacher_logprobs[i]` are those of token i after the ones before it, as
    vLLM's prompt_logprobs are; the first token has none, and any may have fewer than others, in its
    row or another. Learned is where `completion_mask` is 1; without it, everything.
    """

    formats = DISTRIBUTED
    per_token: Mapping[str, DTypeLike] = {
        "supervised": np.bool_,
        "teacher_tokens": np.int32,
        "teacher_logprobs": np.float32,
    }

    def options(self) -> dict[str, Any]:
        return {"tokens": "counted"}  # teacher's too, as the highest that there are: once not

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        ids = _whole_numbers(form.get(row, "input_ids"), form.key("input_ids"))
        check_tokens(ids, form.key("input_ids"))
        tokens, logprobs = (form.get(row, n) for n in ("teacher_tokens", "teacher_logprobs"))
        for name, given in (("teacher_tokens", tokens), ("teacher_logprobs", logprobs)):
            if not isinstance(given, list) or len(given) != len(ids):
                raise ValueError(
                    f"{form.key(name)!r} must have a list for each of the {len(ids)} tokens"
                )
        mask = form.get(row, "completion_mask")
        learned = np.ones(len(ids), dtype=bool)
        if mask is not None:
            learned = np.array(_zeros_and_ones(mask, form.key("completion_mask")))
            if len(learned) != len(ids):
                raise ValueError(
                    f"{form.key('completion_mask')!r} has {len(learned)} values for {len(ids)} "
                    "tokens"
                )
        learned[:1] = False  # nothing predicts it
        if not learned.any():
            raise ValueError("has no token to learn behind its first")
        read = np.flatnonzero(learned).tolist()
        for i in read:
            _check_distribution(i, tokens[i], logprobs[i])
        shape = len(ids), max(len(tokens[i]) for i in read)
        columns = [
            np.full(shape, PAD_VALUES[name]) for name in ("teacher_tokens", "teacher_logprobs")
        ]
        for i in read:
            count = len(tokens[i])
            columns[0][i, :count], columns[1][i, :count] = tokens[i], logprobs[i]
        values = {"supervised": learned, "teacher_tokens": columns[0]}
        return [Example(ids, values | {"teacher_logprobs": columns[1]})]


def _whole_numbers(value: Any, name: str) -> list[int]:
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return value
    raise ValueError(f"{name!r} must be a list of whole numbers, not {value!r:.100}")


def _zeros_and_ones(value: Any, name: str) -> list[bool]:
    if isinstance(value, list) and all(type(v) in (int, bool) and v in (0, 1) for v in value):
        return [bool(v) for v in value]
    raise ValueError(f"{name!r} must be a list of 0 and 1, not {value!r:.100}")


def _check_distribution(place: int, tokens: Any, logprobs: Any) -> None:
    where = f"the teacher's distribution of token {place}"
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or not tokens:
        raise ValueError(f"{where} is empty: give its tokens and their log-probabilities")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{where} has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    if any(type(t) is not int or not 0 <= t < 2**31 for t in tokens) or len({*tokens}) < len(
        tokens
    ):
        raise ValueError(f"{where} has a duplicate or negative id: {tokens!r:.100}")
    real = all(
        type(p) in (int, float) and LOWEST_LOGPROB <= p <= PROBABILITY_TOLERANCE for p in logprobs
    )
    if not real or np.exp(np.array(logprobs, dtype=np.float64)).sum() > 1 + PROBABILITY_TOLERANCE:
        raise ValueError(f"{where} is none: its log-probabilities are {logprobs!r:.100}")
