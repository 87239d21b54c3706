"""Rows of data sets in the forms that people have them, as conversations and as texts.

A source's format is detected once, from the keys of its first row; then every row must have it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tigon.data.content_check import EmptyAnswer
from tigon.data.messages import normalize_messages, normalize_tools, read_json, read_messages
from tigon.tokenizer import common_prefix_length
from tigon.tokenizer.chat_template import check_variables

Row = dict[str, Any]
Messages = list[dict[str, Any]]
MessagesOrText = TypeVar("MessagesOrText", str, Messages, str | Messages)

CHAT_FORMATS = ("messages", "sharegpt", "prompt_completion", "instruction")
# What a row of each format must have, and what else is read of it
REQUIRED_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "completions": ("prompt", "completions"),
    "distributions": ("input_ids", "teacher_tokens", "teacher_logprobs"),
}
# Earlier versions ignored `system` here, so rows with it need a new cache key
SYSTEM_FORMATS = ("prompt_completion", "preference", "unpaired", "completions")
TEMPLATE_KEYS = ("tools", "system", "chat_template_kwargs")  # to the chat template
OPTIONAL_KEYS = {
    "messages": ("tools", "system", "weight", "chat_template_kwargs"),
    "sharegpt": ("tools", "system", "weight", "chat_template_kwargs"),
    "prompt_completion": ("tools", "system", "weight", "chat_template_kwargs"),
    "instruction": ("input", "history", "system", "weight", "chat_template_kwargs"),
    "text": ("weight",),
    "preference": ("prompt", "margin", *TEMPLATE_KEYS),
    "unpaired": TEMPLATE_KEYS,
    "distributions": ("completion_mask",),
    "completions": ("rewards", "advantages", "old_logprobs", *TEMPLATE_KEYS),
}
VALUE_KEYS = ("weight", "label", "margin")  # keys whose values are no text
ROW_KEYS = tuple(
    dict.fromkeys(k for names in (REQUIRED_KEYS, OPTIONAL_KEYS) for v in names.values() for k in v)
)
# Names that are read as a key without `columns`
KEY_ALIASES = {"conversations": "messages", "conversation": "messages", "functions": "tools"}
# Keys whose messages may be JSON as text, as columns of Parquet and CSV have them
JSON_MESSAGE_KEYS = ("messages", "prompt", "completion", "chosen", "rejected")
DESCRIPTIONS = {
    "messages": '"messages": [{"role": ..., "content": ...}, ...]',
    "sharegpt": '"conversations": [{"from": "human", "value": ...}, ...]',
    "prompt_completion": '"prompt" and "completion", both texts or both lists of messages',
    "instruction": '"instruction" and "output", with or without "input"',
    "text": '"text"',
    "preference": '"chosen" and "rejected", texts or lists of messages, with or without "prompt"',
    "unpaired": '"prompt", "completion" and "label", which is true or false',
    "distributions": '"input_ids", "teacher_tokens", "teacher_logprobs"; for chats, set teacher',
    "completions": '"prompt", "completions" and "rewards" or "advantages"',
}
# The task of a format, for messages about rows of another task
TASK_OF_FORMAT = {
    **{"text": "pretrain", "preference": "dpo", "unpaired": "kto", "completions": "grpo"},
    "distributions": "distill",
}
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30  # weights; what is learned with them stays within float32
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),  # the assistant calls tools
}


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read."""

    kind: str | None = None  # one of REQUIRED_KEYS; None: detect it
    columns: Mapping[str, str] = field(default_factory=dict)  # a key -> its name in the rows
    eos: int | None = None  # the token that ends a text of prompt and completion
    # Whether each of the columns has to be read, as those of a single entry
    strict: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in REQUIRED_KEYS:
            raise ValueError(f"format={self.kind!r} is not one of {', '.join(REQUIRED_KEYS)}")
        for key, column in self.columns.items():
            if key not in ROW_KEYS:
                keys = ", ".join(ROW_KEYS)
                raise ValueError(f"columns: {key!r} is no key of a row that is read: {keys}")
            if not isinstance(column, str):
                raise ValueError(f"columns: {key}={column!r} must be the name of a key")

    def __str__(self) -> str:
        return f"{self.kind} {sorted(self.columns.items())} {self.eos}"

    def column(self, key: str) -> str:
        """The name that the rows have for a key."""
        return self.columns.get(key, key)

    def get(self, row: Row, key: str) -> Any:
        """Looks up the row's value of a key; decodes messages that are JSON as text."""
        value = row.get(self.column(key))
        if key in JSON_MESSAGE_KEYS and isinstance(value, str):
            return read_messages(value)
        return value

    def detect(self, row: Row, accepted: Sequence[str]) -> "Format":
        """Finds the format of the row among `accepted`; ValueError if none or several fit."""
        columns = dict(self.columns)
        for alias, key in KEY_ALIASES.items():
            if row.get(key) is None and row.get(alias) is not None:
                columns.setdefault(key, alias)
        format = replace(self, columns=columns)
        if self.kind is not None:
            fits = [self.kind] if format._fits(row, self.kind) else []
            accepted = [kind for kind in accepted if kind == self.kind]
        else:
            fits = [kind for kind in accepted if format._fits(row, kind)]
            mapped = [kind for kind in fits if self.columns.keys() & set(REQUIRED_KEYS[kind])]
            fits = mapped or fits
        if len(fits) == 1 and fits[0] in accepted:
            keys = (*REQUIRED_KEYS[fits[0]], *OPTIONAL_KEYS[fits[0]])
            if self.strict and (unread := self.columns.keys() - set(keys)):
                text = f"columns: {min(unread)!r} is no key of the format {fits[0]} of these rows"
                raise ValueError(f"{text}; its keys are {', '.join(keys)}")
            system = {"system": "system"} if "system" in row and fits[0] in SYSTEM_FORMATS else {}
            return replace(format, columns=system | columns, kind=fits[0])
        raise ValueError(self._describe_mismatch(row, format, accepted, fits))

    def _describe_mismatch(
        self, row: Row, format: "Format", accepted: Sequence[str], fits: Sequence[str]
    ) -> str:
        """Explains why a row has none of the accepted formats, or several."""
        names = ", ".join(map(repr, row)) or "none"
        expected = "; ".join(f"{kind}: {DESCRIPTIONS[kind]}" for kind in accepted)
        if fits:
            choices = " or format=".join(fits)
            return f"its keys {names} fit several formats: say which with format={choices}"
        required = [format.column(key) for kind in accepted for key in REQUIRED_KEYS[kind]]
        if nulls := [key for key in required if key in row and row[key] is None]:
            return f"{nulls[0]!r} is null: needs {expected}"
        for kind in REQUIRED_KEYS:
            if self.kind is None and kind not in accepted and format._fits(row, kind):
                task = TASK_OF_FORMAT.get(kind, "sft")
                return f"its keys {names} are those of task={task}; needs {expected}"
        if self.columns:
            pairs = ", ".join(f"{key!r} is called {name!r}" for key, name in self.columns.items())
            hint = f"by columns=, {pairs} (an entry of data or eval_data may have columns too)"
        else:
            hint = "columns= gives keys of other names, as in columns={messages: dialog}"
        return f"needs the keys of one of the formats {expected}; its keys are {names}; {hint}"

    def _fits(self, row: Row, kind: str) -> bool:
        """Whether the row has a value for each required key of a kind; messages and sharegpt are
        told apart by a key `from` in the first message."""
        if any(self.get(row, key) is None for key in REQUIRED_KEYS[kind]):
            return False
        if kind in ("messages", "sharegpt"):
            messages = self.get(row, "messages")
            first = messages[0] if isinstance(messages, list) and messages else None
            return (isinstance(first, dict) and "from" in first) == (kind == "sharegpt")
        return True

    def read_keys(self) -> set[str]:
        """Collects the names, in the rows, of all keys that the format reads."""
        assert self.kind is not None
        return {self.column(key) for key in (*REQUIRED_KEYS[self.kind], *OPTIONAL_KEYS[self.kind])}


