"""The steps of bench/cost_curves.py, which bench/plan.py fits attention of long rows to.

# B rows of a step, T tokens of a row
"""

from dataclasses import dataclass
from typing import Any

from bench.train_cases import GRAPHS, Case

SHORT = 4096  # tokens of a step up to which launching kernels takes longer than they do
LENGTHS, BATCHES = [2**n for n in range(10, 18)], (1, 4, 16, 64)
SIZES = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")


@dataclass(frozen=True)
class Point:
    model: str
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.rows} x {self.tokens}"

    @property
    def case(self) -> Case:
        graphs = GRAPHS if self.rows * self.tokens <= SHORT else ()
        return Case(self.model, self.rows, self.tokens, 1.0, settings=graphs)


# By the axis of a plot: a point and its place there
CURVES: dict[str, dict[Point, Any]] = {
    "tokens of one row, Llama-3.2-1B": {Point(SIZES[0], 1, n): n for n in LENGTHS},
    "rows of 1,024 tokens, Llama-3.2-1B": {Point(SIZES[0], n, 1024): n for n in BATCHES},
    "billions of parameters, a row of 8,192": {
        Point(name, 1, 8192): size for name, size in zip(SIZES, (1.2, 3.2, 8.0), strict=True)
    },
}
POINTS = list(dict.fromkeys(point for curve in CURVES.values() for point in curve))
# A model's points one after the other, the short ones first, and the longest last
POINTS.sort(key=lambda p: (SIZES.index(p.model), not p.case.settings, p.rows * p.tokens))
