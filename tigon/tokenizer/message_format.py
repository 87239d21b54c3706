"""Detects the form in which a chat template expects messages, such as content in parts.

Templates do not declare it. With the wrong form they fail, write Python's repr, or write nothing:
so a short conversation is rendered in each form, once for each template.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from tigon.tokenizer.chat_template import REASONING, Message, Null, render

_TAGGED = re.compile(r"\s*<think>\n*(.*?)\n*</think>\n*(.*)", re.DOTALL)
_NAME, _KEY, _VALUE = "probe_function", "probe_key", "probe_value"
_RESULT_KEY = "probe_result"
_CALL = {"name": _NAME, "arguments": {_KEY: _VALUE}}
_USER = {"role": "user", "content": _VALUE}
# Some Mistral templates need an id of nine characters
_TOOL_CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi"}
_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_TOOL_FUNCTION = {"name": "other", "description": "?", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _TOOL_FUNCTION}


class MessageFormat(NamedTuple):
    """The form in which a chat template expects messages."""

    content_parts: bool = False  # content as [{"type": "text", "text": ...}], not as text
    arguments_text: bool = False  # the arguments of tool calls as JSON text, not as an object
    no_content: str = ""  # the content of a message of tool calls alone
    results_text: tuple[type, ...] = ()  # what tools return of these types as JSON text
    reasoning_key: bool = False  # reasoning as reasoning_content alone, not in tags in the content

    def convert(self, messages: Sequence[Message]) -> list[Any]:
        """Converts messages to this form; they have content as text, and arguments as objects."""
        return [self._convert(m) if isinstance(m, dict) else m for m in messages]

    def _convert(self, message: Message) -> Message:
        """Copies a message in this form."""
        message = dict(message)
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, self.results_text):
            message["content"] = json.dumps(content, ensure_ascii=False)
        if (
            self.reasoning_key
            and message.get("role") == "assistant"
            and isinstance(content, str)
            and not any(message.get(key) for key in REASONING)
            and (match := _TAGGED.match(content))
        ):
            message |= {"reasoning_content": match[1], "content": match[2]}
        if message.get("tool_calls"):
            if not message.get("content"):
                message["content"] = self.no_content
            if self.arguments_text:
                message["tool_calls"] = [_dump_arguments(call) for call in message["tool_calls"]]
        if self.content_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message


def _dump_arguments(call: Any) -> Any:
    """Copies a tool call with its arguments as JSON text."""
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)  # as the filter tojson writes it
    return {**call, "function": {**function, "arguments": text}}


@lru_cache(maxsize=32)
def detect_format(template: str, variables: tuple[tuple[str, str], ...]) -> MessageFormat:
    """Returns the first format in which the template, rendered with these `variables`, writes all
    content of a short conversation; else the default."""
    options: dict[str, Any] = dict(variables)

    def text(format: MessageFormat, messages: Sequence[Message], tools: Any = None) -> str:
        try:
            return render(template, format.convert(messages), tools=tools, **options).text
        except ValueError:  # the template refuses them
            return ""

    parts = next((p for p in (False, True) if _VALUE in text(MessageFormat(p), [_USER])), False)
    tagged = {"role": "assistant", "content": f"<think>\n{_KEY}\n</think>\n\n{_VALUE}"}
    as_tags, as_key = (
        text(MessageFormat(parts, reasoning_key=key), [_USER, tagged]) for key in (False, True)
    )
    # With tags, a template that reads the key writes a second block of reasoning
    reasoning_key = _KEY in as_key and as_tags.count("<think>") > 1
    for arguments_text, no_content in product((False, True), ("", Null())):
        format = MessageFormat(parts, arguments_text, no_content, reasoning_key=reasoning_key)
        call = text(format, [_USER, _TOOL_CALLS], [_TOOL])
        if _NAME in call and _writes_key(_KEY, call):
            break
    else:
        format = MessageFormat(parts, reasoning_key=reasoning_key)
    written = {
        type(result): text(format, [_USER, _TOOL_CALLS, {**_RESULT, "content": result}], [_TOOL])
        for result in ({_RESULT_KEY: _VALUE}, [{_RESULT_KEY: _VALUE}])
    }
    unread = [kind for kind in written if not _writes_key(_RESULT_KEY, written[kind])]
    return format._replace(results_text=tuple(unread))


def _writes_key(key: str, text: str) -> bool:
    """Whether a text has the key of an object, and not as Python's repr writes it."""
    return key in text and f"'{key}':" not in text