@dataclass(frozen=True)
class WeightedChat:
    """A conversation with the loss weights of its messages."""

    messages: Messages  # without "weight" and "train"
    weights: list[float | None]  # of each message; None: as train_on says
    names: list[str]  # of each message in its row, for errors
    prompt: int = 0  # messages at the start that are a prompt, and not learned
    weight: float = 1.0  # of all of it
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template


@dataclass(frozen=True)
class WeightedText:
    """A completion, which is learned, after a prompt, which is not."""

    completion: str
    prompt: str = ""
    weight: float = 1.0


def parse_text(row: Row, format: Format) -> WeightedText:
    """Reads a row of the format text; ValueError if it is not one."""
    return WeightedText(_require_text(row, format, "text"), weight=_read_weight(row, format))


def parse_chat(row: Row, format: Format) -> WeightedChat | WeightedText:
    """Reads a row of one of CHAT_FORMATS; a WeightedText if prompt and completion are texts."""
    weight = _read_weight(row, format)
    num_prompt = 0
    if format.kind == "prompt_completion":
        prompt, completion = format.get(row, "prompt"), format.get(row, "completion")
        if not isinstance(prompt, list) and not isinstance(completion, list):
            prompt = prepend_system(_require_text(row, format, "prompt"), row, format)
            return WeightedText(_require_text(row, format, "completion"), prompt, weight)
        prompt = _require_messages(row, format, "prompt")
        completion = _require_messages(row, format, "completion")
        if not completion:
            raise ValueError(f"{format.column('completion')!r} has no message")
        names = index_names(format.column("prompt"), len(prompt))
        names += index_names(format.column("completion"), len(completion))
        prompt = prepend_system(prompt, row, format)
        messages, num_prompt = [*prompt, *completion], len(prompt)
    elif format.kind == "instruction":
        messages = _read_instruction(row, format)
        names = [f"{format.column('history')}[{i // 2}]" for i in range(len(messages) - 2)]
        names += [format.column("instruction"), format.column("output")]
        messages = prepend_system(messages, row, format)
    else:
        messages = _require_messages(row, format, "messages")
        if format.kind == "sharegpt":
            messages = [_convert_sharegpt(i, message) for i, message in enumerate(messages)]
        names = index_names(format.column("messages"), len(messages))
        messages = prepend_system(messages, row, format)
    if len(messages) > len(names):
        names = [format.column("system"), *names]
    messages = normalize_messages(messages, "messages")
    answers = [_get_role(message) == "assistant" for message in messages]
    if format.kind != "prompt_completion" and any(answers[:1]) and any(answers[1:]):
        num_prompt = 1  # an opening message of the assistant answers nothing
    weights = [_pop_weight(i, message) for i, message in enumerate(messages)]
    tools, variables = read_tools(row, format), read_template_variables(row, format)
    return WeightedChat(messages, weights, names, num_prompt, weight, tools, variables)


