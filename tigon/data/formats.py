"""Rows of data sets in the forms that people have them, as conversations and as texts.

A source's format is told once, from the keys of its first row; then every row must have it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tigon.data.messages import normalize_messages, normalize_tools, read_json, read_messages
from tigon.tokenizer.chat_template import check_variables

Row = dict[str, Any]
Messages = list[dict[str, Any]]
Asked = TypeVar("Asked", str, Messages, str | Messages)

CHATS = ("messages", "sharegpt", "prompt_completion", "instruction")
TEXTS = ("text",)
PAIRS, LABELLED, REWARDED = ("preference",), ("unpaired",), ("completions",)
DISTRIBUTED = ("distributions",)
# What a row of each format must have, and what else is read of it
REQUIRED = {
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
# Earlier versions left system out of these: rows that have it are others than in their caches
LATE_SYSTEM = ("prompt_completion", *PAIRS, *LABELLED, *REWARDED)
GIVEN = ("tools", "system", "chat_template_kwargs")  # to the chat template
OPTIONAL = {
    "messages": ("tools", "system", "weight", "chat_template_kwargs"),
    "sharegpt": ("tools", "system", "weight", "chat_template_kwargs"),
    "prompt_completion": ("tools", "system", "weight", "chat_template_kwargs"),
    "instruction": ("input", "history", "system", "weight", "chat_template_kwargs"),
    "text": ("weight",),
    "preference": ("prompt", "margin", *GIVEN),
    "unpaired": GIVEN,
    "distributions": ("completion_mask",),
    "completions": ("rewards", "advantages", "old_logprobs", *GIVEN),
}
VALUES = ("weight", "label", "margin")  # keys whose values are no text
KEYS = tuple(dict.fromkeys(k for names in (REQUIRED, OPTIONAL) for v in names.values() for k in v))
# Under which a key is found without `columns`
OTHER_NAMES = {"conversations": "messages", "conversation": "messages", "functions": "tools"}
# Keys whose messages may be JSON as text, as columns of Parquet and CSV have them
MESSAGE_LISTS = ("messages", "prompt", "completion", "chosen", "rejected")
EXPLAINED = {
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
# The task that has a format, for whoever gives its rows to another one
TASKS = {
    **{"text": "pretrain", "preference": "dpo", "unpaired": "kto", "completions": "grpo"},
    "distributions": "distill",
}
SMALLEST, LARGEST = 1e-30, 1e30  # weights; what is learned with them stays within float32
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),  # the assistant calls tools
}


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read."""

    kind: str | None = None  # one of REQUIRED; None: not told yet
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    eos: int | None = None  # the token that ends prompts and completions which are texts
    # Whether the columns are of one entry, and not of all: then each has to be read
    strict: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in REQUIRED:
            raise ValueError(f"format={self.kind!r} is not one of {', '.join(REQUIRED)}")
        for ours, theirs in self.columns.items():
            if ours not in KEYS:
                raise ValueError(
                    f"columns: {ours!r} is no key of a row that is read; they are "
                    f"{', '.join(KEYS)}, as in columns={{messages: dialog}}"
                )
            if not isinstance(theirs, str):
                raise ValueError(f"columns: {ours}={theirs!r} must be the name of a key")

    def __str__(self) -> str:
        return f"{self.kind} {sorted(self.columns.items())} {self.eos}"

    def key(self, ours: str) -> str:
        """The name that the rows have for a key."""
        return self.columns.get(ours, ours)

    def get(self, row: Row, ours: str) -> Any:
        """The row's value of a key; messages as a list, even if they are JSON as text."""
        value = row.get(self.key(ours))
        return read_messages(value) if ours in MESSAGE_LISTS and isinstance(value, str) else value

    def told(self, row: Row, accepted: Sequence[str]) -> "Format":
        """The format of the row, one of `accepted`; ValueError if none or several fit."""
        columns = dict(self.columns)
        for other, ours in OTHER_NAMES.items():
            if row.get(ours) is None and row.get(other) is not None:
                columns.setdefault(ours, other)
        form = replace(self, columns=columns)
        if self.kind is not None:
            fits = [self.kind] if form._fits(row, self.kind) else []
            accepted = [kind for kind in accepted if kind == self.kind]
        else:
            fits = [kind for kind in accepted if form._fits(row, kind)]
            mapped = [kind for kind in fits if self.columns.keys() & set(REQUIRED[kind])]
            fits = mapped or fits
        if len(fits) == 1 and fits[0] in accepted:
            keys = (*REQUIRED[fits[0]], *OPTIONAL[fits[0]])
            if self.strict and (unread := [ours for ours in self.columns if ours not in keys]):
                raise ValueError(
                    f"columns: {unread[0]!r} is no key of the format {fits[0]}, which these rows "
                    f"have; its keys are {', '.join(keys)}"
                )
            late = {"system": "system"} if "system" in row and fits[0] in LATE_SYSTEM else {}
            return replace(form, columns=late | columns, kind=fits[0])
        expected = "; ".join(f"{kind}: {EXPLAINED[kind]}" for kind in accepted)
        if fits:
            raise ValueError(
                f"its keys {_names(row)} fit several formats: say which with "
                f"format={' or format='.join(fits)}"
            )
        needed = [form.key(ours) for kind in accepted for ours in REQUIRED[kind]]
        if nulls := [key for key in needed if key in row and row[key] is None]:
            raise ValueError(f"{nulls[0]!r} is null: needs {expected}")
        elsewhere = [kind for kind in REQUIRED if kind not in accepted and form._fits(row, kind)]
        if self.kind is None and elsewhere:
            task = TASKS.get(elsewhere[0], "sft")
            raise ValueError(f"its keys {_names(row)} are those of task={task}; needs {expected}")
        raise ValueError(
            f"needs the keys of one of the formats {expected}; its keys are {_names(row)}; "
            + self._about_columns()
        )

    def _about_columns(self) -> str:
        """For an error; the columns may be those of all sources, and not meant for this one."""
        if not self.columns:
            return "columns= gives keys of other names, as in columns={messages: dialog}"
        named = ", ".join(f"{ours!r} is called {theirs!r}" for ours, theirs in self.columns.items())
        return f"by columns=, {named} (an entry of data or eval_data may have columns of its own)"

    def _fits(self, row: Row, kind: str) -> bool:
        if any(self.get(row, ours) is None for ours in REQUIRED[kind]):
            return False
        if kind in ("messages", "sharegpt"):
            messages = self.get(row, "messages")
            first = messages[0] if isinstance(messages, list) and messages else None
            return (isinstance(first, dict) and "from" in first) == (kind == "sharegpt")
        return True

    def read_keys(self) -> set[str]:
        """The keys of a row that are read."""
        assert self.kind is not None
        return {self.key(ours) for ours in (*REQUIRED[self.kind], *OPTIONAL[self.kind])}


