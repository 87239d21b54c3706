"""Which times a chat template writes, so that caches and runs know on what their tokens depend."""

from ast import literal_eval
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import product
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from tigon.tokenizer.chat import render
from tigon.tokenizer.sandbox import LONGEST

EXACT = "%Y-%m-%dT%H:%M:%S.%f"  # where a template does not say its format in so many words
_TIMES = datetime(2001, 2, 3, 4, 5, 6, 7), datetime(2012, 11, 10, 9, 8, 7, 6)
_USER = {"role": "user", "content": "?"}
_CHATS = [_USER], [{"role": "system", "content": "?"}, _USER]
_TOOLS = None, [{"type": "function", "function": {"name": "f", "description": "?"}}]


def time_formats(
    template: str, special_tokens: Mapping[str, str], variables: Mapping[str, Any]
) -> list[str]:
    """The formats in which a template writes the time, EXACT for one that it computes.

    Empty if `variables` pin the time: short chats depend on it without them, and not with them.
    """
    formats = list(dict.fromkeys(_formats(template)))
    if formats and variables and _depends_on_time(template, special_tokens):
        return formats if _depends_on_time(template, {**special_tokens, **variables}) else []
    return formats


def _formats(template: str) -> Iterator[str]:
    """The format of each call of strftime_now; `strftime_now is defined` is none."""
    if len(template) > LONGEST:  # it is refused
        return
    try:
        tokens = [t[1:] for t in Environment().lex(template) if t[1] != "whitespace"]
    except TemplateSyntaxError:  # likewise
        return
    for i, token in enumerate(tokens):
        if token == ("name", "strftime_now"):
            match tokens[i + 1 : i + 4]:
                case [("name", "is"), *_]:
                    continue
                case [("operator", "("), ("string", text), ("operator", ")")]:
                    yield literal_eval(text)
                case _:
                    yield EXACT


def _depends_on_time(template: str, given: Mapping[str, Any]) -> bool:
    """Whether the text of any short chat depends on the time."""
    for messages, tools in product(_CHATS, _TOOLS):
        try:
            first, second = (
                render(template, messages, tools=tools, strftime_now=time, **given)
                for time in _TIMES
            )
        except ValueError:
            continue
        if first.text != second.text:
            return True
    return False
