"""How much a chat template may do: a count that every operation takes from."""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

T = TypeVar("T")

# A unit is a character that is copied: up to 4 bytes, and some 10 ns at worst
ALLOWANCE = 2**24  # units of one rendering ...
PER_WEIGHT = 128  # ... and these for each unit of weight of what is rendered
NODE = 32  # units of one expression of the template
CALL = 64
ITEM = 16  # of a list that is copied or gone through
SCANNED = 16  # characters that are only looked at, for one unit
HEAVIEST = 2**22  # weight of a value that the template builds, besides what it is given
BIGGEST = 2**63  # of whole numbers, since the cost of a larger one is not constant


class TooMuch(TemplateRuntimeError):
    """The template does more than it may."""


class Budget:
    """Counts what one rendering does, and ends it where it does too much.

    Time and memory of an operation are at most proportional to what is spent for it, or to the
    weight of one value, and no value is heavier than what the template is given or `HEAVIEST`. So
    the whole is bounded, whatever the template. It is counted, not timed: a template that renders
    once renders everywhere.
    """

    def start(self, given: Any) -> None:
        """A new rendering, of these variables."""
        self.left = ALLOWANCE
        self.heaviest = HEAVIEST
        self.given: Any = given
        self.extended = False
        # Of lists and dicts by id, with the value itself, so that no other gets its id
        self.weights: dict[int, tuple[Any, int]] = {}

    def stop(self) -> None:
        self.given, self.weights = None, {}

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            self.exhausted()

    def weigh(self, value: Any) -> int:
        """The characters and items of a value and of all inside it, each as often as it is met:
        what comparing it or writing it as text goes through."""
        if isinstance(value, str):
            return len(value) + 1
        items: Callable[[], Iterator[Any]]
        if isinstance(value, (list, tuple)):
            size, items = len(value), value.__iter__
        elif isinstance(value, dict):
            size, items = len(value), lambda: _both(value)
        elif isinstance(value, ItemsView):
            return 1 + sum(self.weigh(key) + self.weigh(item) for key, item in value)
        elif isinstance(value, (KeysView, ValuesView)):
            return 1 + sum(map(self.weigh, value))
        elif isinstance(value, Namespace):  # changes, so that its weight is not kept
            self.spend(8 * ITEM)
            return 1 + self._weigh_all(_both(value._Namespace__attrs))
        else:
            return len(value) if isinstance(value, range) else 1
        known = self.weights.get(id(value))
        if known is None:
            self.spend(ITEM * (1 + size))
            known = self.weights[id(value)] = value, 1 + self._weigh_all(items())
        return known[1]

    def hold(self, value: T) -> T:
        """A list, tuple or dict that the template has made: not too heavy, and what it has cost."""
        self.spend(ITEM * len(value))  # type: ignore[arg-type]
        weight = self.weigh(value)
        if weight > self.heaviest:
            self.add_for_conversation()
            if weight > self.heaviest:
                raise TooMuch("it makes a value of lists inside lists that is too large")
        if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
            self.spend(weight)  # what hashes its keys has cost
        return value

    def number(self, value: T) -> T:
        """The result of arithmetic, which may be any other value too."""
        if isinstance(value, int) and not -BIGGEST < value < BIGGEST:
            raise TooMuch(f"it computes a whole number of {value.bit_length()} bits")
        return value

    def _weigh_all(self, values: Iterator[Any]) -> int:
        return sum(map(self.weigh, values))

    def more_text(self, length: int) -> int:
        """How much text may be written in all, where so much has been."""
        self.add_for_conversation()
        if length > (most := ALLOWANCE + PER_WEIGHT * self.given_weight):
            raise TooMuch(f"it writes more than {most} characters")
        return most

    def exhausted(self) -> None:
        if not self.extended:
            self.add_for_conversation()
        if self.left < 0:
            raise TooMuch(
                "it does more than a template may: it loops too often, or makes too much text"
            )

    def add_for_conversation(self) -> None:
        """What the text itself allows. Weighing it takes time, so not before it is needed."""
        if not self.extended:
            self.extended = True
            left, self.left = self.left, 2**62
            self.given_weight = self.weigh(self.given)
            self.left = left + PER_WEIGHT * self.given_weight
            self.heaviest += 4 * self.given_weight


def _both(value: Mapping[Any, Any]) -> Iterator[Any]:
    yield from value
    yield from value.values()
