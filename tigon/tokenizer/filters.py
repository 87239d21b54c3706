"""The filters and tests that chat templates may use, with what each costs."""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

from jinja2.filters import FILTERS, ignore_case, make_attrgetter
from jinja2.tests import TESTS
from markupsafe import soft_str

from tigon.tokenizer.budget import ITEM, TooMuch
from tigon.tokenizer.methods import LINE_ENDS, percent, replacing

Sandbox = Any  # that of sandbox.py, which imports this file

Function = Callable[..., Any]

INDENT = 32  # spaces, and characters of a separator, in JSON
DIGITS = 1000  # of a text that becomes a number

_FREE = "abs attr count d default first items last length random"
_OF_TEXT = "capitalize e escape forceescape lower safe string title truncate upper wordcount"
_OF_ITEMS = "map reject rejectattr select selectattr"
_SORTING = "dictsort groupby max min sort"
_COMPARING = {
    **dict.fromkeys(("==", "eq", "equalto"), "eq"),
    **dict.fromkeys(("!=", "ne"), "ne"),
    **dict.fromkeys((">", "gt", "greaterthan"), "gt"),
    **dict.fromkeys((">=", "ge"), "gteq"),
    **dict.fromkeys(("<", "lt", "lessthan"), "lt"),
    **dict.fromkeys(("<=", "le"), "lteq"),
    "in": "in",
}


def bounded_filters(sandbox: Sandbox) -> dict[str, Function]:
    """Those of jinja that chat templates use; all count with this sandbox."""
    filters = {name: FILTERS[name] for name in _FREE.split()}
    for names, prepare in (
        (_OF_TEXT, _text),
        (_OF_ITEMS, _each),
        (_SORTING, _sorting),
        ("reverse", _reversing),
        ("center", _centring),
        ("indent", _indenting),
        ("round", _rounding),
        ("int float", _number),
        ("format", _formatting),
        ("sum", _summing),
        ("list", _items),
        ("batch slice", _dividing),
    ):
        filters |= {name: _before(sandbox, FILTERS[name], prepare) for name in names.split()}
    for name in ("list", "batch", "slice"):
        filters[name] = _held(sandbox, filters[name], iterator=name != "list")
    filters["int"] = _after(filters["int"], sandbox.number)
    filters["sum"] = _after(filters["sum"], sandbox.number)
    return filters | _own_filters(sandbox)


def bounded_tests(sandbox: Sandbox) -> dict[str, Function]:
    tests: dict[str, Any] = dict(TESTS)
    for name, operator in _COMPARING.items():
        tests[name] = lambda left, right, _name=operator: sandbox.compare(left, _name, right)
    tests["odd"] = lambda value: sandbox.modulo(value, 2) == 1
    tests["even"] = lambda value: sandbox.modulo(value, 2) == 0
    tests["divisibleby"] = lambda value, number: sandbox.modulo(value, number) == 0
    for name in ("lower", "upper"):
        tests[name] = _before(sandbox, tests[name], _text)
    return tests


