"""Rows of prompts with answers that are preferred or not, in TRL's formats.

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
    indexed_names,
    kind_of,
    template_variables,
    tools_of,
    with_system,
)
from tigon.data.messages import normalize_messages, read_json, read_messages
from tigon.tokenizer import common_prefix_length

Said = str | Messages  # a text, or messages
LARGEST = float(np.finfo(np.float32).max)  # number that a column can hold
ROUNDED = 1e-3  # by which a log-probability may be above 0


@dataclass(frozen=True)
class Prompted:
    """Answers to one prompt; all are texts, or all are lists of messages."""

    prompt: Said
    answers: tuple[Said, ...]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    whole: bool = False  # all of the answers is learned: there is no prompt
    names: tuple[list[str], ...] = ()  # of the messages of prompt and answer in the row, for errors

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list)


def as_pair(row: Row, form: Format, *, of_one_prompt: bool = True) -> Prompted:
    """A row of the format preference: its chosen and its rejected answer; ValueError if bad.

    Without a prompt, it is what both begin with; if they answer none together it is an error, or
    without `of_one_prompt` an empty prompt. A prompt that is a text, of answers that are whole
    conversations (as in UltraFeedback), has to be what these ask; one of messages may stand at the
    beginning of both answers again.
    """
    chosen, rejected = (_said(row, form, name) for name in ("chosen", "rejected"))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(
            f"{form.key('chosen')!r} is {kind_of(chosen)} and {form.key('rejected')!r} is "
            f"{kind_of(rejected)}: both must be texts, or both lists of messages"
        )
    names = (form.key("chosen"), form.key("rejected"))
    start = 0  # the index of an answer's first message in the row
    given = form.get(row, "prompt")
    prompt = None if given is None else _said(row, form, "prompt")
    whole = prompt is None or (isinstance(prompt, str) and isinstance(chosen, list))
    if isinstance(prompt, list) and isinstance(chosen, str):
        raise ValueError(
            f"{form.key('prompt')!r} is a list of messages, and the answers are texts: make them "
            "lists of messages too"
        )
    if chosen == rejected:
        raise ValueError(f"{form.key('chosen')!r} and {form.key('rejected')!r} are equal")
    if whole:
        shared, *rest = split_prompt(chosen, rejected)
        if prompt is None and not of_one_prompt and not _answer(shared, rest):
            for name, said in (("chosen", chosen), ("rejected", rejected)):
                _check_content(form.key(name), said)
            read = _prompted(row, form, type(shared)(), (chosen, rejected), names)
            both = (with_system(chosen, row, form), with_system(rejected, row, form))
            return replace(read, prompt=type(shared)(), answers=both, whole=True)
        _check_shared(prompt, shared, rest)
        prompt, (chosen, rejected), start = shared, rest, len(shared)
    elif _repeat(prompt, (chosen, rejected)):
        assert prompt is not None
        start = len(prompt)
        chosen, rejected = chosen[start:], rejected[start:]
    assert prompt is not None
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(form.key(name), answer)
    return _prompted(row, form, prompt, (chosen, rejected), names, start)


def split_prompt(chosen: Said, rejected: Said) -> tuple[Said, Said, Said]:
    """What both begin with, and what is left of each; a space in between goes to the answers."""
    end = common_prefix_length(chosen, rejected)
    if end and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def as_labelled(row: Row, form: Format) -> tuple[Prompted, bool]:
    """A row of the format unpaired: one answer, and whether it is desired."""
    label = form.get(row, "label")
    if type(label) not in (bool, int) or label not in (0, 1):
        raise ValueError(
            f"{form.key('label')!r} must be true or false, or 1 or 0, not {label!r:.100}"
        )
    prompt, answer = _said(row, form, "prompt"), _said(row, form, "completion")
    _check_alike(form, "completion", prompt, answer)
    _check_answer(form.key("completion"), answer)
    return _prompted(row, form, prompt, (answer,), (form.key("completion"),)), bool(label)


@dataclass(frozen=True)
class Rewarded:
    """Answers that a policy gave to a prompt, and how good they are."""

    said: Prompted | None  # None: tokens
    prompt: list[int]  # if they are tokens
    answers: list[list[int]]
    values: list[float]  # rewards, or advantages
    are_advantages: bool
    old_logprobs: list[list[float]] | None  # of each answer's tokens, by the policy that gave them


def as_rewarded(row: Row, form: Format) -> Rewarded:
    """A row of the format completions; prompt and completions may be texts, messages or tokens."""
    prompt = form.get(row, "prompt")
    answers = read_json(form.get(row, "completions"), repr(form.key("completions")))
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"{form.key('completions')!r} must be a list of answers")
    given = [name for name in ("rewards", "advantages") if form.get(row, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"needs either {form.key('rewards')!r} or {form.key('advantages')!r}, "
            f"{'and has both' if given else 'and has neither'}"
        )
    count = len(answers)
    values = _numbers(form.get(row, given[0]), form.key(given[0]), count)
    if given == ["rewards"] and count == 1:
        raise ValueError(
            f"{form.key('rewards')!r} of one answer teach nothing, as its advantage is 0: give "
            f"{form.key('advantages')!r}, or at least two {form.key('completions')!r}"
        )
    old = form.get(row, "old_logprobs")
    name = form.key("old_logprobs")
    if old is not None:
        if not isinstance(old, list) or len(old) != count:
            raise ValueError(f"{name!r} must have a list for each of the {count} answers")
        old = [_numbers(some, name) for some in old]
        if above := [value for some in old for value in some if value > ROUNDED]:
            raise ValueError(f"{name!r} has {above[0]!r} in it: log-probabilities are at most 0")
    tokens = isinstance(prompt, list) and all(type(i) is int for i in prompt)
    if tokens and not all(_are_tokens(answer) for answer in answers):
        raise ValueError(
            f"{form.key('prompt')!r} is a list of tokens, and so must each answer be one, and none "
            "empty"
        )
    if tokens:
        for key, ids in (("prompt", prompt), *(("completions", answer) for answer in answers)):
            check_tokens(ids, form.key(key))
    said = None
    if not tokens:
        key = form.key("completions")
        answers = [read_messages(a) if isinstance(a, str) else a for a in answers]
        for answer in answers:
            if not isinstance(answer, str | list):
                raise ValueError(
                    f"{key!r} has {kind_of(answer)} in it: give texts, or lists of messages"
                )
        answers = [_normalized(a, f"{key}[{i}]") for i, a in enumerate(answers)]
        names = indexed_names(key, len(answers))
        said = _prompted(row, form, _said(row, form, "prompt"), tuple(answers), names)
        for answer in said.answers:
            _check_alike(form, "completions", said.prompt, answer)
            _check_answer(key, answer)
        prompt, answers = [], []
    return Rewarded(said, prompt, answers, values, given == ["advantages"], old)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def check_tokens(ids: Sequence[int], name: str) -> None:
    """ValueError for a number that no vocabulary has; the model's own size is checked later."""
    for i in ids:
        if not 0 <= i < 2**31:
            raise ValueError(f"{name!r} has {i!r:.100} in it, which is no token")


