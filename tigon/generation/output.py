"""What generate returns beside tokens: logits, scores, and the cache.

# B rows, n tokens of a step, V vocab
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.generation.loop import Continuations
from tigon.generation.prompt import CachingSteps
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
        """`past_key_values`, by the name that it has in transformers since 5.24."""
        return self.past_key_values


class Recorder:
    """Runs steps, keeps logits and scores of each token, and lets the cache of rows that have ended
    be.

    The host must take the tokens of each step before the next.
    """

    can_remove_rows = False

    def __init__(
        self,
        steps: CachingSteps,
        output: Continuations,
        last: dict[str, Tensor],  # of RecordedSampling: [B * n, V] or [B, V] of the last step
        names: Sequence[str],  # of those that are kept
    ):
        self._steps, self._output, self._last = steps, output, last
        self._columns: dict[str, list[Tensor]] = {name: [] for name in names}
        self._counts = [0] * len(output.tokens)  # tokens of each row that are in the columns
        self._unfinished = set(output.unfinished)
        if output.criteria is not None and "scores" in names:
            output.criteria.scores = functools.partial(self.values, "scores")

    def __call__(self, remaining: int) -> Tensor:
        """The next tokens [B, n], or ABSENT."""
        self._record()
        if self._output.unfinished != self._unfinished:
            self._unfinished = set(self._output.unfinished)
            counts = [len(tokens) for tokens in self._output.tokens]
            self._steps.hold({i: n for i, n in enumerate(counts) if i not in self._unfinished})
        return self._steps(remaining)

    def select(self, index: Tensor) -> None:
        """Raises NotImplementedError: the cache of all rows is kept."""
        raise NotImplementedError("rows whose cache is kept stay to the end")

    def values(self, name: str, tokens: int) -> tuple[Tensor, ...]:
        """The "logits" or "scores" of the first `tokens` tokens, [B, V] of each."""
        self._record()
        return tuple(self._columns[name][:tokens])

    def finish(self) -> dict[str, Any]:
        """Returns the fields of a GenerationOutput beside the sequences, after the last step."""
        self._record()
        lengths = [len(tokens) for tokens in self._output.tokens]
        for columns in self._columns.values():
            for row, (length, count) in enumerate(zip(lengths, self._counts, strict=True)):
                for column in columns[length:count]:
                    column[row] = 0  # a criterion has ended the row earlier
        fields: dict[str, Any] = {n: self.values(n, max(lengths)) for n in self._columns}
        return fields | {"past_key_values": self._steps.finish(lengths)}

    def _record(self) -> None:
        """Notes what the last step has for the tokens that it gave to rows."""
        places = defaultdict(list)  # row and column of the step, by the token's place in its row
        for row, tokens in enumerate(self._output.tokens):
            for i, place in enumerate(range(self._counts[row], len(tokens))):
                places[place].append((row, i))
            self._counts[row] = max(self._counts[row], len(tokens))
        for name, columns in self._columns.items() if places else ():
            step = self._last[name].unflatten(0, (len(self._counts), -1))
            for place, found in places.items():
                rows, at = torch.tensor(found, device=step.device).unbind(1)
                if place == len(columns):
                    columns.append(torch.zeros_like(step[:, 0]))
                columns[place][rows] = step[rows, at]