def _before(sandbox: Sandbox, function: Function, prepare: Function) -> Function:
    """A filter behind `prepare(sandbox, value, *arguments)`, which spends and gives the value."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0  # what jinja passes is first

    @wraps(function)  # with what says that
    def bounded(*args: Any, **kwargs: Any) -> Any:
        sandbox.spend(ITEM * (len(args) + len(kwargs)))
        value = prepare(sandbox, *args[at:], **kwargs)
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        if isinstance(result, str):
            sandbox.spend(len(result))
        return result

    return bounded


def _after(function: Function, check: Function) -> Function:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return check(function(*args, **kwargs))

    return checked


def _held(sandbox: Sandbox, function: Function, *, iterator: bool) -> Function:
    @wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        values = sandbox.hold(list(function(*args, **kwargs)))
        return iter(values) if iterator else values

    return held


def _text(sandbox: Sandbox, value: Any, *args: Any, **_: Any) -> Any:
    sandbox.spend(len(value) if isinstance(value, str) else sandbox.weigh(value))
    return value


def _items(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    value = sandbox.items(value)
    paths = sum(len(a) for a in (*args, *kwargs.values()) if isinstance(a, str))
    if paths > ITEM:  # names of attributes, one behind another
        sandbox.spend(ITEM * paths + (len(value) * paths if hasattr(value, "__len__") else 0))
    return value


def _each(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    value = _items(sandbox, value, *args, **kwargs)
    if hasattr(value, "__len__"):  # another filter is called for each
        sandbox.spend(2 * ITEM * len(value))
    return value


def _sorting(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    value = _items(sandbox, value, *args, **kwargs)
    if hasattr(value, "__len__"):
        sandbox.spend(sandbox.weigh(value) * len(value).bit_length())
    return value


def _reversing(sandbox: Sandbox, value: Any) -> Any:
    return _text(sandbox, value) if isinstance(value, str) else sandbox.items(value)


def _centring(sandbox: Sandbox, value: Any, width: int = 80) -> Any:
    sandbox.spend(max(width, 0))
    return _text(sandbox, value)


def _indenting(sandbox: Sandbox, value: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"indent takes a text, not {type(value).__name__}")
    lines = 2 + sum(map(value.count, LINE_ENDS))
    sandbox.spend(lines * (len(width) if isinstance(width, str) else width))
    return _text(sandbox, value)


def _rounding(sandbox: Sandbox, value: Any, precision: int = 0, *_: Any, **__: Any) -> Any:
    if not isinstance(value, int | float) or not -DIGITS < precision < DIGITS:
        raise TypeError("round takes a number and a precision of a few digits")
    return value


def _number(sandbox: Sandbox, value: Any, *_: Any, **__: Any) -> Any:
    if isinstance(value, str) and len(value) > DIGITS:
        raise TooMuch(f"it makes a number of a text of {len(value)} characters")
    return value


def _formatting(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    percent(sandbox, soft_str(value), kwargs or args)
    return value


def _summing(sandbox: Sandbox, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    value = _items(sandbox, value, attribute)
    if not isinstance(start, int | float):  # adding up lists copies each many times
        sandbox.spend(len(value) * sandbox.weigh(value))
    return value


def _dividing(sandbox: Sandbox, value: Any, count: int, *_: Any, **__: Any) -> Any:
    sandbox.spend(2 * ITEM * count)
    return sandbox.items(value)


def _own_filters(sandbox: Sandbox) -> dict[str, Function]:
    spend = sandbox.spend

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Unlike jinja's own filter: no escapes for HTML
        for text in (indent, *(separators or ())):
            size = len(text) if isinstance(text, str) else text or 0
            if size > INDENT:
                raise TooMuch(f"tojson has {INDENT} characters at most between items, not {size}")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            text = encoder.encode(value)
            spend(len(text))
            return text
        sandbox.weigh(value)
        each = 4 * sandbox.depth(value)  # units: every level passes every piece on
        pieces: list[str] = []
        written = iter(encoder.iterencode(value))
        while some := list(islice(written, 1000)):  # as it grows with the depth too
            spend(sum(map(len, some)) + each * len(some))
            pieces += some
        return "".join(pieces)

    def trim(value: Any, chars: str | None = None) -> str:
        text: str = value if type(value) is str else soft_str(value)
        spend(len(text) * (1 + (len(chars) // 8 if chars else 0)))
        return text.strip(chars)

    def replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        count = -1 if count is None else count
        replacing(sandbox, text, old, new, count)
        return text.replace(old, new, count)

    def join(value: Any, d: Any = "", attribute: Any = None) -> str:
        value = _items(sandbox, value, attribute)
        if attribute is not None:
            value = map(make_attrgetter(sandbox, attribute), value)
        separator, texts = str(d), []
        for item in value:
            text = str(item)
            spend(len(text) + len(separator))
            texts.append(text)
        return separator.join(texts)

    def unique(value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
        fold = None if case_sensitive else ignore_case
        key = make_attrgetter(sandbox, attribute, postprocess=fold)
        found: dict[Any, Any] = {}
        for item in sandbox.hold(list(_items(sandbox, value, attribute))):
            found.setdefault(sandbox.key(key(item)), item)
        return iter(found.values())

    return {"tojson": tojson, "trim": trim, "replace": replace, "join": join, "unique": unique}