@dataclass(frozen=True)
class Chat:
    """A conversation, and how much of it counts."""

    messages: Messages  # without "weight" and "train"
    weights: list[float | None]  # of each message; None: as train_on says
    names: list[str]  # of each message in its row, for errors
    prompt: int = 0  # messages at the start that are a prompt, and not learned
    weight: float = 1.0  # of all of it
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template


@dataclass(frozen=True)
class Text:
    """Text that is learned after text that is not."""

    completion: str
    prompt: str = ""
    weight: float = 1.0


def as_text(row: Row, form: Format) -> Text:
    """A row of the format text; ValueError if it is none."""
    return Text(_text(row, form, "text"), weight=_row_weight(row, form))


def as_chat(row: Row, form: Format) -> Chat | Text:
    """A row of one of the formats CHATS; a Text if prompt and completion are texts."""
    assert form.kind is not None
    weight = _row_weight(row, form)
    num_prompt = 0
    if form.kind == "prompt_completion":
        prompt, completion = form.get(row, "prompt"), form.get(row, "completion")
        if not isinstance(prompt, list) and not isinstance(completion, list):
            prompt = with_system(_text(row, form, "prompt"), row, form)
            return Text(_text(row, form, "completion"), prompt, weight)
        prompt, completion = _list(row, form, "prompt"), _list(row, form, "completion")
        if not completion:
            raise ValueError(f"{form.key('completion')!r} has no message")
        names = indexed_names(form.key("prompt"), len(prompt))
        names += indexed_names(form.key("completion"), len(completion))
        prompt = with_system(prompt, row, form)
        messages, num_prompt = [*prompt, *completion], len(prompt)
    elif form.kind == "instruction":
        messages = _instruction(row, form)
        names = [f"{form.key('history')}[{i // 2}]" for i in range(len(messages) - 2)]
        names += [form.key("instruction"), form.key("output")]
        messages = with_system(messages, row, form)
    else:
        messages = _list(row, form, "messages")
        if form.kind == "sharegpt":
            messages = [_from_sharegpt(i, message) for i, message in enumerate(messages)]
        names = indexed_names(form.key("messages"), len(messages))
        messages = with_system(messages, row, form)
    if len(messages) > len(names):
        names = [form.key("system"), *names]
    messages = normalize_messages(messages, "messages")
    # An opening message of the assistant answers nothing, so it is not learned
    greeting = form.kind != "prompt_completion" and _speaks(messages[:1]) and _speaks(messages[1:])
    weights = [_message_weight(i, message) for i, message in enumerate(messages)]
    messages = [
        {k: v for k, v in message.items() if k not in ("weight", "train")}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
    return Chat(
        messages,
        weights,
        names,
        1 if greeting else num_prompt,
        weight,
        tools_of(row, form),
        template_variables(row, form),
    )


def indexed_names(name: str, count: int, start: int = 0) -> list[str]:
    """The names of a list's messages, such as messages[0]."""
    return [f"{name}[{i}]" for i in range(start, start + count)]


def _speaks(messages: Messages) -> bool:
    """Whether the assistant says any of these messages."""
    return any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)


