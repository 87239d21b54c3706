"""Columns whose values are lists of different lengths; what is stored or taken together has the
width of the longest.

# N values, K in the longest
"""

from collections.abc import Sequence

import numpy as np

PADS = {"teacher_tokens": -1, "teacher_logprobs": 0.0}  # what a shorter list has at its end


def widest(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (K,) that values of all these get; the first one for a column not in PADS."""
    return max(shapes) if name in PADS else shapes[0]


def widened(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values [N, k] of a column as [N, K], of `shape`; those not in PADS as they are."""
    if name not in PADS or values.shape[1:] == shape:
        return values
    missing = shape[0] - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=PADS[name])


def alike(name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A column's arrays [N, k], all as wide as the widest."""
    shape = widest(name, *(array.shape[1:] for array in arrays))
    return [widened(name, array, shape) for array in arrays]
