"""What a chat template expects: content as text or parts, tool arguments as an object or text.

Templates do not say so. With the other kind they fail, write Python's text of it, or write nothing:
so a short conversation is rendered in each way, once for each template.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from tigon.tokenizer.chat import REASONING, Message, Null, render

_TAGGED = re.compile(r"\s*<think>\n*(.*?)\n*</think>\n*(.*)", re.DOTALL)
_NAME, _KEY, _VALUE = "probe_function", "probe_key", "probe_value"
_CALL = {"name": _NAME, "arguments": {_KEY: _VALUE}}
# Some Mistral templates need an id of nine characters
_TURN = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "?",
        "parameters": {"type": "object", "properties": {}},
    },
}


class MessageFormat(NamedTuple):
    """What a chat template expects of messages."""

    content_parts: bool = False  # content as [{"type": "text", "text": ...}], not as text
    arguments_text: bool = False  # the arguments of tool calls as JSON text, not as an object
    no_content: str = ""  # the content of a message of tool calls alone, however it is spelled
    reasoning_key: bool = False  # reasoning as reasoning_content alone, not in tags in the content

    def convert(self, messages: Sequence[Message]) -> list[Any]:
        """Messages with content as text and tool arguments as objects, in this format."""
        return [self._message(m) if isinstance(m, dict) else m for m in messages]

    def _message(self, message: Message) -> Message:
        message = dict(message)
        if self.reasoning_key:
            message |= _without_tags(message)
        if message.get("tool_calls"):
            if not message.get("content"):
                message["content"] = self.no_content
            if self.arguments_text:
                message["tool_calls"] = [*map(_with_text, message["tool_calls"])]
        if self.content_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message


def _without_tags(message: Message) -> Message:
    """The content and the reasoning of an answer that begins with reasoning in tags."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return {}
    found = _TAGGED.match(content)
    if found is None or any(message.get(key) for key in REASONING):
        return {}
    return {"reasoning_content": found[1], "content": found[2]}


def _with_text(call: Any) -> Any:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)  # as the filter tojson writes it
    return {**call, "function": {**function, "arguments": text}}


@lru_cache(maxsize=32)
def probe(template: str, variables: tuple[tuple[str, str], ...]) -> MessageFormat:
    """The format that the template renders; the usual one, if it renders no tool calls."""
    user = [{"role": "user", "content": _VALUE}]
    kinds = (MessageFormat(content_parts=parts) for parts in (False, True))
    parts = next(
        (k.content_parts for k in kinds if _VALUE in _render(template, k, user, None, variables)),
        False,
    )
    tagged = {"role": "assistant", "content": f"<think>\n{_KEY}\n</think>\n\n{_VALUE}"}
    tags, key = (
        _render(template, MessageFormat(parts, reasoning_key=k), [*user, tagged], None, variables)
        for k in (False, True)
    )
    # A second block of reasoning: it was looked for in a key of its own
    reasoning = _KEY in key and tags.count("<think>") > 1
    for text, content in product((False, True), ("", Null())):
        form = MessageFormat(parts, text, content, reasoning)
        written = _render(template, form, [*user, _TURN], [_TOOL], variables)
        if _NAME in written and _KEY in written and f"'{_KEY}':" not in written:
            return form
    return MessageFormat(parts, reasoning_key=reasoning)


def _render(
    template: str,
    form: MessageFormat,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: tuple[tuple[str, str], ...],
) -> str:
    """The text of the messages; empty where the template refuses them."""
    given: dict[str, Any] = dict(variables)
    try:
        return render(template, form.convert(messages), tools=tools, **given).text
    except ValueError:
        return ""
