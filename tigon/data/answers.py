"""Rows of prompts with answers that are preferred, labelled or rewarded, in TRL's formats.

https://huggingface.co/docs/trl/dataset_formats: pairs with an explicit or an implicit prompt, and
single answers with a label; each as texts or as lists of messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tigon.data.content_check import EmptyAnswer
from tigon.data.formats import (
    Format,
    Messages,
    Row,
    get_role,
    prepend_system,
    read_template_variables,
    read_tools,
    type_name,
)
from tigon.data.messages import index_names, normalize_messages, read_json, read_messages
from tigon.tokenizer import common_prefix_length

TextOrMessages = str | Messages
MAX_FLOAT = float(np.finfo(np.float32).max)  # number that a column can hold
PAIR_KEYS = ("chosen", "rejected")
LOGPROB_TOLERANCE = 1e-3  # by which a log-probability may be above 0


@dataclass(frozen=True)
class AnswerSample:
    """A prompt with its answers; all are texts, or all are lists of messages."""

    prompt: TextOrMessages
    answers: tuple[TextOrMessages, ...]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    learns_all: bool = False  # there is no prompt: everything is learned
    names: tuple[list[str], ...] = ()  # of the messages of prompt and answer in the row, for errors


def parse_pair(row: Row, format: Format, *, shared_prompt: bool = True) -> AnswerSample:
    """Reads the chosen and the rejected answer of a row of the format preference.

    Without a prompt, it is the common beginning of both; if there is none, that is an error, or
    without `shared_prompt` an empty prompt. A prompt that is a text, before answers that are
    conversations (as in UltraFeedback), must be a question in both; a prompt of messages may be
    repeated at the beginning of both answers.
    """
    names = format.column("chosen"), format.column("rejected")
    pairs = zip(PAIR_KEYS, names, strict=True)
    answers = tuple(_text_or_messages(format.get(row, key), name) for key, name in pairs)
    chosen, rejected = answers
    _check_same_kind(names, answers)
    prompt: TextOrMessages | None = format.get(row, "prompt")
    if prompt is not None:
        prompt = _text_or_messages(prompt, format.column("prompt"))
    if isinstance(prompt, list) and isinstance(chosen, str):
        _check_same_kind((format.column("prompt"), names[0]), (prompt, chosen))
    if chosen == rejected:
        raise ValueError(f"{names[0]!r} and {names[1]!r} are equal")
    start = 0  # the index of an answer's first message in the row
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        end = common_prefix_length(chosen, rejected)
        if end and chosen[end - 1] == " ":  # begins the answers
            end -= 1
        shared, *rest = chosen[:end], chosen[end:], rejected[end:]
        is_answered = bool(shared) and all(rest) and not _list_non_answers(rest)
        if prompt is None and not shared_prompt and not is_answered:
            for pair in zip(names, answers, strict=True):
                _check_not_empty(*pair)
            sample = _build_sample(row, format, type(shared)(), answers, names)
            conversations = tuple(prepend_system(answer, row, format) for answer in answers)
            return replace(sample, prompt=type(shared)(), answers=conversations, learns_all=True)
        _check_shared_prompt(prompt, shared, rest)
        prompt, answers, start = shared, tuple(rest), len(shared)
    elif (
        isinstance(prompt, list)
        and prompt
        and get_role(prompt[0]) in ("user", "system")
        and all(answer[: len(prompt)] == prompt for answer in answers)
    ):
        start = len(prompt)
        answers = tuple(answer[start:] for answer in answers)
    _check_answers(names, answers)
    return _build_sample(row, format, prompt, answers, names, start)


def parse_labeled(row: Row, format: Format) -> tuple[AnswerSample, bool]:
    """Read the answer of a row of the format unpaired, and whether it is desired."""
    label, name = format.get(row, "label"), format.column("label")
    if type(label) not in (bool, int) or label not in (0, 1):
        raise ValueError(f"{name!r} must be true or false, or 1 or 0, not {label!r:.100}")
    prompt = _text_or_messages(format.get(row, "prompt"), format.column("prompt"))
    names = (format.column("completion"),)
    answer = _text_or_messages(format.get(row, "completion"), *names)
    _check_answers(names, (answer,), prompt, format)
    return _build_sample(row, format, prompt, (answer,), names), bool(label)


@dataclass(frozen=True)
class RewardedSample:
    """A policy's answers to a prompt, with their rewards or advantages."""

    # If they are tokens, how many the prompt has, and the prompt with each answer
    answers: AnswerSample | tuple[int, list[list[int]]]
    values: list[float]  # rewards, or advantages
    are_advantages: bool
    old_logprobs: list[list[float]] | None  # of each answer's tokens, by the policy that gave them


