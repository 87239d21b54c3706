"""What generate returns with tokens: logits, scores, and the cache.

# B rows, n tokens of a step, V vocab
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.layers import Cache
from tigon.utils.outputs import Output


@dataclass(eq=False)
class GenerationOutput(Output):
    """What `generate` returns with return_dict_in_generate, as transformers'
    GenerateDecoderOnlyOutput.

    `scores` and `logits` have an fp32 tensor [B, V] for each new token: what the token was chosen
    by, after processors, and what the head returned. They are zeros behind the end of a row.
    `past_key_values` holds all tokens of a row but the last, which the model has not read.
    """

    sequences: Tensor  # [B, T + new]
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    past_key_values: Cache | None = None

    @property
    def cache(self) -> Cache | None:
        """Returns `past_key_values`, by the name that it has in transformers since 5.24."""
        return self.past_key_values


class Recording:
    """The logits and scores of each token that rows have got."""

    def __init__(self, names: Sequence[str], rows: int):
        # What Sampling leaves of a step, [B * n, V] or [B, V]; None: nothing is recorded
        self.last: dict[str, Tensor] | None = {} if names else None
        self._columns: dict[str, list[Tensor]] = {name: [] for name in names}
        self._counts = [0] * rows  # tokens of each row that are in the columns

    def update(self, tokens: Sequence[Sequence[int]]) -> None:
        """Takes what the last step has for the tokens of rows that it gave."""
        if self.last is None:
            return
        sources = defaultdict(list)  # column -> row and token of the step
        for row, ids in enumerate(tokens):
            for i, column in enumerate(range(self._counts[row], len(ids))):
                sources[column].append((row, i))
            self._counts[row] = max(self._counts[row], len(ids))
        for name, columns in self._columns.items() if sources else ():
            step = self.last[name].unflatten(0, (len(self._counts), -1))
            for column, pairs in sources.items():
                rows, at = torch.tensor(pairs, device=step.device).unbind(1)
                if column == len(columns):
                    columns.append(torch.zeros_like(step[:, 0]))
                columns[column][rows] = step[rows, at]

    def scores(self, tokens: Sequence[Sequence[int]], count: int) -> tuple[Tensor, ...] | None:
        """Returns the scores [B, V] of each row's first `count` tokens; None without scores."""
        if "scores" not in self._columns:
            return None
        self.update(tokens)
        return tuple(self._columns["scores"][:count])

    def finish(self, tokens: Sequence[Sequence[int]]) -> dict[str, tuple[Tensor, ...]]:
        """Returns the logits and scores [B, V] of each token, after the last step."""
        self.update(tokens)
        lengths = [*map(len, tokens)]
        for columns in self._columns.values():
            for row, (length, count) in enumerate(zip(lengths, self._counts, strict=True)):
                for column in columns[length:count]:
                    column[row] = 0  # a criterion has ended the row earlier
        return {name: tuple(c[: max(lengths)]) for name, c in self._columns.items()}
