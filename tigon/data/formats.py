"""Rows of data sets in the forms that people have them, as conversations and as texts.

A source's format is detected once, from the keys of its first row; then every row must have it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tigon.data.messages import (
    index_names,
    normalize_messages,
    normalize_tools,
    read_json,
    read_messages,
)
from tigon.settings.data import REQUIRED_KEYS, check_format
from tigon.tokenizer.chat_template import check_variables

Row = dict[str, Any]
Messages = list[dict[str, Any]]
MessagesOrText = TypeVar("MessagesOrText", str, Messages, str | Messages)

CHAT_FORMATS = ("messages", "sharegpt", "prompt_completion", "instruction")
TEMPLATE_KEYS = ("tools", "system", "chat_template_kwargs")  # to the chat template
OPTIONAL_KEYS = {
    **dict.fromkeys(("messages", "sharegpt", "prompt_completion"), ("weight", *TEMPLATE_KEYS)),
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
        check_format(self.kind)
        for key, column in self.columns.items():
            if key not in ROW_KEYS:
                if column in ROW_KEYS:
                    raise ValueError(f"columns: write {column}: {key}, the name in your rows last")
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
        if self.kind is not None and self.kind not in accepted:
            task = TASK_OF_FORMAT.get(self.kind, "sft")
            raise ValueError(
                f"format={self.kind} is of task={task}, and not one of {', '.join(accepted)}"
            )
        columns = dict(self.columns)
        for alias, key in KEY_ALIASES.items():
            if row.get(key) is None and row.get(alias) is not None:
                columns.setdefault(key, alias)
        format = replace(self, columns=columns)
        if self.kind is not None:
            fits = [self.kind] if format._fits(row, self.kind) else []
            accepted = [self.kind]
        else:
            fits = [kind for kind in accepted if format._fits(row, kind)]
            mapped = [kind for kind in fits if self.columns.keys() & set(REQUIRED_KEYS[kind])]
            fits = mapped or fits
        if len(fits) == 1:
            keys = (*REQUIRED_KEYS[fits[0]], *OPTIONAL_KEYS[fits[0]])
            if self.strict and (unread := self.columns.keys() - set(keys)):
                text = f"columns: {min(unread)!r} is no key of the format {fits[0]} of these rows"
                raise ValueError(f"{text}; its keys are {', '.join(keys)}")
            return replace(format, kind=fits[0])
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
            key = REQUIRED_KEYS[accepted[0]][0]
            hint = f"columns= gives keys of other names, as in columns={{{key}: NAME}}"
        return f"its keys are {names}, which fit no format; {hint}. The formats are {expected}"

    def _fits(self, row: Row, kind: str) -> bool:
        """Whether the row has a kind's required keys; a key `from` tells sharegpt from messages."""
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
        messages, num_prompt = [*prompt, *completion], len(prompt)
        names = index_names(format.column("prompt"), len(prompt))
        names += index_names(format.column("completion"), len(completion))
    elif format.kind == "instruction":
        messages = _read_instruction(row, format)
        names = [f"{format.column('history')}[{i // 2}]" for i in range(len(messages) - 2)]
        names += [format.column("instruction"), format.column("output")]
    else:
        messages = _require_messages(row, format, "messages")
        names = index_names(format.column("messages"), len(messages))
        if format.kind == "sharegpt":
            messages = list(map(_convert_sharegpt, messages, names))
    messages = prepend_system(messages, row, format)
    if len(messages) > len(names):
        names = [format.column("system"), *names]
        num_prompt += format.kind == "prompt_completion"
    messages = normalize_messages(messages, names)
    answers = [get_role(message) == "assistant" for message in messages]
    if format.kind != "prompt_completion" and any(answers[:1]) and any(answers[1:]):
        num_prompt = 1  # an opening message of the assistant answers nothing
    weights = list(map(_pop_weight, messages, names))
    tools, variables = read_tools(row, format), read_template_variables(row, format)
    return WeightedChat(messages, weights, names, num_prompt, weight, tools, variables)


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
    if messages and get_role(messages[0]) == "system":
        raise ValueError(f"has both a key {format.column('system')!r} and a message of the system")
    return [{"role": "system", "content": system}, *messages]


def _read_weight(row: Row, format: Format) -> float:
    """The row's loss weight, by default 1; raises ValueError for one that is no weight."""
    weight = format.get(row, "weight")
    return 1.0 if weight is None else _check_weight(weight, repr(format.column("weight")))


def _pop_weight(message: Any, name: str) -> float | None:
    """Removes `weight` or `train` from a message and returns its loss weight; None if it sets none.
    Raises ValueError for both, or for a bad value."""
    if not isinstance(message, dict):
        return None
    weight, train = message.pop("weight", None), message.pop("train", None)
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"{name}['train'] must be true or false, not {train!r:.100}")
    if train is not None and weight is not None:
        raise ValueError(f"{name} has both 'weight' and 'train': give one of them")
    if weight is None:
        return None if train is None else float(train)
    return _check_weight(weight, f"{name}['weight']")


def _convert_sharegpt(message: Any, name: str) -> dict[str, Any]:
    """Converts a message of ShareGPT to one with role and content, or tool_calls; other keys stay.
    Raises ValueError for an unknown speaker."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        raise ValueError(f"{name} needs the keys 'from' and 'value', got {message!r:.100}")
    speaker, value = message["from"], message["value"]
    role = SHAREGPT_ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        choices = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"{name}['from']={speaker!r:.100} is not one of {choices}")
    rest = {k: v for k, v in message.items() if k not in ("from", "value", "role", "content")}
    if role != "function_call":
        return {"role": role, "content": value, **rest}
    calls = read_json(value, f"{name}['value'] of a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": calls, **rest}


def _check_weight(value: Any, name: str) -> float:
    """Returns the value as a float; ValueError unless 0 or in [MIN_WEIGHT, MAX_WEIGHT]."""
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


def get_role(message: Any) -> Any:
    """The role of a message; None if it has none or is no dictionary."""
    return message.get("role") if isinstance(message, dict) else None
