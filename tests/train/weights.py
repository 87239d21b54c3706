"""Fine-tuning with a weight for each message and row, as a column of the examples."""

from dataclasses import replace
from typing import Any

import numpy as np

from tigon.data import Examples
from tigon.train.objectives import SFT


def weights_of(line: int, supervised: np.ndarray) -> np.ndarray:
    """By row (line 1 weighs 0.75, then 1.25, 0.25, 0.75 ...) and answer (1, 0.5, 1 ...)."""
    answer = np.cumsum(np.diff(supervised.astype(int), prepend=0) == 1)
    return (0.25 + line % 3 * 0.5) * np.where(answer % 2, 1.0, 0.5)


class WeightedSFT(SFT):
    def examples(self, *given: Any) -> Examples:
        examples = super().examples(*given)
        weights = np.zeros(len(examples.tokens), dtype=np.float32)
        for e, (start, stop) in enumerate(
            zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
        ):
            line = int(examples.origin[e, 1])
            weights[start:stop] = weights_of(line, np.asarray(examples.supervised[start:stop]))
        columns = {**examples.per_token, "loss_weights": weights}
        return replace(examples, per_token=columns)