def index_names(name: str, count: int, start: int = 0) -> list[str]:
    """Names the messages of a list for errors: messages[0], messages[1] and so on."""
    return [f"{name}[{i}]" for i in range(start, start + count)]


def read_template_variables(row: Row, format: Format) -> dict[str, Any]:
    """Reads the row's variables for the chat template; ValueError for one that it may not set."""
    name = repr(format.column("chat_template_kwargs"))
    variables = read_json(format.get(row, "chat_template_kwargs"), name) or {}
    check_variables(variables, name)
    return variables


def _read_instruction(row: Row, format: Format) -> Messages:
    """Converts a row of the format instruction to turns of user and assistant: its history, then
    instruction and input, joined by a blank line, and output."""
    texts = [_require_text(row, format, "instruction")]
    if format.get(row, "input") is not None:
        texts.append(_require_text(row, format, "input"))
    user = "\n\n".join(filter(None, texts))
    turns = [*_read_history(row, format), (user, _require_text(row, format, "output"))]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _read_history(row: Row, format: Format) -> list[tuple[str, str]]:
    """Reads the earlier questions and answers of a row of LLaMA-Factory's Alpaca format."""
    name = format.column("history")
    pairs = read_json(format.get(row, "history"), repr(name)) or []
    if not isinstance(pairs, list):
        raise ValueError(f"{name!r} must be a list of [question, answer], not {type_name(pairs)}")
    for i, pair in enumerate(pairs):
        texts = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not texts or len(pair) != 2:
            raise ValueError(f"{name}[{i}] must be two texts [question, answer], not {pair!r:.100}")
    return [(question, answer) for question, answer in pairs]


def prepend_system(messages: MessagesOrText, row: Row, format: Format) -> MessagesOrText:
    """Puts the row's system message first; ValueError for a text, or if there is one already."""
    if not format.get(row, "system"):
        return messages
    system = _require_text(row, format, "system")
    if isinstance(messages, str):
        raise ValueError(f"{format.column('system')!r} needs a prompt of messages, not a text")
    if messages and _get_role(messages[0]) == "system":
        raise ValueError(f"has both a key {format.column('system')!r} and a message of the system")
    return [{"role": "system", "content": system}, *messages]


def _read_weight(row: Row, format: Format) -> float:
    """The row's loss weight, by default 1; raises ValueError for one that is no weight."""
    weight = format.get(row, "weight")
    return 1.0 if weight is None else _check_weight(weight, repr(format.column("weight")))


