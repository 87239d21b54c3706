"""Writes the JSON schema of a Python function, which chat templates show to a model as a tool."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    NoneType: "null",
    list: "array",
    tuple: "array",
    dict: "object",
}


def tool_schema(tool: Callable[..., Any] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema of a tool: of a function, or the schema itself if `tool` is one.

    A function needs type hints and a docstring in Google's format. Its schema equals that of
    transformers' `get_json_schema`.
    """
    if isinstance(tool, Mapping):
        return tool
    if not callable(tool):
        raise ValueError(f"a tool must be a function or its JSON schema, got {tool!r:.100}")
    name = getattr(tool, "__name__", repr(tool))
    doc = inspect.getdoc(tool)
    if not doc:
        raise ValueError(f"tool {name} has no docstring: write one, or pass the tool as a dict")
    sections = _sections(doc.strip())
    described = _arguments(sections.get("Args:", []))
    hints = get_type_hints(tool)

    properties, required = {}, []
    for i, (argument, parameter) in enumerate(inspect.signature(tool).parameters.items()):
        if argument not in hints:
            if i == 0 and argument in ("self", "cls"):
                continue
            raise ValueError(f"argument {argument} of tool {name} has no type hint")
        if argument not in described:
            raise ValueError(f"the docstring of tool {name} does not describe {argument} in Args:")
        schema = _type_schema(hints[argument], f"argument {argument} of tool {name}")
        text = described[argument]
        if choices := re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE):
            options = json.loads(choices[1])
            schema["enum"] = [o.strip() if isinstance(o, str) else o for o in options]
            text = text[: choices.start()].strip()
        properties[argument] = schema | {"description": text}
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)

    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    summary = "\n".join(sections[""]).strip()
    function: dict[str, Any] = {"name": name, "description": summary, "parameters": parameters}
    # The model never writes the result, so a hint without a schema is not an error
    with suppress(KeyError, ValueError):
        function["return"] = _type_schema(hints["return"], "")
        if "Returns:" in sections:
            function["return"]["description"] = "\n".join(sections["Returns:"]).strip()
    return {"type": "function", "function": function}


def _sections(doc: str) -> dict[str, list[str]]:
    """Returns the lines of a docstring by the heading of their section; the summary has ""."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for line in doc.splitlines():
        if line.strip() in ("Args:", "Returns:", "Raises:"):
            heading = line.strip()
            sections[heading] = []
        else:
            sections[heading].append(line)
    return sections


def _arguments(lines: list[str]) -> dict[str, str]:
    """Returns the descriptions in an `Args:` section by argument; deeper lines continue one."""
    descriptions: dict[str, str] = {}
    lines = [line for line in lines if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    name = None
    for line in lines:
        start = re.match(r"[ \t]*(\w+):\s*(.*)", line)
        if start and len(line) - len(line.lstrip()) <= indent:
            name = start[1]
            descriptions[name] = start[2].strip()
        elif name is not None:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _type_schema(hint: Any, subject: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint of `subject`; ValueError for what JSON lacks."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return {}
    if kind in (Union, UnionType):
        return _union_schema(arguments, subject)
    if kind is Literal:
        return _enum_schema(list(arguments), subject)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_schema([member.value for member in kind], subject)
    if kind not in _TYPES:
        raise ValueError(f"{subject} has type {hint!r}, which is no JSON: pass the tool as a dict")
    schema: dict[str, Any] = {"type": _TYPES[kind]}
    if kind is list and arguments:
        schema["items"] = _type_schema(arguments[0], subject)
    elif kind is tuple and arguments:
        if ... in arguments or len(arguments) == 1:
            raise ValueError(f"{subject} has type {hint!r}: use list[...] for any number of items")
        schema["prefixItems"] = [_type_schema(item, subject) for item in arguments]
    elif kind is dict and arguments:
        schema["additionalProperties"] = _type_schema(arguments[1], subject)
    return schema


def _union_schema(members: tuple[Any, ...], subject: str) -> dict[str, Any]:
    """Returns the JSON schema of a union of types, nullable if None is among them."""
    options = [_type_schema(member, subject) for member in members if member is not NoneType]
    if len(options) == 1:
        schema = options[0]
    elif all(set(o) == {"type"} and isinstance(o["type"], str) for o in options):
        names = sorted({option["type"] for option in options})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": options}
    return schema | {"nullable": True} if NoneType in members else schema


def _enum_schema(values: list[Any], subject: str) -> dict[str, Any]:
    """Returns the JSON schema of a choice of values; ValueError unless they are JSON scalars."""
    types = dict.fromkeys(_TYPES.get(type(value)) for value in values)
    if not values or not types.keys() <= {"integer", "number", "string", "boolean", "null"}:
        raise ValueError(f"{subject} must be one of {values}, which are no JSON scalars")
    return {"type": next(iter(types)) if len(types) == 1 else list(types), "enum": values}
