"""Caches: the states of all layers, and how many tokens each row holds.

# B batch, T new tokens
"""

from collections.abc import Sequence

from torch import Tensor

from tigon.kernels._triton import autocast_dtype
from tigon.kernels.attention import AttentionMask
from tigon.layers.context import Append
from tigon.layers.state import MakeStates, State


class Cache:
    """What a forward pass asks of a cache: `begin`, `open`, and `end` after the last block."""

    def __init__(self, states: Sequence[State] = ()):
        self._hold(states)
        self.append: Append | None = None  # what the pass that has begun does

    def _hold(self, states: Sequence[State]) -> None:
        self.states, self.holds = list(states), tuple(state.holds for state in states)

    @property
    def length(self) -> int | None:
        """Tokens that every row holds; None if the host knows of no such number."""
        raise NotImplementedError

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int | Tensor:
        """Prepare for [batch, tokens] new tokens; how many the rows hold.

        A tensor [batch] of them says that the cache itself knows who may see whom.
        """
        raise NotImplementedError

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[State]:
        """The state of each layer, which `make` makes for a cache that has none yet."""
        return self.states

    def end(self, mask: AttentionMask) -> None:
        """All states have taken the new tokens: the rows hold them now."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keep the rows `rows` (an index tensor), in that order."""
        self.states = [s.map(lambda x: x.index_select(0, rows)) for s in self.states]


class KVCache(Cache):
    """Grows with the texts that it holds; for any model, whose first pass makes its states."""

    def __init__(self) -> None:
        super().__init__()
        self._length = self._rows = 0
        self.packed = False  # a batch of packed sequences has no single end to continue from

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int:
        """Tokens held, if this cache can be continued with these."""
        if self.packed:
            raise ValueError("past_key_values holds packed sequences; they have no single end")
        if self.length and cu_seq_lens is not None:
            raise ValueError(f"cu_seq_lens with a cache that already holds {self.length} tokens")
        if self.length and batch != self._rows:
            raise ValueError(f"the cache holds {self._rows} rows, this batch has {batch}")
        self._rows, self.append = batch, Append(self.length)
        return self.length

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[State]:
        if not self.length:
            dtype = autocast_dtype(x.device) or x.dtype
            self._hold(make(self._rows, None, chunk=1, dtype=dtype, device=x.device))
        return self.states

    def end(self, mask: AttentionMask) -> None:
        self._length += mask.tokens
        self.append, self.packed = None, mask.segment_ids is not None

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._rows = len(rows)