def _pop_weight(i: int, message: Any) -> float | None:
    """Removes `weight` or `train` from a message and returns its loss weight; None if it sets none.
    Raises ValueError for both, or for a bad value."""
    if not isinstance(message, dict):
        return None
    weight, train = message.pop("weight", None), message.pop("train", None)
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"messages[{i}]['train'] must be true or false, not {train!r:.100}")
    if train is not None and weight is not None:
        raise ValueError(f"messages[{i}] has both 'weight' and 'train': give one of them")
    if weight is None:
        return None if train is None else float(train)
    return _check_weight(weight, f"messages[{i}]['weight']")


def _convert_sharegpt(i: int, message: Any) -> dict[str, Any]:
    """Converts a message of ShareGPT to one with role and content, or tool_calls; other keys stay.
    Raises ValueError for an unknown speaker."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        raise ValueError(f"messages[{i}] needs the keys 'from' and 'value', got {message!r:.100}")
    speaker, value = message["from"], message["value"]
    role = SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        choices = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"messages[{i}]['from']={speaker!r:.100} is not one of {choices}")
    rest = {k: v for k, v in message.items() if k not in ("from", "value", "role", "content")}
    if role != "function_call":
        return {"role": role, "content": value, **rest}
    calls = read_json(value, f"messages[{i}]['value'] of a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": calls, **rest}


def _check_weight(value: Any, name: str) -> float:
    """Returns the value as a float; raises ValueError unless it is 0 or in [MIN_WEIGHT,
    MAX_WEIGHT]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r:.100}")
    if value and not MIN_WEIGHT <= value <= MAX_WEIGHT:
        raise ValueError(f"{name}={value!r:.100} must be 0 or from {MIN_WEIGHT} to {MAX_WEIGHT}")
    return float(value)


def read_tools(row: Row, format: Format) -> list[Any] | None:
    """Reads the functions that the row lets the model call, a list or its JSON as text."""
    return normalize_tools(format.get(row, "tools"), format.column("tools"))


def _require_text(row: Row, format: Format, key: str) -> str:
    """The row's value of a key; raises ValueError if it is no text."""
    value = format.get(row, key)
    if not isinstance(value, str):
        raise ValueError(_describe_missing(row, format, key, "a text"))
    return value


def _require_messages(row: Row, format: Format, key: str) -> list[Any]:
    """A copy of the row's list of messages under a key; raises ValueError if it is no list."""
    value = format.get(row, key)
    if not isinstance(value, list):
        hint = ", which is not the JSON of one" if isinstance(value, str) else ""
        raise ValueError(_describe_missing(row, format, key, "a list of messages") + hint)
    return list(value)


def _describe_missing(row: Row, format: Format, key: str, expected: str) -> str:
    """Say in a message that the row lacks a key, or that its value is not what is `expected`."""
    name = format.column(key)
    if name in row:
        return f"{name!r} must be {expected}, not {type_name(row[name])}"
    names = ", ".join(map(repr, row)) or "none"
    return (
        f"needs {expected} {name!r}, as its source's first row has (format {format.kind}); "
        f"its keys are {names}"
    )


def type_name(value: Any) -> str:
    """The name of the value's Python type; "null" for None."""
    return "null" if value is None else type(value).__name__


def _get_role(message: Any) -> Any:
    """The role of a message; None if it has none or is no dictionary."""
    return message.get("role") if isinstance(message, dict) else None


# Rows of prompts with answers that are preferred or not, in TRL's formats.
#
# https://huggingface.co/docs/trl/dataset_formats: pairs with an explicit or an implicit prompt,
# and single answers with a label; each as texts or as lists of messages.

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
    answers = tuple(_text_or_messages(row, format, key) for key in PAIR_KEYS)
    chosen, rejected = answers
    _check_same_kind(names, answers)
    prompt: TextOrMessages | None = None
    if format.get(row, "prompt") is not None:
        prompt = _text_or_messages(row, format, "prompt")
    if isinstance(prompt, list) and isinstance(chosen, str):
        _check_same_kind((format.column("prompt"), "the answers"), (prompt, ""))
    if chosen == rejected:
        raise ValueError(f"{names[0]!r} and {names[1]!r} are equal")
    start = 0  # the index of an answer's first message in the row
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        shared, *rest = split_prompt(chosen, rejected)
        is_answered = bool(shared) and all(rest) and not _list_non_answers(rest)
        if prompt is None and not shared_prompt and not is_answered:
            _check_not_empty(names, answers)
            sample = _build_sample(row, format, type(shared)(), answers, names)
            conversations = tuple(prepend_system(answer, row, format) for answer in answers)
            return replace(sample, prompt=type(shared)(), answers=conversations, learns_all=True)
        _check_shared_prompt(prompt, shared, rest)
        prompt, answers, start = shared, tuple(rest), len(shared)
    elif (
        isinstance(prompt, list)
        and prompt
        and _get_role(prompt[0]) in ("user", "system")
        and all(answer[: len(prompt)] == prompt for answer in answers)
    ):
        start = len(prompt)
        answers = tuple(answer[start:] for answer in answers)
    _check_answers(names, answers)
    return _build_sample(row, format, prompt, answers, names, start)


