"""Prompts with answers to examples: sequences of which the answers alone are learned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.answers import (
    MAX_FLOAT,
    AnswerSample,
    parse_labeled,
    parse_pair,
    parse_rewarded,
    read_number,
)
from tigon.data.encode import TemplateEncoder
from tigon.data.examples import SUPERVISED_COLUMN, Encoded, Example, result_or_error
from tigon.data.formats import Format, Row
from tigon.tokenizer import Tokenizer, common_prefix_length, skip_empty_thinking


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
    """Pairs: groups of two examples, the chosen and the rejected answer, each after the prompt.

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
        # Not shared_prompt: rows that are no error without it are the same with it
        return super().options() | {"margin": "margin" in self.per_example}

    def ignored(self, row: Row, format: Format) -> set[str]:
        unread = set() if self.per_example else {format.column("margin")} & row.keys()
        return super().ignored(row, format) | unread

    def row(self, row: Row, format: Format) -> Sequence[Example]:
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
        """Finds the format of a row; one with the keys of both has a label."""
        try:
            return format.detect(row, ("unpaired",))
        except ValueError:
            return format.detect(row, self.formats)

    def ignored(self, row: Row, format: Format) -> set[str]:
        return super().ignored(row, format) | ({format.column("margin")} & row.keys())

    def batch(self, rows: Sequence[Row], format: Format) -> Iterator[Encoded]:
        """Yields the examples of each row, or its error: each answer, followed by the prompt with
        the answer of the good row before, if there are several."""
        encoded = [result_or_error(self._encode_answers, row, format) for row in rows]
        good = [answers for answers in encoded if not isinstance(answers, ValueError)]
        previous = good[-1] if good else []  # of the first row the last one
        for answers in encoded:
            if isinstance(answers, ValueError):
                yield answers
                continue
            examples = []
            pairs, previous = zip(answers, previous, strict=True), answers
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
        return super().options() | {"scale": self.scale, "columns": sorted(self.per_example)}

    def row(self, row: Row, format: Format) -> Sequence[Example]:
        """Makes an example of each answer, with advantage and reward, NaN if unknown."""
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
    """Returns the prompt with the empty block of reasoning that all these texts begin with."""
    prompts = set()
    for text in texts:
        start = common_prefix_length(prompt, text)
        end = skip_empty_thinking(text, start)
        prompts.add(text[:end] if end > start else prompt)
    return prompts.pop() if len(prompts) == 1 else prompt
