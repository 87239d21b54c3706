"""Settings from files, command lines and calls into dataclasses: each checked against its field.

huggingface_hub.dataclasses.strict does not check frozen dataclasses and refuses integers for floats
and NumPy's numbers. pydantic turns integers into floats, which other readers of a config.json
refuse, and its messages would have to be rewritten from the type hints all the same.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, field, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tigon.utils.json import quote

T = TypeVar("T")
Parse = Callable[[str], Any]

TYPE_WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "truth values"),
    dict: ("a dictionary", "dictionaries"),
    Mapping: ("a dictionary", "dictionaries"),
    NoneType: ("null", "nulls"),
}

# Names of arguments in transformers and PEFT, and ours
TRANSFORMERS_NAMES = {
    "attn_implementation": "attention",
    "cache": "past_key_values",  # from 5.24 on
    "device_map": "device",
    "device_mesh": "mesh",
    "load_in_4bit": "quantize",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "output_hidden_states": "return_hidden",
    "r": "rank",
    "target_modules": "targets",
    "torch_dtype": "dtype",
    "tp_plan": "mesh",
    "use_dora": "dora",
    "use_rslora": "rslora",
}


class ConfigError(ValueError):
    """Says which setting cannot be followed, with its value."""


class ConfigTypeError(ConfigError, TypeError):
    """Says which setting has another type than it must have."""


def setting(
    default: Any,
    help: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    finite: bool = False,
    **metadata: Any,
) -> Any:
    """Makes a dataclass field with its range: >= ge, > gt, <= le, < lt; `finite`: not infinite. A
    whole number without an upper limit is below 2**63."""
    range = {"ge": ge, "gt": gt, "le": le, "lt": lt, "finite": finite}
    return field(default=default, metadata={"help": help, **range, **metadata})


def field_types(cls: type) -> dict[str, Any]:
    """Returns the types of a dataclass' fields."""
    types = get_type_hints(cls)
    return {f.name: types[f.name] for f in fields(cls)}


def group_fields(cls: type) -> set[str]:
    """Returns the names of a dataclass' fields that are dataclasses themselves."""
    return {name for name, hint in field_types(cls).items() if _find_dataclass(hint) is not None}


