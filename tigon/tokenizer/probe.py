"""What a chat template takes: content as text or as parts, tool arguments as an object or as text.

Templates do not say so, and one that is given the other kind fails, writes Python's text of it, or
writes nothing. So a short conversation is tried, once for each template.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from tigon.tokenizer.chat import Message, Null, render

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


class Taken(NamedTuple):
    """What the messages of a template must have."""

    content_parts: bool = False  # content as [{"type": "text", "text": ...}], not as text
    arguments_text: bool = False  # the arguments of tool calls as JSON text, not as an object
    no_content: str = ""  # the content of a message of tool calls alone, however it is spelled

    def convert(self, messages: Sequence[Message]) -> list[Any]:
        """Messages with content as text and tool arguments as objects, as the template takes them.

        What is no such message stays as it is.
        """
        return [self._message(m) if isinstance(m, dict) else m for m in messages]

    def _message(self, message: Message) -> Message:
        message = dict(message)
        if message.get("tool_calls"):
            if not message.get("content"):
                message["content"] = self.no_content
            if self.arguments_text:
                message["tool_calls"] = [*map(_with_text, message["tool_calls"])]
        if self.content_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message


def _with_text(call: Any) -> Any:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)  # as the filter tojson writes it
    return {**call, "function": {**function, "arguments": text}}


@lru_cache(maxsize=32)
def probe(template: str, variables: tuple[tuple[str, str], ...]) -> Taken:
    """What a template takes, given these variables; where nothing works, what most do."""
    asked = [{"role": "user", "content": _VALUE}]
    kinds = (Taken(content_parts=parts) for parts in (False, True))
    parts = next(
        (k.content_parts for k in kinds if _VALUE in _render(template, k, asked, None, variables)),
        False,
    )
    for text, content in product((False, True), ("", Null())):
        taken = Taken(parts, text, content)
        written = _render(template, taken, [*asked, _TURN], [_TOOL], variables)
        if _NAME in written and _KEY in written and f"'{_KEY}':" not in written:
            return taken
    return Taken(parts)


def _render(
    template: str,
    taken: Taken,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: tuple[tuple[str, str], ...],
) -> str:
    """The text of the messages; empty where the template refuses them."""
    given: dict[str, Any] = dict(variables)
    try:
        return render(template, taken.convert(messages), tools=tools, **given).text
    except ValueError:
        return ""