def split_prompt(
    chosen: TextOrMessages, rejected: TextOrMessages
) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    """Returns the common beginning of both, two texts or two lists of messages, and the rest of
    each; a space at its end goes to the rests."""
    end = common_prefix_length(chosen, rejected)
    if end and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def parse_labeled(row: Row, format: Format) -> tuple[AnswerSample, bool]:
    """Read the answer of a row of the format unpaired, and whether it is desired."""
    label, name = format.get(row, "label"), format.column("label")
    if type(label) not in (bool, int) or label not in (0, 1):
        raise ValueError(f"{name!r} must be true or false, or 1 or 0, not {label!r:.100}")
    prompt, answer = (_text_or_messages(row, format, key) for key in ("prompt", "completion"))
    names = (format.column("completion"),)
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
            raise ValueError(
                f"{name!r} is a list of tokens, and so must each answer be one, none empty"
            )
        check_token_ids(prompt, format.column("prompt"))
        for answer in answers:
            check_token_ids(answer, key)
        sequences = [prompt + answer for answer in answers]
        return RewardedSample((len(prompt), sequences), values, are_advantages, logprobs)
    answers = [read_messages(a) if isinstance(a, str) else a for a in answers]
    for i, answer in enumerate(answers):
        if not isinstance(answer, str | list):
            raise ValueError(f"{key!r} has {type_name(answer)} in it: give texts or messages")
        if isinstance(answer, list):
            answers[i] = normalize_messages(answer, f"{key}[{i}]")
    prompt = _text_or_messages(row, format, "prompt")
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
    """Whether the value is an int or float, no bool, in the range of float32."""
    return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT


def read_number(row: Row, format: Format, name: str, default: float) -> float:
    """Reads a finite number of the row; the default if it has none. Raises ValueError for any other
    value."""
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


def _text_or_messages(row: Row, format: Format, key: str) -> TextOrMessages:
    """The row's value of a key, a text or normalized messages; raises ValueError for anything
    else."""
    value, name = format.get(row, key), format.column(key)
    if isinstance(value, str | list):
        return value if isinstance(value, str) else normalize_messages(value, name)
    raise ValueError(f"{name!r} must be a text or a list of messages, not {type_name(value)}")


def _check_same_kind(names: Sequence[str], values: Sequence[object]) -> None:
    """Raises ValueError unless both values are texts, or both are lists of messages."""
    if isinstance(values[0], list) != isinstance(values[1], list):
        first, second = (f"{n!r} is {type_name(v)}" for n, v in zip(names, values, strict=True))
        raise ValueError(f"{first} and {second}: both must be texts, or both lists of messages")


def _check_shared_prompt(
    prompt: TextOrMessages | None, shared: TextOrMessages, answers: Sequence[TextOrMessages]
) -> None:
    """Raises ValueError if chosen and rejected do not answer one prompt, the row's if it has
    one."""
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
            f"on with a message of {_get_role(messages[0])!r:.100}"
        )
    questions = [m.get("content") for m in shared if isinstance(m, dict) and _get_role(m) == "user"]
    if prompt is not None and prompt not in questions:
        raise ValueError(
            f"the prompt {prompt!r:.100} is none of the messages that both conversations begin with"
        )


def _check_not_empty(names: Sequence[str], answers: Sequence[TextOrMessages]) -> None:
    """Raises ValueError for an answer that is an empty text (EmptyAnswer) or has no message."""
    for name, answer in zip(names, answers, strict=True):
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
        _check_not_empty([name], [answer])
        if isinstance(answer, list) and (role := _get_role(answer[0])) in ("user", "system"):
            hint = "an answer is the assistant's (leave the prompt out where both have it)"
            raise ValueError(f"{name!r} begins with a message of {role!r}: {hint}")


def _list_non_answers(answers: Sequence[TextOrMessages]) -> list[Any]:
    """Lists the first messages of the answers that are not the assistant's."""
    first = [answer[0] for answer in answers if isinstance(answer, list) and answer]
    return [message for message in first if _get_role(message) != "assistant"]
