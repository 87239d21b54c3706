"""Chat templates, rendered as transformers renders them."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser

from tigon.tokenizer.budget import ALLOWANCE
from tigon.tokenizer.sandbox import Sandbox
from tigon.tokenizer.schema import function_schema
from tigon.utils.json import escape

Message = Mapping[str, Any]

# Keys of a turn's reasoning in data sets; templates read the first, gpt-oss the second
REASONING = ("reasoning_content", "thinking", "reasoning")
# The space at its end shows whether the template strips the message
_CUT = "<|CUT HERE|> "


class Null(str):
    """Empty text that stands for `content: null`. None itself is left out of what templates get."""


class Rendered(NamedTuple):
    text: str
    generations: list[tuple[int, str]]  # start and text of each {% generation %} block


# No variables of a chat template, but arguments of the functions that take them
RESERVED = {
    *("self", "template", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("padding", "truncation", "messages", "tools", "documents", "train_on", "weights"),
    *("chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("strftime_now", "train_on_empty_thinking"),
}
_note: ContextVar[Callable[[str], None]] = ContextVar("note")
_time: ContextVar[datetime | None] = ContextVar("time", default=None)


class _Generation(Extension):
    """Notes the text of each `{% generation %}...{% endgeneration %}`: what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    @staticmethod
    def _generation(caller: Callable[[], str]) -> str:
        text = caller()
        _note.get()(text)
        return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))  # here, where its own errors are the template's


def now() -> datetime:
    """The time that templates write, unless one is given."""
    return datetime.now()


def _strftime_now(format: str) -> str:
    if len(format) > 100:  # the C library pads numbers as a format says
        raise ValueError(f"strftime_now takes a short format, not {len(format)} characters")
    check_unicode(format)
    return (_time.get() or now()).strftime(format)


class _Thread(threading.local):
    """What each thread has of its own: a sandbox, and the templates compiled for it."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.sandbox.globals["raise_exception"] = _raise_exception
        self.sandbox.globals["strftime_now"] = _strftime_now
        self.compile = lru_cache(self._compile)

    def _compile(self, template: str) -> jinja2.Template:
        try:
            return self.sandbox.compile_chat(template)
        except Exception as error:  # jinja raises many kinds for what it cannot compile
            raise self.failure(error) from error

    def failure(self, error: Exception) -> ValueError:
        """The one error for whatever a template does wrong."""
        line = self.sandbox.line(error)
        where = "" if line is None else f" in line {line}"
        what = str(error)
        if not isinstance(error, jinja2.TemplateError | TypeError):
            what = f"{type(error).__name__}: {what}"
        return ValueError(f"the chat template failed{where}: {escape(what)}")


_thread = _Thread()


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    strftime_now: datetime | None = None,
    **variables: Any,
) -> Rendered:
    """The conversation as text; ValueError with the template's own message where it refuses.

    `strftime_now`: the time that the template's function of this name formats; None: now.
    """
    try:
        chat = [_message(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt exclude each other"
                )
            final = _mark_end(chat[-1], len(chat) - 1)
        given = {
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [_plain(_tool(tool)) for tool in tools],
            "documents": None if documents is None else _plain(list(documents)),
            **_plain(variables),
        }
    except RecursionError:
        raise ValueError("what the chat template takes is nested too deeply") from None
    rendered = _run(_thread.compile(template), given, strftime_now)
    if continue_final_message:
        return rendered._replace(text=_cut(rendered.text, final))
    return rendered


def _run(template: jinja2.Template, given: dict[str, Any], time: datetime | None) -> Rendered:
    sandbox = _thread.sandbox
    pieces: list[str] = []
    generations: list[tuple[int, str]] = []
    length, most = 0, ALLOWANCE
    token = _note.set(lambda text: generations.append((length, text)))
    clock = _time.set(time)
    sandbox.start(given)
    try:
        for piece in template.root_render_func(template.new_context(given)):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                most = sandbox.more_text(length)
    except Exception as error:  # of any kind: a template can raise most that there are
        raise _thread.failure(error) from error
    finally:
        sandbox.stop()
        _note.reset(token)
        _time.reset(clock)
    text = "".join(pieces)
    try:
        check_unicode(text)
    except ValueError as error:
        if _is_unicode(given):
            raise ValueError(f"the chat template failed: its text {error}") from None
        raise
    return Rendered(text, generations)


def _is_unicode(given: dict[str, Any]) -> bool:
    """Whether no text that a template takes has half of a surrogate pair."""
    try:
        check_unicode(json.dumps(given, ensure_ascii=False, skipkeys=True))
    except ValueError:
        return False
    return True


def check_messages(messages: Sequence[Message]) -> None:
    """ValueError that names the row and the key which keep `messages` from being a conversation."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r:.100}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dict, got {message!r:.100}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{i}]['role'] must be a name such as 'user', got {role!r}")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"messages[{i}]['content'] is missing (role {role!r})")
        if not isinstance(content, (str, list, tuple, Mapping, type(None))):
            raise ValueError(f"messages[{i}]['content'] must be text, got {content!r:.100}")


def check_variables(variables: Any, name: str) -> None:
    """ValueError unless these are variables that a chat template can have."""
    keys = variables.keys() if isinstance(variables, dict) else RESERVED
    if RESERVED & keys or not all(isinstance(key, str) for key in keys):
        raise ValueError(
            f"{name} must be an object of the chat template's own variables, not {variables!r:.100}"
        )
    try:
        _plain(variables)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_unicode(text: Any) -> None:
    """ValueError for half of a surrogate pair, which JSON can write but no text can have."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise ValueError(
            f"has the lone surrogate {text[error.start]!a} behind {near!r}, which is not Unicode"
        ) from None


def _message(message: Message) -> dict[str, Any]:
    # Templates handle absent keys, but most print None
    plain: dict[str, Any] = _plain({k: v for k, v in message.items() if v is not None})
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of plain JSON types, so that a template cannot call the methods of others."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return None if isinstance(value, Null) else str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    raise ValueError(
        f"a chat template takes JSON values, not {type(value).__name__}: {value!r:.100}"
    )


def _tool(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return tool
    if callable(tool):
        return function_schema(tool)
    raise ValueError(f"a tool must be a function or the dict of its JSON schema, got {tool!r:.100}")


def _mark_end(message: dict[str, Any], i: int) -> str:
    """Puts the mark after the message's (last) text, which is returned."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CUT
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CUT
            return text
    raise ValueError(f"continue_final_message: messages[{i}] has no text to continue")


def _cut(text: str, final: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template does not write the final message as it is: "
            f"{final!r:.200}"
        )
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()
