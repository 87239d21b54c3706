"""Renders chat templates to the same text as transformers, and lists the times they write."""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tigon.utils.config import prefix_errors
from tigon.utils.json import escape

Message = Mapping[str, Any]

MAX_TEMPLATE = 2**16  # characters; the longest that are known have half of it
MAX_TEXT = 2**26  # characters of a rendered conversation
# Keys of a turn's reasoning in data sets; templates read the first, gpt-oss the second
REASONING = ("reasoning_content", "thinking", "reasoning")
# Arguments of the functions that take template variables beside them
RESERVED = {
    *("self", "template", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("padding", "truncation", "messages", "tools", "documents", "train_on", "weights"),
    *("chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("strftime_now", "train_on_empty_thinking"),
}
# Marks the end of the message to continue; the space shows whether the template strips messages
_END_MARK = "<|CUT HERE|> "
_generation_callback: ContextVar[Callable[[str], None]] = ContextVar("generation_callback")


class Null(str):
    """Empty text that stands for `content: null`. None itself is removed from messages."""


class RenderedChat(NamedTuple):
    """The text that a chat template writes for a conversation."""

    text: str
    generations: list[tuple[int, str]]  # start and text of each {% generation %} block


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    strftime_now: Callable[[str], str] | None = None,
    **variables: Any,
) -> RenderedChat:
    """Renders a conversation by a chat template.

    `strftime_now` formats the time for the template's function of this name, by default now.
    Raises ValueError with the template's message if the template refuses the conversation.
    """
    clock = strftime_now or format_time
    try:
        chat = [_template_message(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message excludes add_generation_prompt")
            final_text = _mark_end(chat[-1], len(chat) - 1)
        variables = _plain(variables) | {
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [_plain(_tool_schema(tool)) for tool in tools],
            "documents": None if documents is None else _plain(list(documents)),
            "strftime_now": lambda format: clock(format),
        }
    except RecursionError:
        raise ValueError("what the chat template takes is nested too deeply") from None
    rendered = _generate(_compile(template), variables)
    if continue_final_message:
        return rendered._replace(text=_cut_at_mark(rendered.text, final_text))
    return rendered


def now() -> datetime:
    """Returns the time that `strftime_now` formats by default; tests replace it."""
    return datetime.now()


def format_time(format: str, time: datetime | None = None) -> str:
    """Returns a time, by default now, in a format of strftime."""
    return (time or now()).strftime(format)


class _Generation(Extension):
    """Parses `{% generation %}...{% endgeneration %}`, and passes its text to the callback."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """Parses a block into a call of `_report` on its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_report"), [], [], body).set_lineno(line)

    @staticmethod
    def _report(caller: Callable[[], str]) -> str:
        """Pass the text of a block to the callback, and return it."""
        text = caller()
        _generation_callback.get()(text)
        return text


class _TemplateNamespace(Namespace):
    """jinja's namespace, but it refuses private attributes, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args  # so that namespace(self=...) works, as in jinja's
        Namespace.__init__(self)
        for name, value in dict(*values, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: Any, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no private attributes such as {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    """Raises TemplateError: what templates call to refuse a conversation."""
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as transformers' filter: without jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment of transformers' `_compile_jinja_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "namespace": _TemplateNamespace}
    return environment


@lru_cache
def _compile(template: str) -> jinja2.Template:
    """Compiles a chat template, once; ValueError if it is too long or no template."""
    if len(template) > MAX_TEMPLATE:
        raise ValueError(f"the chat template has over {MAX_TEMPLATE} characters: {len(template)}")
    try:
        return _environment().from_string(template)
    except Exception as error:  # jinja raises many kinds for what it cannot compile
        raise _template_error(error) from error


def _generate(template: jinja2.Template, variables: dict[str, Any]) -> RenderedChat:
    """Render a compiled template, and note where its {% generation %} blocks begin; ValueError for
    what the template raises, or if its text is too long."""
    pieces: list[str] = []
    generations: list[tuple[int, str]] = []
    length = 0
    token = _generation_callback.set(lambda text: generations.append((length, text)))
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_TEXT:
                raise jinja2.TemplateError(f"it writes more than {MAX_TEXT} characters")
    except Exception as error:  # a template can raise most kinds that there are
        raise _template_error(error) from error
    finally:
        _generation_callback.reset(token)
    text = "".join(pieces)
    check_unicode(text)
    return RenderedChat(text, generations)


def _template_error(error: Exception) -> ValueError:
    """Returns a ValueError with the line of the template in which the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    if isinstance(error, jinja2.TemplateSyntaxError):
        lines.append(error.lineno)
    location = f" in line {lines[-1]}" if lines else ""
    reason = str(error)
    if not isinstance(error, jinja2.TemplateError | TypeError):
        reason = f"{type(error).__name__}: {reason}"
    return ValueError(f"the chat template failed{location}: {escape(reason)}")


def choose_template(
    templates: str | dict[str, str] | None, choice: str | None, tools: Sequence[Any] | None
) -> str:
    """Returns the template of a name, `choice` itself if it is a template, or for None the only
    one, the one for tools or the default; ValueError if there is none."""
    if choice is None and isinstance(templates, str):
        return templates
    named = templates if isinstance(templates, dict) else {}
    if choice is None:
        choice = "tool_use" if tools is not None and "tool_use" in named else "default"
        if choice not in named:
            raise ValueError(
                f"choose one of the templates {sorted(named)} with chat_template=NAME"
                if named
                else "the tokenizer has no chat template: pass one as chat_template= (to train, "
                "its file), or put it into chat_template.jinja beside tokenizer.json"
            )
    if choice not in named and "{" not in choice:
        raise ValueError(f"no chat template is called {choice!r}: there are {sorted(named)}")
    return named.get(choice, choice)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError, which names the message and its key, unless this is a conversation."""
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
    """Raises ValueError unless this is a dict of variables that a chat template can take."""
    keys = variables.keys() if isinstance(variables, dict) else RESERVED
    if RESERVED & keys or not all(isinstance(key, str) for key in keys):
        raise ValueError(
            f"{name} must be an object of the chat template's own variables, not {variables!r:.100}"
        )
    with prefix_errors(name, ValueError):
        _plain(variables)


def check_unicode(text: Any) -> None:
    """Raises ValueError if a text has a lone surrogate, which JSON can write but UTF-8 cannot."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start]
        raise ValueError(
            f"has the lone surrogate {text[error.start]!a} behind {before!r}, which is not Unicode"
        ) from None


def _template_message(message: Message) -> dict[str, Any]:
    """Copies a message without None values, with reasoning under both keys."""
    plain: dict[str, Any] = _plain({k: v for k, v in message.items() if v is not None})
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tool_schema(tool: Any) -> Any:
    """Returns the JSON schema of a tool: of a function what transformers makes of its type hints
    and docstring, else the tool itself; ValueError if it is neither function nor schema."""
    if isinstance(tool, Mapping):
        return tool
    if not callable(tool):
        raise ValueError(f"a tool must be a function or its JSON schema, got {tool!r:.100}")
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        text = "a function as a tool needs pip install 'tigon[transformers]'"
        raise ImportError(f"{text}: or give its JSON schema") from None
    return get_json_schema(tool)


def _plain(value: Any) -> Any:
    """Copies a value as plain JSON types, without a subclass' methods; ValueError for others."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    match value:
        case Null():
            return None
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            items = [_plain(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
    raise ValueError(f"a chat template takes JSON, not {type(value).__name__}: {value!r:.100}")


def _mark_end(message: dict[str, Any], i: int) -> str:
    """Append the mark to the last text of the message, and return the text without it."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _END_MARK
            return text
    raise ValueError(f"continue_final_message: messages[{i}] has no text to continue")


def _cut_at_mark(text: str, final_text: str) -> str:
    """Cut the text at the mark, and strip its end if the template strips messages; ValueError if
    the final message is not in it."""
    end = text.rfind(_END_MARK.strip())
    if end < 0 or final_text.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template does not write the final message as it is: "
            f"{final_text!r:.200}"
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


_USER = {"role": "user", "content": "?"}
_SYSTEM, _ANSWER = ({**_USER, "role": role} for role in ("system", "assistant"))
_PROBE_CHATS = [_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER]
_PROBE_TOOLS = None, [{"type": "function", "function": {"name": "f", "description": "?"}}]


def template_times(
    template: str, variables: Mapping[str, Any], time: datetime | None
) -> dict[str, str]:
    """Returns the time, by default now, in each format that the template asks strftime_now for, by
    format.

    It is asked in short chats, so that a template whose `variables` pin the time asks for none.
    """
    times: dict[str, str] = {}

    def note(format: str) -> str:
        times[format] = format_time(format, time)
        return times[format]

    for messages, tools in product(_PROBE_CHATS, _PROBE_TOOLS):
        with suppress(ValueError):  # the template refuses the chat
            render(template, messages, tools=tools, strftime_now=note, **variables)
    return times
