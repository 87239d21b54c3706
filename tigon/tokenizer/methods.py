"""The methods that chat templates may call, with what each costs."""

import re
from collections.abc import Callable
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Cycler
from markupsafe import EscapeFormatter, Markup

from tigon.tokenizer.budget import ITEM, SCANNED, TooMuch

Sandbox = Any  # that of sandbox.py, which imports this file

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_DIGITS = re.compile(r"\d+")

Cost = Callable[..., None]  # of (sandbox, owner, *arguments of the method)


def percent(sandbox: Sandbox, text: str, values: Any) -> str:
    """text % values."""
    sandbox.spend(len(text) + text.count("%") * sandbox.weigh(values))
    _spend_widths(sandbox, text)
    if "*" in text:  # widths are values
        numbers = values if isinstance(values, tuple) else (values,)
        sandbox.spend(sum(abs(number) for number in numbers if isinstance(number, int)))
    return text % values


def _spend_widths(sandbox: Sandbox, text: str) -> None:
    """What the widths and precisions in a format may cost."""
    for digits in _DIGITS.findall(text):
        if len(digits) > 9:
            raise TooMuch(f"a format has the number {digits:.20}")
        sandbox.spend(int(digits))


def formatter(sandbox: Sandbox, name: str, text: str) -> Callable[..., str] | None:
    """str.format and format_map within the sandbox; None for another method."""
    if name == "format":

        def format(*args: Any, **kwargs: Any) -> str:
            return _format(sandbox, text, args, kwargs)

        return format
    if name == "format_map":

        def format_map(values: Any) -> str:
            return _format(sandbox, text, (), values)

        return format_map
    return None


def _format(sandbox: Sandbox, text: str, args: Any, kwargs: Any) -> str:
    sandbox.spend(ITEM * len(text))
    kind = _EscapeFormatter if isinstance(text, Markup) else _Formatter
    options = {"escape": text.escape} if isinstance(text, Markup) else {}
    return type(text)(kind(sandbox, **options).vformat(text, args, kwargs))


class _Formatter(SandboxedFormatter):
    _env: Any  # the sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend_widths(self._env, format_spec)
        text = super().format_field(value, format_spec)
        self._env.spend(len(text))
        return text


class _EscapeFormatter(_Formatter, EscapeFormatter):
    pass


def replacing(sandbox: Sandbox, text: str, old: str, new: str, count: int = -1, **_: Any) -> None:
    longer = len(new) - len(old)
    sandbox.spend(len(text) + (text.count(old) * longer if longer > 0 else 0))


def _searching(sandbox: Sandbox, text: str, part: Any = "", *_: Any, **__: Any) -> None:
    # From the right, searching takes the product of both lengths at worst
    size = len(part) if isinstance(part, (str, tuple)) else 0
    sandbox.spend(len(text) * (1 + size // 8) // SCANNED)
    if isinstance(part, tuple):  # of startswith
        sandbox.spend(ITEM * size)


def _cutting(sandbox: Sandbox, text: str, *args: Any, **kwargs: Any) -> None:
    _searching(sandbox, text, *args)
    sandbox.spend(len(text))


def _splitting(sandbox: Sandbox, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    _cutting(sandbox, text, sep)
    # Before the list is made: each of its texts takes 50 bytes more than its characters
    parts = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    sandbox.spend(ITEM * (min(parts, maxsplit) if maxsplit >= 0 else parts))


def _lines(sandbox: Sandbox, text: str, *_: Any, **__: Any) -> None:
    sandbox.spend(len(text) + ITEM * sum(map(text.count, LINE_ENDS)))


def _copying(sandbox: Sandbox, text: str, *args: Any, **_: Any) -> None:
    sandbox.spend(len(text) + sum(len(part) for part in args if isinstance(part, str)))


def _padding(sandbox: Sandbox, text: str, width: Any = 0, *_: Any, **__: Any) -> None:
    sandbox.spend(len(text) + (max(width, 0) if isinstance(width, int) else 0))


def _tabs(sandbox: Sandbox, text: str, tabsize: int = 8, **_: Any) -> None:
    sandbox.spend(len(text) + text.count("\t") * max(tabsize, 0))


def _joining(sandbox: Sandbox, text: str, values: Any, **_: Any) -> None:
    if not hasattr(values, "__len__"):
        raise TypeError("str.join takes a list of texts; the filter |join takes an iterator too")
    sandbox.spend((len(text) + ITEM) * len(values) + sandbox.weigh(values))


def _nothing(sandbox: Sandbox, owner: Any, *_: Any, **__: Any) -> None:
    pass


def _looking(sandbox: Sandbox, owner: Any, *args: Any, **_: Any) -> None:
    sandbox.spend(sum(map(sandbox.weigh, args)))


def _going_through(sandbox: Sandbox, owner: Any, *_: Any, **__: Any) -> None:
    sandbox.spend(sandbox.weigh(owner) + ITEM * len(owner))


def _costs(**groups: tuple[Cost, str]) -> dict[str, Cost]:
    return {name: cost for cost, names in groups.values() for name in names.split()}


METHODS: dict[type, dict[str, Cost]] = {
    str: _costs(
        copying=(
            _copying,
            "upper lower title capitalize casefold swapcase "
            "removeprefix removesuffix isalnum isalpha isascii isdecimal isdigit isidentifier "
            "islower isnumeric isprintable isspace istitle isupper",
        ),
        searching=(_searching, "startswith endswith find rfind index rindex count"),
        cutting=(_cutting, "strip lstrip rstrip partition rpartition"),
        splitting=(_splitting, "split rsplit"),
        lines=(_lines, "splitlines"),
        replacing=(replacing, "replace"),
        padding=(_padding, "center ljust rjust zfill"),
        tabs=(_tabs, "expandtabs"),
        joining=(_joining, "join"),
        nothing=(_nothing, "format format_map"),  # which spend by themselves
    ),
    dict: _costs(
        looking=(_looking, "get"),
        nothing=(_nothing, "items keys values"),
        going_through=(_going_through, "copy"),
    ),
    list: _costs(going_through=(_going_through, "copy index count")),
    tuple: _costs(going_through=(_going_through, "index count")),
    LoopContext: _costs(looking=(_looking, "cycle changed")),
    Cycler: _costs(nothing=(_nothing, "next reset")),
    int: _costs(nothing=(_nothing, "bit_length is_integer")),
    float: _costs(nothing=(_nothing, "is_integer")),
}
