"""Prompts with answers to examples: sequences of which the answers alone are learned."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.content_check import ContentCheck
from tigon.data.encoders import FormatEncoder, unread_by_template, words_of_template
from tigon.data.examples import SUPERVISED, Example
from tigon.data.formats import LABELLED, PAIRS, REWARDED, Format, Row
from tigon.data.preferences import LARGEST, Prompted, as_labelled, as_pair, as_rewarded, number
from tigon.tokenizer import Tokenizer, common_prefix_length, skip_empty_thinking

KEYS = ("prompt", "chosen", "rejected", "completion")  # of rows, that may be lists of messages


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
        self.read_in_messages = {"role", "content"} | words_of_template(tokenizer)

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
                prompt_text = with_empty_thinking(prompt_text, texts)
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
        found = super().ignored(row, form) | unread_by_template(row, form, self.read_in_messages)
        known = self.read_in_messages
        for name in KEYS:
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
            values = {"margin": number(row, form, "margin", 0.0)}
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

    def told(self, row: Row, form: Format) -> Format:
        """A row with the keys of both formats is an answer with its label."""
        try:
            return form.told(row, LABELLED)
        except ValueError:
            return form.told(row, self.formats)

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

    def together(self, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
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
            advantages, rewards = advantages_of(values, scale=self.scale), values
            if np.abs(advantages).max() > LARGEST:
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


def advantages_of(rewards: np.ndarray, *, scale: bool = True) -> np.ndarray:
    """Of the answers to one prompt; exactly 0 where all rewards are equal."""
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + 1e-4) if scale else centred


def with_empty_thinking(prompt: str, texts: Sequence[str]) -> str:
    """The prompt, with the empty block of reasoning that all these texts have at its end."""
    begins = set()
    for text in texts:
        parted = common_prefix_length(prompt, text)
        end = skip_empty_thinking(text, parted)
        begins.add(text[:end] if end > parted else prompt)
    return begins.pop() if len(begins) == 1 else prompt
