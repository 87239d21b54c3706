"""When a row has ended: stop strings, and what the host knows of every row.

# B rows, n tokens of a step
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tigon.generation.protocols import Decodes
from tigon.generation.sampling import NOT_FINITE

ABSENT = -1  # stands where a step has no token for a row


class StopStrings:
    """Whether the last token of a row completed one of the strings, wherever that began."""

    def __init__(self, strings: Sequence[str], tokenizer: Decodes):
        self.strings, self.tokenizer = strings, tokenizer
        # A token is at least a byte. One more, since decoders treat the first of a text apart
        self.window = max(len(s.encode()) for s in strings) + 1

    def __call__(self, tokens: Tensor) -> list[bool]:
        """For tokens [B, any]: prompt and continuation."""
        return [self.completed(row) for row in tokens[:, -self.window :].tolist()]

    def completed(self, ids: list[int]) -> bool:
        """For the last `window` tokens of one row, or all that it has."""
        before = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        # An unfinished character is U+FFFD until its last byte
        old = len(before.rstrip("\ufffd"))
        return any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self.strings)


def find_stops(strings: Sequence[str], tokenizer: Decodes | None) -> StopStrings | None:
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings {list(strings)} need the model's tokenizer: tokenizer=")
    return StopStrings(strings, tokenizer)


class Continuations:
    """What each row has said and which rows have ended, as far as the host has heard.

    Tokens of a row behind its end are not heard, so it does no harm that the device makes some.
    `emit` gets a column [B] as soon as all rows that have not ended are past it.
    """

    def __init__(
        self,
        prompt: Tensor,  # [B, T]
        most: int,  # tokens of a row
        eos: Sequence[int],
        pad: int,
        stop: StopStrings | None,
        emit: Callable[[Tensor], object] | None,
    ):
        self.most, self.pad = most, pad
        self.said: list[list[int]] = [[] for _ in range(prompt.shape[0])]
        self.alive = set(range(prompt.shape[0])) if most else set()
        self._eos, self._stop, self._emit, self._emitted = frozenset(eos), stop, emit, 0
        self._prompt = [] if stop is None else prompt[:, -stop.window :].tolist()

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(len(said) for said in self.said)

    @property
    def left(self) -> int:
        """Tokens that the row with the fewest may still get."""
        return self.most - min((len(self.said[row]) for row in self.alive), default=self.most)

    def hear(self, rows: Sequence[int], tokens: list[list[int]]) -> None:
        """The tokens [b, n] of one step, which `rows` [b] said."""
        for row, new in zip(rows, tokens, strict=True):
            for token in new:
                if row in self.alive and token != ABSENT:
                    self._hear(row, token)
        if self._emit is not None:
            heard = min((len(self.said[row]) for row in self.alive), default=self.length)
            for column in range(self._emitted, heard):
                self._emit(torch.tensor([self._at(row, column) for row in range(len(self.said))]))
            self._emitted = heard

    def _hear(self, row: int, token: int) -> None:
        if token == NOT_FINITE:
            raise ValueError(
                f"row {row}: the scores of token {len(self.said[row])} after the prompt are not "
                "finite, so nothing can be sampled; look for nan or inf in the model's weights"
            )
        said = self.said[row]
        said.append(token)
        ended = len(said) == self.most or token in self._eos
        if self._stop is not None and not ended:
            window = self._stop.window
            ended = self._stop.completed((self._prompt[row] + said[-window:])[-window:])
        if ended:
            self.alive.remove(row)

    def _at(self, row: int, column: int) -> int:
        said = self.said[row]
        return said[column] if column < len(said) else self.pad

    def tensor(self) -> Tensor:
        """[B, length] on the CPU: rows that ended early are filled with the pad token."""
        length = self.length
        filled = [said + [self.pad] * (length - len(said)) for said in self.said]
        return torch.tensor(filled, dtype=torch.long).view(len(filled), length)