def parse_rewarded(row: Row, format: Format) -> RewardedSample:
    """Reads a row of the format completions, whose answers are texts, messages or tokens."""
    prompt, key = format.get(row, "prompt"), format.column("completions")
    answers = read_json(format.get(row, "completions"), repr(key))
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"{key!r} must be a list of answers")
    scores = [name for name in ("rewards", "advantages") if format.get(row, name) is not None]
    rewards, advantages = format.column("rewards"), format.column("advantages")
    if len(scores) != 1:
        present = "and has both" if scores else "and has neither"
        raise ValueError(f"needs either {rewards!r} or {advantages!r}, {present}")
    count = len(answers)
    values = _check_numbers(format.get(row, scores[0]), format.column(scores[0]), count)
    if scores == ["rewards"] and count == 1:
        raise ValueError(
            f"{rewards!r} of one answer teach nothing, as its advantage is 0: give {advantages!r}, "
            f"or at least two {key!r}"
        )
    logprobs, name = format.get(row, "old_logprobs"), format.column("old_logprobs")
    if logprobs is not None:
        if not isinstance(logprobs, list) or len(logprobs) != count:
            raise ValueError(f"{name!r} must have a list for each of the {count} answers")
        logprobs = [_check_numbers(numbers, name) for numbers in logprobs]
        if bad := [p for numbers in logprobs for p in numbers if p > LOGPROB_TOLERANCE]:
            raise ValueError(f"{name!r} has {bad[0]!r} in it: log-probabilities are at most 0")
    are_advantages = scores == ["advantages"]
    if isinstance(prompt, list) and all(type(i) is int for i in prompt):
        if not all(map(is_token_list, answers)):
            name = format.column("prompt")
            raise ValueError(f"{name!r} is a list of tokens: each answer must be one, none empty")
        check_token_ids(prompt, format.column("prompt"))
        for answer in answers:
            check_token_ids(answer, key)
        sequences = [prompt + answer for answer in answers]
        return RewardedSample((len(prompt), sequences), values, are_advantages, logprobs)
    answers = [
        _text_or_messages(read_messages(answer) if isinstance(answer, str) else answer, name)
        for answer, name in zip(answers, index_names(key, count), strict=True)
    ]
    prompt = _text_or_messages(prompt, format.column("prompt"))
    sample = _build_sample(row, format, prompt, tuple(answers), index_names(key, count))
    _check_answers([key] * count, sample.answers, sample.prompt, format)
    return RewardedSample(sample, values, are_advantages, logprobs)


