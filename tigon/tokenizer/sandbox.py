"""An environment for chat templates that others have written: bounded, and without a way out.

The code that jinja makes of a template spends, from a `Budget`, what each block of statements and
each operation costs. Where this environment has no bound for a filter or a method, it has no such
filter or method.
"""

import operator
from collections.abc import ItemsView, Iterable, Iterator, KeysView
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

from tigon.tokenizer.budget import CALL, ITEM, SCANNED, Budget, TooMuch
from tigon.tokenizer.codegen import Generator, check_tree
from tigon.tokenizer.filters import bounded_filters, bounded_tests
from tigon.tokenizer.methods import METHODS, formatter, percent

LONGEST = 2**16  # characters of a template; the longest that are known have half of it
MOST_TAGS = 4000
_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}
_OF_DICTS = frozenset(dir(dict))
_CONTEXT = ("_loop_vars", "_block_vars")  # what jinja adds to the arguments of a call
_OF_LOOPS = {
    *("depth", "depth0", "first", "index", "index0", "last", "length"),
    *("nextitem", "previtem", "revindex", "revindex0"),
}
_METHODS = (BuiltinMethodType, MethodType)
_TEXT = {str}
_OF_TEXT = METHODS[str].keys() - {"format", "format_map"}
_SCALARS = frozenset((str, int, float, bool, type(None)))


