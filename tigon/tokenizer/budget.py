"""How much a chat template may do: a count that every operation takes from."""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar

from jinja2 import TemplateRuntimeError

T = TypeVar("T")

# A unit is a character that is copied: up to 4 bytes, and some 10 ns at worst
ALLOWANCE = 2**24  # units of one rendering ...
PER_WEIGHT = 128  # ... and these for each unit of weight of what is rendered
NODE = 32  # units of one expression of the template
CALL = 64
ITEM = 16  # of a list that is copied or gone through
SCANNED = 16  # characters that are only looked at, for one unit
HEAVIEST = 2**22  # weight of a value that the template builds, besides what it is given
DEEPEST = 256  # lists inside lists: C code goes down without a check, and each level costs time
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
        # Weight and depth of lists and dicts by id, with the value, so that no other gets its id
        self.weights: dict[int, tuple[Any, int, int]] = {}

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
        if isinstance(value, (list, tuple, KeysView, ValuesView)):
            size, items = len(value), value.__iter__
        elif isinstance(value, (dict, ItemsView)):
            size, items = len(value), lambda: _both(value)
        else:
            return len(value) if isinstance(value, range) else 1
        known = self.weights.get(id(value))
        if known is None:
            self.spend(ITEM * (1 + size))
            weight = 1 + sum(map(self.weigh, items()))
            depth = 1 + max(map(self.depth, items()), default=0)
            if depth > DEEPEST:
                raise TooMuch(f"it nests lists deeper than {DEEPEST} levels")
            known = self.weights[id(value)] = value, weight, depth
        return known[1]

    def depth(self, value: Any) -> int:
        """How many lists are inside each other in a value that has been weighed."""
        known = self.weights.get(id(value))
        return 0 if known is None else known[2]

    def hold(self, value: T) -> T:
        """A list, tuple or dict that the template has made: not too heavy, and what it has cost."""
        self.spend(ITEM * len(value))  # type: ignore[arg-type]
        weight = self.weigh(value)
        if weight > self.heaviest:
            self.add_for_conversation()
            if weight > self.heaviest:
                raise TooMuch("it makes a value of lists inside lists that is too large")
        return value

    def number(self, value: T) -> T:
        """The result of arithmetic, which may be any other value too."""
        if isinstance(value, int) and not -BIGGEST < value < BIGGEST:
            raise TooMuch(f"it computes a whole number of {value.bit_length()} bits")
        return value

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


def _both(value: Mapping[Any, Any] | ItemsView[Any, Any]) -> Iterator[Any]:
    for pair in value.items() if isinstance(value, Mapping) else value:
        yield from pair