def _numbers(values: Any, name: str, count: int | None = None) -> list[float]:
    """Finite ones, as many as `count` says."""
    if not isinstance(values, list) or (count is not None and len(values) != count):
        raise ValueError(
            f"{name!r} must be a list of numbers" + ("" if count is None else f", {count} of them")
        )
    for value in values:
        if not _is_number(value):
            raise ValueError(f"{name!r} has {value!r:.100} in it, which is no finite number")
    return [float(value) for value in values]


def _is_number(value: Any) -> bool:
    """Whether it is finite, in float32 too."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def number(row: Row, form: Format, name: str, missing: float) -> float:
    """A finite number of the row."""
    value = form.get(row, name)
    if value is None:
        return missing
    if not _is_number(value):
        raise ValueError(f"{form.key(name)!r} must be a finite number, not {value!r:.100}")
    return float(value)


def _prompted(
    row: Row,
    form: Format,
    prompt: Said,
    answers: tuple[Said, ...],
    names: Sequence[str],
    start: int = 0,
) -> Prompted:
    """`names` are those of the answers; `start` is the index of their first message in the row."""
    full_prompt = with_system(prompt, row, form)
    message_names: tuple[list[str], ...] = ()
    if isinstance(prompt, list):
        system = [form.key("system")] * (len(full_prompt) - len(prompt))
        has_prompt = isinstance(form.get(row, "prompt"), list)
        message_names = tuple(
            system
            + indexed_names(form.key("prompt") if has_prompt else name, len(prompt))
            + indexed_names(name, len(answer), start)
            for name, answer in zip(names, answers, strict=True)
        )
    variables = template_variables(row, form)
    return Prompted(full_prompt, answers, tools_of(row, form), variables, names=message_names)


def _said(row: Row, form: Format, name: str) -> Said:
    value = form.get(row, name)
    if isinstance(value, str | list):
        return _normalized(value, form.key(name))
    raise ValueError(
        f"{form.key(name)!r} must be a text or a list of messages, not {kind_of(value)}"
    )


def _normalized(said: Said, name: str) -> Said:
    return said if isinstance(said, str) else normalize_messages(said, name)


def _check_alike(form: Format, name: str, prompt: Said, answer: Said) -> None:
    if isinstance(prompt, list) != isinstance(answer, list):
        raise ValueError(
            f"{form.key('prompt')!r} is {kind_of(prompt)} and {form.key(name)!r} is "
            f"{kind_of(answer)}: both must be texts, or both lists of messages"
        )


def _check_shared(given: Said | None, shared: Said, answers: Sequence[Said]) -> None:
    """That two whole texts or conversations answer one prompt, and the row's own if it has one."""
    if not shared and given is not None:
        raise ValueError(
            f"the prompt {given!r:.100} is a text, and no message that chosen and rejected "
            "begin with: make it a list of messages too"
        )
    if not shared:
        raise ValueError(
            "chosen and rejected answer different prompts: they have no beginning in common, and "
            "the row has no prompt; columns={prompt: NAME} says which key it is"
        )
    if isinstance(shared, str):
        return
    for name, rest in zip(("chosen", "rejected"), answers, strict=True):
        if rest and _role(rest[0]) != "assistant":
            raise ValueError(
                f"chosen and rejected answer different prompts: where they part, {name} goes on "
                f"with a message of {_role(rest[0])!r:.100}"
            )
    asked = [m.get("content") for m in shared if isinstance(m, dict) and _role(m) == "user"]
    if given is not None and given not in asked:
        raise ValueError(
            f"the prompt {given!r:.100} is none of the messages that both conversations begin with"
        )


def _answer(prompt: Said, rest: Sequence[Said]) -> bool:
    """Whether what is left of two texts or conversations answers what both begin with."""
    if not prompt or not all(rest):
        return False
    return all(isinstance(said, str) or _role(said[0]) == "assistant" for said in rest)


def _repeat(prompt: Said | None, answers: Sequence[Said]) -> bool:
    """Whether the answers are whole conversations, which begin with a prompt of messages."""
    if not isinstance(prompt, list) or not prompt or _role(prompt[0]) not in ("user", "system"):
        return False
    return all(answer[: len(prompt)] == prompt for answer in answers)


def _check_answer(name: str, answer: Said) -> None:
    _check_content(name, answer)
    if isinstance(answer, list) and _role(answer[0]) in ("user", "system"):
        raise ValueError(
            f"{name!r} begins with a message of {_role(answer[0])!r}: an answer is the "
            "assistant's (leave the prompt out where both have it)"
        )


def _check_content(name: str, answer: Said) -> None:
    if isinstance(answer, str):
        if not answer:
            raise EmptyAnswer(f"{name!r} has no answer: it is empty behind the prompt")
        return
    if not answer:
        raise ValueError(f"{name!r} has no answer: no message follows the prompt")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