def template_variables(row: Row, form: Format) -> dict[str, Any]:
    """What the row says to the chat template; ValueError for what is not its own to say."""
    name = form.key("chat_template_kwargs")
    variables = read_json(form.get(row, "chat_template_kwargs"), repr(name)) or {}
    check_variables(variables, repr(name))
    return variables


def _instruction(row: Row, form: Format) -> Messages:
    asked = _text(row, form, "instruction")
    given = None if form.get(row, "input") is None else _text(row, form, "input")
    user = "\n\n".join(filter(None, (asked, given)))
    turns = [*_history(row, form), (user, _text(row, form, "output"))]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _history(row: Row, form: Format) -> list[tuple[str, str]]:
    """Earlier questions and answers, as LLaMA-Factory's Alpaca format has them."""
    name = form.key("history")
    pairs = read_json(form.get(row, "history"), repr(name)) or []
    if not isinstance(pairs, list):
        raise ValueError(f"{name!r} must be a list of [question, answer], not {kind_of(pairs)}")
    for i, pair in enumerate(pairs):
        texts = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not texts or len(pair) != 2:
            raise ValueError(
                f"{name}[{i}] must be [question, answer], two texts, not {pair!r:.100}"
            )
    return [(question, answer) for question, answer in pairs]


def with_system(messages: Asked, row: Row, form: Format) -> Asked:
    """Behind the row's system message, if any; ValueError if there are two, or for a text."""
    if not form.get(row, "system"):
        return messages
    system = _text(row, form, "system")
    if isinstance(messages, str):
        raise ValueError(f"{form.key('system')!r} needs a prompt of messages, not a text")
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        raise ValueError(f"has both a key {form.key('system')!r} and a message of the system")
    return [{"role": "system", "content": system}, *messages]


def _from_sharegpt(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "from" not in message or "value" not in message:
        raise ValueError(f"messages[{i}] needs the keys 'from' and 'value', got {message!r:.100}")
    speaker, value = message["from"], message["value"]
    speaker = speaker.lower() if isinstance(speaker, str) else speaker
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"messages[{i}]['from']={speaker!r:.100} is not one of {', '.join(ROLES)}")
    rest = {k: v for k, v in message.items() if k not in ("from", "value", "role", "content")}
    if ROLES[speaker] != "function_call":
        return {"role": ROLES[speaker], "content": value, **rest}
    calls = read_json(value, f"messages[{i}]['value'] of a function_call")
    return {
        "role": "assistant",
        "tool_calls": calls if isinstance(calls, list) else [calls],
        **rest,
    }


def _message_weight(i: int, message: Any) -> float | None:
    """None: the message says nothing of it."""
    if not isinstance(message, dict):
        return None
    weight, train = message.get("weight"), message.get("train")
    if train is not None:
        if not isinstance(train, bool):
            raise ValueError(f"messages[{i}]['train'] must be true or false, not {train!r:.100}")
        if weight is not None:
            raise ValueError(f"messages[{i}] has both 'weight' and 'train': give one of them")
        return float(train)
    return None if weight is None else _weight(weight, f"messages[{i}]['weight']")


def _row_weight(row: Row, form: Format) -> float:
    weight = form.get(row, "weight")
    return 1.0 if weight is None else _weight(weight, repr(form.key("weight")))


def _weight(value: Any, name: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r:.100}")
    if value and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name}={value!r:.100} must be 0 or from {SMALLEST} to {LARGEST}")
    return float(value)


def tools_of(row: Row, form: Format) -> list[Any] | None:
    """The functions that the row lets the model call; they may be given as JSON."""
    return normalize_tools(form.get(row, "tools"), form.key("tools"))


def _text(row: Row, form: Format, ours: str) -> str:
    value = form.get(row, ours)
    if not isinstance(value, str):
        raise ValueError(_missing(row, form, ours, "a text"))
    return value


def _list(row: Row, form: Format, ours: str) -> list[Any]:
    value = form.get(row, ours)
    if not isinstance(value, list):
        hint = ", which is not the JSON of one" if isinstance(value, str) else ""
        raise ValueError(_missing(row, form, ours, "a list of messages") + hint)
    return list(value)


def _missing(row: Row, form: Format, ours: str, needed: str) -> str:
    name = form.key(ours)
    if name not in row:
        return (
            f"needs {needed} {name!r}, as its source's first row has (format {form.kind}); "
            f"its keys are {_names(row)}"
        )
    return f"{name!r} must be {needed}, not {kind_of(row[name])}"


def kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _names(row: Collection[str]) -> str:
    return ", ".join(map(repr, row)) or "none"