def read_settings(
    cls: type, values: Mapping[str, Any], *, parse: Parse | None = None, group: str = ""
) -> dict[str, Any]:
    """Checks and converts values for the fields of a dataclass, for `build_settings`.

    A field that is a dataclass takes a mapping; its settings are named with a dot, `group.name`,
    which `values` may do too. `parse` reads text where a field needs something else, as on a
    command line. Raises ConfigError for names that are no field's and values that do not fit.
    """
    hints, settings = field_types(cls), {f.name: f for f in fields(cls)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{group}{key}"
        first, dot, rest = str(key).partition(".")
        inner = _find_dataclass(hints.get(first))
        if inner is not None and not dot and parse is not None and isinstance(value, str):
            with suppress(ValueError):  # `check_type` raises it with the name
                value = parse(value)
        if inner is not None and (dot or isinstance(value, Mapping)):
            inside = {rest: value} if dot else value
            checked |= read_settings(inner, inside, parse=parse, group=f"{group}{first}.")
            if not inside and not group:  # all of its settings have their defaults
                checked[first] = build_settings(inner, {})
        elif key not in hints:
            closest = find_misspelled(str(key), hints)
            hint = f"did you mean {closest!r}?" if closest else f"known: {', '.join(hints)}"
            if ":" in str(key):  # {tensor:2} has the one key tensor:2
                hint = f"a colon needs a space after it: {str(key).replace(':', ': ')}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
        else:
            try:
                checked[name] = check_type(name, value, hints[key], parse)
            except ConfigTypeError as error:
                if inner is None:
                    facts = settings[key].metadata
                    if facts.get("ge") is None or value not in (None, "null"):
                        raise
                    raise ConfigTypeError(f"{error}: {facts['help']}") from None  # 0: never
                example = f"{name}.{fields(inner)[0].name}={quote(fields(inner)[0].default)}"
                text = f"{error}; its settings have its name, as {example}"
                raise ConfigTypeError(text) from None
            _check_field_range(name, checked[name], settings[key])
    return checked


def build_settings(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds the dataclass of values that `read_settings` returned."""
    plain: dict[str, Any] = {}
    by_group: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        first, dot, rest = key.partition(".")
        if dot:
            by_group.setdefault(first, {})[rest] = value
        else:
            plain[key] = value
    hints = field_types(cls)
    for name, inside in by_group.items():
        if plain.get(name) is not None and not is_dataclass(plain[name]):
            key = next(iter(inside))
            pair = f"{name}={quote(plain[name])} and {name}.{key}={quote(inside[key])}"
            raise ConfigError(f"{pair} contradict each other: give one of them")
        plain[name] = build_settings(_find_dataclass(hints[name]), inside)
    return cls(**plain)


def check_type(name: str, value: Any, hint: Any, parse: Parse | None = None) -> Any:
    """Converts a value to the type of a field; raises ConfigTypeError if it is of another."""
    if hint is str and parse and (value is None or (value == "null" and parse(value) is None)):
        # Elsewhere on a command line null is none: here it would name a file or a repository
        raise ConfigTypeError(f"{name}=null is not text; {name}='' is empty")
    try:
        return _convert(value, hint, parse, name)
    except ConfigError:
        raise
    except (TypeError, ValueError):
        kind = describe_type(hint)
        empty = f"; {name}=[] is an empty list" if value == "" and "list of" in kind else ""
        raise ConfigTypeError(f"{name}={quote(value)} is not {kind}{empty}") from None


def check_ranges(settings: Any) -> None:
    """For __post_init__: raises ConfigError for a value beyond its field's range."""
    for f in fields(settings):
        _check_field_range(f.name, getattr(settings, f.name), f)


@contextmanager
def prefix_errors(prefix: str, kind: type[ValueError] = ConfigError) -> Iterator[None]:
    """Prefixes an error of this kind that the body of a `with` raises, as by a file's name."""
    try:
        yield
    except kind as error:
        raise kind(f"{prefix}: {error}") from error


def suggest(name: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns a "did you mean" with the closest of the known names; empty if none is close."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def check_keywords(function: str, kwargs: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises Python's TypeError, with a hint, for an unknown keyword argument."""
    if known.issuperset(kwargs):
        return
    name = next(name for name in kwargs if name not in known)
    message = f"{function}() got an unexpected keyword argument {name!r}"
    tigon_name = TRANSFORMERS_NAMES.get(name)
    hint = f"here: {tigon_name!r}" if tigon_name in known else suggest(name, known, 0.8)
    raise TypeError("; ".join(filter(None, (message, hint))))


def find_misspelled(name: str, choices: Iterable[str]) -> str | None:
    """Returns the known name that `name` is a misspelling of; None if there is none.

    For names that may be another program's, of which a similar one means something else. A
    misspelling has the same first letter, the same digits, and the same letters but for one or
    their order.
    """
    letters, closest, highest = _letters(name[:100]), None, 0.85
    for choice in choices:
        other = _letters(choice)
        ratio = difflib.SequenceMatcher(None, letters, other).ratio()
        if sorted(letters) == sorted(other):
            ratio = max(ratio, 0.9)  # two letters are swapped
        possible = letters[:1] == other[:1] and abs(len(letters) - len(other)) < 2
        possible = possible and re.findall(r"\d", name) == re.findall(r"\d", choice)
        if possible and ratio > highest:
            closest, highest = choice, ratio
    return closest


def _letters(name: str) -> str:
    """Returns the letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", name).lower()


def describe_type(hint: Any, plural: bool = False) -> str:
    """Returns a type in words, such as "a whole number", or in the plural "whole numbers"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(describe_type(option, plural) for option in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin in (list, tuple):
        choice = origin is tuple and get_origin(args[0]) is Literal  # named in front of the list
        items = f"a list of {'them' if choice else describe_type(args[0], plural=True)}"
        return items if origin is list else f"{describe_type(args[0])} or {items}"
    words = TYPE_WORDS.get(origin or hint, ("a group of settings", "groups of settings"))
    return words[plural]


def _build_group(cls: type, values: Mapping[str, Any], parse: Parse | None, name: str) -> Any:
    """Builds a dataclass in a list; ConfigError if a setting without a default is missing."""
    checked = read_settings(cls, values, parse=parse, group=f"{name}.")
    settings = {key.removeprefix(f"{name}."): value for key, value in checked.items()}
    for f in fields(cls):
        if f.default is f.default_factory is MISSING and f.name not in settings:
            raise ConfigError(f"{name} needs {f.name!r}; it has {', '.join(settings) or 'nothing'}")
    return build_settings(cls, settings)


def check_range(
    name: str,
    value: Any,
    ge: float | None = None,
    le: float | None = None,
    *,
    gt: float | None = None,
    lt: float | None = None,
    finite: bool = False,
) -> None:
    """Raises ConfigError for a number, or one of a tuple, that is beyond this range."""
    numbers = value if isinstance(value, tuple) else (value,)
    for number in (n for n in numbers if type(n) in (int, float)):
        limits = {  # written so that NaN is beyond each of them
            f"at least {ge}": ge is None or number >= ge,
            f"above {gt}": gt is None or number > gt,
            f"at most {le}": le is None or number <= le,
            f"below {lt}": lt is None or number < lt,
            "below 2**63": (le, lt) != (None, None) or type(number) is float or number < 2**63,
            "finite": not finite or not math.isinf(number),
        }
        for limit, holds in limits.items():
            if not holds:
                raise ConfigError(f"{name}={quote(number)} must be {limit}")


def _check_field_range(name: str, value: Any, field: Field[Any]) -> None:
    """Raises ConfigError for a number outside of the field's range."""
    limits = {key: field.metadata.get(key) for key in ("ge", "gt", "le", "lt")}
    check_range(name, value, **limits, finite=field.metadata.get("finite", False))


def _find_dataclass(hint: Any) -> Any:
    """Returns the dataclass that a field's type is, with or without None."""
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    return next((option for option in options if is_dataclass(option)), None)


def _convert(value: Any, hint: Any, parse: Parse | None, name: str) -> Any:
    """Converts a value to a field's type; raises TypeError or ValueError if it is of another, and
    ConfigError inside groups."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(value, Mapping) and (inner := _find_dataclass(hint)) is not None:
        return _build_group(inner, value, parse, name)
    if origin in (UnionType, Union):
        for option in sorted(args, key=lambda k: k is str):  # any text is text: the last resort
            try:
                return _convert(value, option, parse, name)
            except ConfigError:
                raise
            except (TypeError, ValueError):
                continue
        raise TypeError
    if hint is Any:
        return value
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise TypeError
        return value
    if parse is not None and isinstance(value, str) and hint is not str:
        try:
            value = parse(value)
        except ValueError:  # `*.jsonl` is no YAML, but a text that may be one of several
            if origin is not tuple or value.startswith(("[", "{")):
                raise
    number = not isinstance(value, bool)
    if hint is int and isinstance(value, Integral) and number:
        return int(value)
    if hint is float and isinstance(value, Real) and number:
        return value if type(value) is int else float(value)
    if origin is tuple:  # one item stands for a list of it
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(
            # Text is not parsed further, but what is inside a group of settings is
            _convert(item, args[0], parse if isinstance(item, Mapping) else None, f"{name}[{i}]")
            for i, item in enumerate(items)
        )
    if origin is list and isinstance(value, list):
        return [_convert(item, args[0], None, name) for item in value]
    if hint in (int, float) or origin is list or not isinstance(value, origin or hint):
        raise TypeError
    return value
