"""One form for messages and tools that data sets spell in several ways.

Content is text, and a tool call is {"type": "function", "function": {"name", "arguments"}} with
arguments as an object, as transformers documents it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tigon.utils.json import object_from_pairs

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles of older data sets, as chat templates name them
ROLE_ALIASES = {"function": "tool", "human": "user", "gpt": "assistant"}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of content parts in OpenAI's APIs


def index_names(name: str, count: int, start: int = 0) -> list[str]:
    """Names the messages of a list for errors: messages[0], messages[1] and so on."""
    return [f"{name}[{i}]" for i in range(start, start + count)]


def normalize_messages(messages: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Converts messages, but those that are no objects, to one form; ValueError for one that has
    none, which it calls by its name in `names`."""
    return [
        _normalize_message(message, name) if isinstance(message, dict) else message
        for message, name in zip(messages, names, strict=True)
    ]


def normalize_tools(tools: Any, name: str) -> list[Any] | None:
    """Wraps each tool as {"type": "function", "function": ...}, after decoding what is JSON as
    text; None without any. Raises ValueError if the tools are no list."""
    tools = read_json(tools, repr(name))
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"{name!r} must be a list or its JSON, not {type(tools).__name__}")
    return [
        _normalize_tool(read_json(tool, f"{name}[{i}]")) for i, tool in enumerate(tools)
    ] or None


def read_messages(text: str) -> Any:
    """Decode a text that is a JSON list of messages; return any other text as it is."""
    if not re.match(r"\s*\[\s*\{", text):
        return text
    try:
        messages = json.loads(text, object_pairs_hook=object_from_pairs)
    except (ValueError, RecursionError):
        return text
    if all(isinstance(message, dict) and message.keys() & {"role", "from"} for message in messages):
        return messages
    return text


def read_json(value: Any, name: str) -> Any:
    """Decode JSON if the value is a text, None if it is blank; return other values as they are."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, object_pairs_hook=object_from_pairs)
    except ValueError as error:
        raise ValueError(f"{name} is text, but not valid JSON: {error}") from None


def _normalize_message(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Copies a message without nulls, with roles and tool calls in one form and text parts of its
    content joined; ValueError, which names the message, for what has no such form."""
    plain = _drop_nulls(message)
    if plain.get("role") in ROLE_ALIASES:
        plain["role"] = ROLE_ALIASES[plain["role"]]
    if isinstance(plain.get("content"), list):
        plain["content"] = _join_content(plain["content"], plain.get("role"), f"{name}['content']")
    calls = read_json(plain.pop("tool_calls", None), f"{name}['tool_calls']") or []
    if not isinstance(calls, list):
        raise ValueError(f"{name}['tool_calls'] must be a list, not {calls!r:.100}")
    legacy = read_json(plain.pop("function_call", None), f"{name}['function_call']")
    if calls:
        plain["tool_calls"] = [
            _normalize_tool_call(call, f"{name}['tool_calls'][{j}]") for j, call in enumerate(calls)
        ]
    elif legacy:
        plain["tool_calls"] = [_normalize_tool_call(legacy, f"{name}['function_call']")]
    return plain


def _join_content(parts: list[Any], role: Any, name: str) -> Any:
    """Joins the text of content parts. Another list stays as it is if a tool returned it, and
    otherwise raises ValueError."""
    if not all(isinstance(part, dict) and part.keys() & {"type", "text"} for part in parts):
        if role == "tool":
            return parts
        raise ValueError(
            f"{name} must be text, or parts such as {{'type': 'text', 'text': ...}}, not "
            f"{parts!r:.100}"
        )
    texts = []
    for j, part in enumerate(parts):
        kind = part.get("type") or "text"
        if kind not in TEXT_PARTS:
            if role == "tool":
                return parts
            raise ValueError(
                f"{name}[{j}] has the type {kind!r:.100}: Tigon trains on text, so give parts of "
                "type 'text' only (reasoning goes into 'reasoning_content')"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{name}[{j}]['text'] must be text, not {part.get('text')!r:.100}")
        texts.append(part["text"])
    return "".join(texts)


def _normalize_tool_call(call: Any, name: str) -> dict[str, Any]:
    """Converts a tool call to {"type": "function", "function": {"name", "arguments"}}, with
    arguments as an object; ValueError if it names no function."""
    call = read_json(call, name)
    if isinstance(call, dict) and call.get("function") is None:  # without the wrapper
        outer = {"id": call.get("id"), "type": "function"}
        function = {key: value for key, value in call.items() if key not in outer}
    elif isinstance(call, dict):
        outer, function = {"type": "function", **call}, call["function"]
    if not isinstance(call, dict) or not isinstance(function, dict) or not function.get("name"):
        raise ValueError(f"{name} must be an object with the name of a function, not {call!r:.100}")
    arguments = read_json(function.get("arguments"), f"{name}: 'arguments'")
    if not isinstance(arguments, dict | None):
        raise ValueError(
            f"{name}: 'arguments' must be an object or its JSON, not {arguments!r:.100}"
        )
    # Templates that write the function as JSON write its keys in this order
    function = {"name": function["name"], "arguments": arguments or {}} | {
        key: value for key, value in function.items() if key not in ("name", "arguments")
    }
    return _drop_nulls(outer) | {"function": _drop_nulls(function)}


def _normalize_tool(tool: Any) -> Any:
    """Wraps a tool as {"type": "function", "function": ...}, with decoded parameters; what is no
    object with a name stays as it is."""
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function")
    if function is None and "name" in tool:
        function = {key: value for key, value in tool.items() if key not in ("type", "function")}
        tool = {"type": "function"}
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        parameters = read_json(function["parameters"], "the 'parameters' of a tool")
        function = function | {"parameters": parameters}
    return tool if function is None else tool | {"function": function}


def _drop_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Copy without null keys, as Arrow and exports of it write keys that are absent."""
    return {key: value for key, value in values.items() if value is not None}