def is_token_list(value: Any) -> bool:
    """Whether the value is a list of whole numbers with at least one."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def check_token_ids(ids: Sequence[int], name: str) -> None:
    """Raises ValueError for a number that cannot be a token of any vocabulary."""
    if bad := [i for i in ids if not 0 <= i < 2**31]:
        raise ValueError(f"{name!r} has {bad[0]!r:.100} in it, which is no token")


def _check_numbers(values: Any, name: str, count: int | None = None) -> list[float]:
    """Returns the values as floats; raises ValueError unless they are a list of numbers that
    float32 holds, `count` of them if it is given."""
    if not isinstance(values, list) or (count is not None and len(values) != count):
        size = "" if count is None else f", {count} of them"
        raise ValueError(f"{name!r} must be a list of numbers{size}")
    if bad := [value for value in values if not _is_float32(value)]:
        raise ValueError(f"{name!r} has {bad[0]!r:.100} in it, which is no finite number")
    return [float(value) for value in values]


def _is_float32(value: Any) -> bool:
    return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT


def read_number(row: Row, format: Format, name: str, default: float) -> float:
    """Reads a finite number of the row; the default if it has none, ValueError for others."""
    value = format.get(row, name)
    if value is None:
        return default
    if not _is_float32(value):
        raise ValueError(f"{format.column(name)!r} must be a finite number, not {value!r:.100}")
    return float(value)


def _build_sample(
    row: Row,
    format: Format,
    prompt: TextOrMessages,
    answers: tuple[TextOrMessages, ...],
    names: Sequence[str],
    start: int = 0,
) -> AnswerSample:
    """Builds the sample of a row, with the system message, tools and variables that the row has.

    `names` are the keys of the answers; `start` is the index of their first message in the row.
    """
    full_prompt = prepend_system(prompt, row, format)
    message_names: tuple[list[str], ...] = ()
    if isinstance(prompt, list):
        system = [format.column("system")] * (len(full_prompt) - len(prompt))
        has_prompt = isinstance(format.get(row, "prompt"), list)
        message_names = tuple(
            system
            + index_names(format.column("prompt") if has_prompt else name, len(prompt))
            + index_names(name, len(answer), start)
            for name, answer in zip(names, answers, strict=True)
        )
    tools, variables = read_tools(row, format), read_template_variables(row, format)
    return AnswerSample(full_prompt, answers, tools, variables, names=message_names)


def _text_or_messages(value: Any, name: str) -> TextOrMessages:
    """The value, a text or normalized messages; raises ValueError for anything else."""
    if isinstance(value, list):
        return normalize_messages(value, index_names(name, len(value)))
    if isinstance(value, str):
        return value
    raise ValueError(f"{name!r} must be a text or a list of messages, not {type_name(value)}")


def _check_same_kind(names: Sequence[str], values: Sequence[object]) -> None:
    if isinstance(values[0], list) != isinstance(values[1], list):
        first, second = (f"{n!r} is {type_name(v)}" for n, v in zip(names, values, strict=True))
        raise ValueError(f"{first} and {second}: both must be texts, or both lists of messages")


def _check_shared_prompt(
    prompt: TextOrMessages | None, shared: TextOrMessages, answers: Sequence[TextOrMessages]
) -> None:
    """Raises ValueError if chosen and rejected do not answer one prompt."""
    if not shared and prompt is not None:
        raise ValueError(
            f"the prompt {prompt!r:.100} is a text, and no message that chosen and rejected "
            "begin with: make it a list of messages too"
        )
    if not shared:
        raise ValueError(
            "chosen and rejected answer different prompts: they have no beginning in common, and "
            "the row has no prompt; columns={prompt: NAME} says which key it is"
        )
    if isinstance(shared, str):
        return
    if messages := _list_non_answers(answers):
        raise ValueError(
            "chosen and rejected answer different prompts: after their common beginning, one goes "
            f"on with a message of {get_role(messages[0])!r:.100}"
        )
    questions = [m.get("content") for m in shared if isinstance(m, dict) and get_role(m) == "user"]
    if prompt is not None and prompt not in questions:
        raise ValueError(f"the prompt {prompt!r:.100} is no message that both answers begin with")


def _check_not_empty(name: str, answer: TextOrMessages) -> None:
    """Raises ValueError for an answer that is an empty text (EmptyAnswer) or has no message."""
    if answer == "":
        raise EmptyAnswer(f"{name!r} has no answer: it is empty behind the prompt")
    if not answer:
        raise ValueError(f"{name!r} has no answer: no message follows the prompt")


def _check_answers(
    names: Sequence[str],
    answers: Sequence[TextOrMessages],
    prompt: TextOrMessages | None = None,
    format: Format | None = None,
) -> None:
    """Raises ValueError for an answer that is empty or begins with a message of user or system,
    and, with `format`, for one that is a text where the prompt has messages, or the other way
    round."""
    for name, answer in zip(names, answers, strict=True):
        if format is not None:
            _check_same_kind((format.column("prompt"), name), (prompt, answer))
        _check_not_empty(name, answer)
        if isinstance(answer, list) and (role := get_role(answer[0])) in ("user", "system"):
            hint = "an answer is the assistant's (leave the prompt out where both have it)"
            raise ValueError(f"{name!r} begins with a message of {role!r}: {hint}")


def _list_non_answers(answers: Sequence[TextOrMessages]) -> list[Any]:
    """Lists the first messages of the answers that are not the assistant's."""
    first = [answer[0] for answer in answers if isinstance(answer, list) and answer]
    return [message for message in first if get_role(message) != "assistant"]