class _Namespace(Namespace):
    """Its text is short: one that holds others twice could have an exponential one."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(Budget, ImmutableSandboxedEnvironment):
    """The environment of one thread, since one rendering at a time counts with it."""

    code_generator_class = Generator

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self.start(None)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.filters: dict[str, Any] = bounded_filters(self)
        self.tests: dict[str, Any] = bounded_tests(self)

    def paid(self, units: int) -> bool:
        self.spend(units)
        return True

    def key(self, value: Any) -> Any:
        """Of a dict. Tuples whose hashes are all the same are easily made, and take forever."""
        if isinstance(value, tuple):
            raise TypeError("a tuple is no key of a dict: take a text or a number")
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        pieces = pieces if type(pieces) is list else list(pieces)
        self.left -= sum(map(len, pieces))
        if self.left < 0:
            self.exhausted()
        return "".join(pieces)

    def add(self, *values: Any) -> Any:
        """The sum of values, or a text that joins them."""
        if {*map(type, values)} == _TEXT:
            text = "".join(values)
            self.left -= len(text)
            if self.left < 0:
                self.exhausted()
            return text
        result = values[0]
        for value in values[1:]:
            result = result + value
            if isinstance(result, int):
                self.number(result)
            elif isinstance(result, (list, tuple)):
                self.hold(result)
            elif isinstance(result, str):
                self.spend(len(result))
        return result

    def subtract(self, left: Any, right: Any) -> Any:
        if type(left) is not int:
            self.spend(self.weigh(left) + self.weigh(right))  # of dict.keys()
        return self.number(left - right)

    def multiply(self, left: Any, right: Any) -> Any:
        for text, times in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                self.spend(len(text) * max(times, 0) * (1 if isinstance(text, str) else ITEM))
        result = left * right
        return self.hold(result) if isinstance(result, (list, tuple)) else self.number(result)

    def power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 1000:
            raise TooMuch("it raises a number to too high a power")
        return self.number(left**right)

    def modulo(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            return percent(self, left, right)
        return left % right

    def join_texts(self, *values: Any) -> str:
        texts = []
        for value in values:
            text = str(value)
            self.spend(len(text))
            texts.append(text)
        return "".join(texts)

    def compare(self, left: Any, name: str, right: Any, *rest: Any) -> Any:
        """left name right [name right ...], as a chain of comparisons."""
        if name in ("in", "notin"):
            result: Any = self.contains(left, right) == (name == "in")
        else:
            if isinstance(left, str) and isinstance(right, str):
                self.spend(len(right) // SCANNED)
            elif type(left) not in _SCALARS and type(right) not in _SCALARS:
                self.spend(min(self.weigh(left), self.weigh(right)))
            result = _COMPARISONS[name](left, right)
        return self.compare(right, *rest) if rest and result else result

    def contains(self, value: Any, values: Any) -> bool:
        if type(value) is str and type(values) is dict:
            return value in values
        if isinstance(values, str):
            self.spend(len(values) // SCANNED)
        elif isinstance(values, (dict, KeysView)):
            if isinstance(value, tuple):
                return False
        elif isinstance(values, ItemsView):
            if isinstance(value, tuple) and value and isinstance(value[0], tuple):
                return False
            self.spend(self.weigh(value))
        elif not isinstance(values, Undefined):
            values = self.items(values)
            self.spend(self.weigh(values))
        return value in values

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]
        if isinstance(part, str):
            self.spend(len(part))
        elif isinstance(part, (list, tuple)):
            self.spend(ITEM * len(part))
        return part

    def items(self, values: Any) -> Any:
        """What a filter goes through; an iterator as a list, so that none is inside another."""
        if isinstance(values, Iterator):
            return self.hold(list(values))
        if hasattr(values, "__len__"):
            self.spend(2 * ITEM * len(values))
        return values

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What jinja gives, but without looking whether it is safe
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICTS:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext:
            if attribute in _OF_LOOPS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _OF_TEXT:
                return getattr(obj, attribute)
        elif kind is _Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, type):
            raise SecurityError("a type has no items")
        self.key(argument)
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if not modifies_known_mutable(obj, attribute):
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(value, _METHODS) and isinstance(value.__self__, str):
            return formatter(self, value.__name__, value.__self__)
        return None

    def call(self, context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(CALL + ITEM * (len(args) + len(kwargs)))
        owner = None
        if type(target) is BuiltinMethodType and type(target.__self__) is str:
            for name in _CONTEXT:
                kwargs.pop(name, None)
            cost = METHODS[str].get(target.__name__)
            if cost is None:
                raise SecurityError(f"str.{target.__name__} is not available")
            cost(self, target.__self__, *args, **kwargs)
            result = target(*args, **kwargs)
            if type(result) is list:
                self.spend(ITEM * len(result))
            return result
        if isinstance(target, _METHODS):
            owner = target.__self__
            kind = str if isinstance(owner, str) else type(owner)
            method = METHODS.get(kind, {}).get(target.__name__)
            if method is None:
                raise SecurityError(f"{kind.__name__}.{target.__name__} is not available")
            method(self, owner, *args, **kwargs)
        elif isinstance(target, Macro):
            if target.catch_varargs or target.catch_kwargs:
                self.hold(args)
                self.hold(_without_context(kwargs))
        elif isinstance(target, type | FunctionType):
            self.hold(args)
            named = _without_context(kwargs)
            self.spend(self.weigh(args) + self.weigh(named))
            if target in (dict, _Namespace):
                args = tuple(map(self._mapping, args))
            if target is _Namespace and any(
                str(name).startswith("_") for part in (*args, named) for name in part
            ):
                raise SecurityError("a namespace has no private attributes")
        result = super().call(context, target, *args, **kwargs)
        if isinstance(result, str):
            self.spend(len(result))
        elif isinstance(result, (list, tuple, dict)) and owner is None:
            self.hold(result)
        elif isinstance(result, list):
            self.spend(ITEM * len(result))
        return result

    def _mapping(self, values: Any) -> dict[Any, Any]:
        if isinstance(values, dict):
            return values
        return {self.key(key): value for key, value in self.items(values)}

    def compile_chat(self, template: str) -> jinja2.Template:
        """The template, if it is short enough to be compiled soon."""
        if len(template) > LONGEST or template.count("{%") + template.count("{{") > MOST_TAGS:
            raise TooMuch(f"it has more than {LONGEST} characters or {MOST_TAGS} tags")
        tree = self.parse(template)
        check_tree(tree)
        return self.from_string(tree)

    def line(self, error: BaseException) -> int | None:
        """The template's line in which an error was raised."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return error.lineno
        line, trace = None, error.__traceback__
        while trace is not None:
            template = trace.tb_frame.f_globals.get("__jinja_template__")
            if template is not None:
                line = template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return line


def _without_context(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _CONTEXT}
