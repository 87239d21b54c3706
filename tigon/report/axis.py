"""Scales of a chart: where a value lies, which ticks it has and what they say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SPREAD = 20  # a maximum of so many medians is drawn on a logarithmic scale
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values."""
        if self.log and self.high / self.low > 10:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, round((last - first) / count))
            decades = [10.0**power for power in range(first, last + 1, every)]
            found = [value for value in decades if self._has(value)]
            if len(found) > 2:
                return found
            fine = [factor * value for value in decades for factor in (1, 2, 5)]
            return [value for value in fine if self._has(value)]
        step = round_step((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _has(self, value: float) -> bool:
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)


def round_step(size: float) -> float:
    """The least of 1, 2, 2.5, 5 and their multiples by powers of ten that is at least `size`."""
    if not 1e-300 < size < 1e300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)


def value_scale(
    lows: Sequence[float], highs: Sequence[float], typical: Sequence[float], from_zero: bool
) -> Scale:
    """Of the values of all lines of a chart; `typical` are their means, which decide about the
    logarithm."""
    if not typical:
        return Scale(0.0, 1.0)
    low, high = min(lows), max(highs)
    middle = sorted(typical)[len(typical) // 2]
    if low > 0 and high > SPREAD * middle and not from_zero:
        return Scale(low / 1.1, high * 1.1, log=True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.08 if high > 0 else 1.0)
    pad = 0.06 * (high - low) if high > low else max(0.05 * abs(high), 1e-12)
    # A positive quantity is not drawn down to negative values
    floor = 0.0 if low >= 0 else -math.inf
    return Scale(max(low - pad, floor), high + pad)


def step_scale(first: float, last: float) -> Scale:
    first = 0 if 0 < first <= 0.05 * last else first
    return Scale(first, last) if last > first else Scale(first - 0.5, first + 0.5)


def tick_text(value: float, step: float) -> str:
    """With as many decimals as tell it from its neighbours, `step` away."""
    size = abs(value)
    if size < 1e-9 * step:
        return "0"
    if size >= 1e15 or size < 1e-3:
        return scientific(value)
    for unit, letter in UNITS:
        if size >= max(unit, 1e4):
            return f"{_decimals(value / unit, step / unit)}{letter}"
    return _decimals(value, step)


def _decimals(value: float, step: float) -> str:
    places = 0 if step <= 0 else max(0, min(6, -math.floor(math.log10(step) + 1e-9)))
    if 0 < step < 1e300 and abs(round(step, places) - step) > 1e-9 * step:  # 2.5, 0.25
        places += 1
    return f"{value:,.{places}f}"


def scientific(value: float) -> str:
    digits, power = f"{value:.2e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    return f"{digits}e{int(power)}"


def number(value: float) -> str:
    """For people: four significant digits."""
    if math.isnan(value):
        return "not finite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return scientific(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
