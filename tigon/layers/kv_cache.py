"""Caches: the state of each layer, and how many tokens each row holds.

# T new tokens of a row, N new tokens of all
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.runtime import autocast_dtype, check_values, on_host
from tigon.layers.context import CacheAppend, TokenSlots
from tigon.layers.kv_state import LayerState, MakeStates, StateSpec


class Cache:
    """A model's cache; a forward pass calls `begin`, `open`, and `end` after the last block."""

    crop_hint = ""  # ends a message about states that cannot forget single tokens

    def __init__(self, states: Sequence[LayerState] = ()):
        self._set_states(states)
        self.append: CacheAppend | None = None  # of the current pass

    def _set_states(self, states: Sequence[LayerState]) -> None:
        self.states, self.layout = list(states), tuple(state.layout for state in states)

    @property
    def length(self) -> int | None:
        """The tokens of every row; None if rows differ or only the device knows."""
        raise NotImplementedError

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int | Tensor:
        """Prepares for [batch, tokens] new tokens; returns how many the rows hold.

        A tensor [batch] means that the cache itself builds the masks.
        """
        raise NotImplementedError

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[LayerState]:
        """Returns the state of each layer, made by `make` if the cache has none yet."""
        return self.states

    def end(self, mask: AttentionMask) -> None:
        """Counts the new tokens, after all states have stored them."""
        raise NotImplementedError

    def check_crop(self, tokens: int = 1) -> int:
        """Returns how many tokens of a row all layers hold; `crop` is free in rows of no more.

        Raises ValueError if a layer's state cannot forget a row's last `tokens`.
        """
        for layer, state in enumerate(self.states):
            if state.history is None or (state.rollback is not None and state.rollback < tokens):
                raise ValueError(
                    f"layer {layer} keeps one {state.layout} for all tokens of a row, from which "
                    f"the last ones cannot be taken away{self.crop_hint}"
                )
        return min(state.history for state in self.states if state.history is not None)

    def select(self, rows: Tensor) -> None:
        """Keeps the rows `rows` (an index tensor), in that order."""
        self.states = [s.map(lambda x: x.index_select(0, rows.to(x.device))) for s in self.states]


class KVCache(Cache):
    """Grows with the texts that it holds, for any model; the first pass makes its states."""

    def __init__(self, states: Sequence[LayerState] = (), rows: int = 0, length: int = 0) -> None:
        """`states` hold `length` tokens of each of the rows."""
        super().__init__(states)
        self.rows, self._length = rows, length
        self.packed = False  # a batch of packed sequences has no single end to continue from

    @property
    def length(self) -> int:
        return self._length

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int:
        """Returns the tokens of every row; raises ValueError if these cannot continue them."""
        if self.packed:
            raise ValueError("past_key_values holds packed sequences; they have no single end")
        if self.length and cu_seq_lens is not None:
            raise ValueError(f"cu_seq_lens with a cache that already holds {self.length} tokens")
        if self.length and batch != self.rows:
            raise ValueError(f"the cache holds {self.rows} rows, this batch has {batch}")
        self.rows, self.append = batch, CacheAppend(self.length)
        return self.length

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[LayerState]:
        if not self.length:
            dtype = autocast_dtype(x.device) or x.dtype
            self._set_states(make(StateSpec(self.rows, None, dtype, x.device)))
        return self.states

    def end(self, mask: AttentionMask) -> None:
        """Adds the tokens of the pass to `length`, and notes whether they were packed sequences."""
        self._length += mask.tokens
        self.append, self.packed = None, mask.segment_ids is not None

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.rows = len(rows)

    def expand(self, n: int) -> None:
        """Repeats every row n times."""
        self.select(torch.arange(self.rows, device="cpu").repeat_interleave(n))

    def crop(self, length: int) -> None:
        """Drops the tokens of all rows beyond `length`; a shorter cache stays as it is.

        Raises ValueError if a layer keeps one state for all tokens, unless all are dropped.
        """
        if 0 < length < self._length:
            self.check_crop()
        self._length = min(self._length, max(length, 0))


UNKNOWN = -1  # a length that only the device knows


class StaticCache(Cache):
    """Memory for `capacity` tokens in each of `rows` rows, which may differ in length.

    `make` makes the state of each layer; attention with a window keeps its last window + chunk - 1
    tokens. An empty cache takes prompts: [rows, T], or packed [1, N] with `cu_seq_lens` [rows + 1],
    of which sequence i is row i. After that all rows take T tokens at a time, up to `chunk`, or any
    number if all hold equally many, as the single row of `rows(i, i + 1)` does: so a long prompt
    can come in parts. There is no padding.

    With `quantize="int8"`, keys and values take half the memory of bf16 ones, and each is off by up
    to 1/254 of the largest of its token and head. Attention among prompts, or within a part of one,
    still uses the exact ones.

    `rollback`: how many of a row's last tokens `crop` can drop where a layer keeps one state for
    all tokens of a row, which it then keeps so many times more.

    `active` [rows] int32, if it is set: 1 for rows that a step of up to `chunk` tokens continues.
    It writes the others' tokens behind their end, where the next ones go, and does not count them;
    a state for all tokens of a row changes all the same. With it, only the device counts.

    `lengths` [rows] int32 is what a forward pass reads and changes in place without waiting, so
    that passes of up to `chunk` tokens can be captured in a CUDA graph. The host counts, too, to
    raise early: call `refresh` after replays, which it does not see. No gradients.
    """

    crop_hint = ": give static_cache rollback="

    def __init__(self, make: MakeStates, spec: StateSpec, rollback: int = 0):
        capacity = spec.capacity or 0
        for name, value in (("rows", spec.rows), ("capacity", capacity), ("chunk", spec.chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: a StaticCache needs at least 1")
        if spec.quantize not in (None, "int8"):
            raise ValueError(f"quantize={spec.quantize!r} is not None or 'int8'")
        if not isinstance(rollback, int) or rollback < 0:
            raise ValueError(f"rollback={rollback} is not a number of tokens: give 0 or more")
        self.capacity, self.chunk, self.rollback = capacity, spec.chunk, rollback

        # Not the method itself: a deep copy of a bound method copies the model that it is of
        def make_states(spec: StateSpec) -> list[LayerState]:
            states = make(spec)
            for state in states if rollback else ():
                state.keep_history(rollback)
            return states

        self._make_states, self._spec = make_states, spec
        with torch.inference_mode(False):  # what is made inside of it cannot be used outside
            super().__init__(make_states(spec))
            self.lengths = torch.zeros(spec.rows, dtype=torch.int32, device=spec.device)
            self._host_lengths = torch.zeros(spec.rows, dtype=torch.int64, device="cpu")
            # Most tokens that each row held before the last crops: states are those of its end
            self._reached = torch.zeros_like(self.lengths)
        self.active: Tensor | None = None  # rows that a step continues; None: all
        # Of `lengths` and of `_host_lengths` in this pass
        self._growth: tuple[Tensor | int, Tensor | int | None] = 0, 0

    @property
    def length(self) -> int | None:
        least, most = (int(n) for n in self._host_lengths.aminmax())
        return least if least == most != UNKNOWN else None

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(state.nbytes for state in self.states)

    def rows(self, start: int, stop: int) -> Self:
        """Returns a view of the rows [start, stop); tokens appended to it appear here.

        Raises ValueError for rows that the cache lacks.
        """
        if not 0 <= start < stop <= len(self.lengths):
            raise ValueError(f"rows({start}, {stop}) of a cache of {len(self.lengths)} rows")
        view = copy.copy(self)
        view.states = [state.map(lambda x: x[start:stop]) for state in self.states]
        view.lengths, view._host_lengths = self.lengths[start:stop], self._host_lengths[start:stop]
        view._reached = self._reached[start:stop]
        view.active = None if self.active is None else self.active[start:stop]
        return view

    def reset(self, start: int, stop: int) -> None:
        """Empties the rows [start, stop) in place; new prompts can go into `rows(start, stop)`."""
        view = self.rows(start, stop)
        view.lengths.zero_()
        view._host_lengths.zero_()
        view._reached.zero_()
        for state in view.states:
            if state.history is None:  # no length tells what of it counts
                for x in state._tensors():
                    x.zero_()

    def borrow(self, start: int, stop: int) -> Self:
        """Returns a view of the rows for prompts that come in parts, with steps over all rows of
        this cache in between. `give_back` takes over what the view does not share with the cache:
        states for all tokens of a row, which steps would change."""
        view = self.rows(start, stop)
        view.states = [s.map(torch.clone) if s.history is None else s for s in view.states]
        view._host_lengths, view.active = view._host_lengths.clone(), None
        return view

    def give_back(self, view: Self, start: int) -> None:
        """Takes over what `borrow` copied from the rows that begin at `start`."""
        rows = self.rows(start, start + len(view.lengths))
        for state, other in zip(rows.states, view.states, strict=True):
            if state.history is None:
                for x, y in zip(state._tensors(), other._tensors(), strict=True):
                    x.copy_(y)

    def select(self, index: Tensor) -> None:
        """Keeps the rows `index` [n], in that order, in new memory; the host waits."""
        if index.dim() != 1 or not len(index):
            raise ValueError(f"select {tuple(index.shape)}: give an index [n] of rows to keep")
        index = index.to(self.lengths.device)
        with torch.inference_mode(False):
            super().select(index)
            self.lengths = self.lengths.index_select(0, index)
            self._reached = self._reached.index_select(0, index)
            if self.active is not None:
                self.active = self.active.index_select(0, index)
            self._host_lengths = self.lengths.to("cpu", torch.int64)

    def expand(self, n: int) -> None:
        """Repeats every row n times in new memory; the host waits."""
        self.select(torch.arange(len(self.lengths), device="cpu").repeat_interleave(n))

    def grow(self, capacity: int) -> None:
        """Grows to `capacity` tokens in each row, in new memory; the host waits.

        A ring of a window is full when it no longer grows, and until then token i is in slot i.
        """
        self.refresh()
        spec = self._spec._replace(rows=len(self.lengths), capacity=capacity, device="meta")
        with torch.inference_mode(False):
            for i, larger in enumerate(self._make_states(spec)):
                self.states[i] = self.states[i].resized(larger)
        self.capacity = capacity

    def crop(self, lengths: Tensor) -> None:
        """Drops the tokens of each row beyond `lengths` [rows]; shorter rows stay as they are.

        With windows, only the last `chunk` tokens of a row can be dropped, or all: tokens that were
        in view before them are gone. With one state for all tokens of a row, `rollback` of them.
        Those that an earlier call has dropped count until the row is as long again.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"crop to lengths {tuple(lengths.shape)} of a cache of {len(self.lengths)} rows"
            )
        values = f" {lengths.tolist()}" if on_host(lengths) else ""
        new, least = lengths.to(self.lengths.device, non_blocking=True), self.check_crop()
        back = min([self.chunk, *(s.rollback for s in self.states if s.rollback is not None)])
        torch.maximum(self._reached, self.lengths, out=self._reached)
        empty = new == 0
        near = (new >= self._reached - back) | (self._reached <= least) | empty
        check_values(
            ((new >= 0) & near).all(),
            f"crop to lengths{values}: they are negative, or more than the {back} tokens back that "
            f"layers with a window (chunk={self.chunk}) or a state (rollback) still know",
        )
        self.lengths.clamp_(max=new)
        self._reached.masked_fill_(empty, 0)
        if on_host(lengths):
            self._host_lengths.clamp_(max=lengths)
        else:
            self._host_lengths.fill_(UNKNOWN)

    def refresh(self) -> None:
        """Reads `lengths` to the host, after replays of a CUDA graph; it waits for them."""
        self._host_lengths.copy_(self.lengths)

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int | Tensor:
        if mask is not None:
            self._check_mask(mask, batch, tokens)
        cached = self.length
        if cached != 0 or self.active is not None:
            if cu_seq_lens is not None:
                raise ValueError(
                    f"cu_seq_lens with a cache that already holds {self._length_text()} tokens: "
                    "packed prompts need an empty one"
                )
            if tokens <= self.chunk:
                self._check_batch(batch)
                unknown = (self._host_lengths == UNKNOWN).any()
                lengths = self.lengths if unknown else self._host_lengths
                self._check_room(lengths + tokens)
                self.append, self._growth = CacheAppend(lengths=self.lengths), (tokens, tokens)
                if self.active is not None:
                    self._growth = tokens * self.active, None
                return self.lengths
            if cached is None:
                raise ValueError(
                    f"{tokens} new tokens for rows that hold {self._length_text()} tokens: more "
                    f"than chunk={self.chunk} go into rows of one known length, as rows(i, i + 1)"
                )
        self._prepare_slots(cached, batch, tokens, cu_seq_lens)
        return cached

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[LayerState]:
        """Returns the states for a pass; ValueError for packed prompts without cu_seq_lens."""
        if mask.segment_ids is not None and mask.cu_seq_lens is None:
            raise ValueError(
                "position_ids restart: a StaticCache takes packed prompts with cu_seq_lens"
            )
        return self.states

    def end(self, mask: AttentionMask) -> None:
        grown, host_grown = self._growth
        self.append = None  # its masks can be large
        self.lengths.add_(grown)
        if host_grown is None:
            self._host_lengths.fill_(UNKNOWN)
        else:
            self._host_lengths.add_(host_grown * (self._host_lengths != UNKNOWN))

    def _prepare_slots(
        self, cached: int, batch: int, tokens: int, cu_seq_lens: Tensor | None
    ) -> None:
        """Prepares to append any number of tokens after the `cached` ones of every row.

        Raises ValueError for other rows than the cache has, and for tokens that do not fit.
        """
        rows = len(self.lengths)
        if cu_seq_lens is None:
            self._check_batch(batch)
            cu_seq_lens = torch.arange(rows + 1, device="cpu") * tokens
        elif len(cu_seq_lens) != rows + 1:
            raise ValueError(
                f"cu_seq_lens has {len(cu_seq_lens) - 1} sequences, but the cache {rows} rows"
            )
        new = cu_seq_lens.diff()
        self._check_room(cached + new)
        cu = cu_seq_lens.to(self.lengths.device, torch.int64, non_blocking=True)
        grown, at = cu.diff(), torch.arange(batch * tokens, device=cu.device)
        row = torch.bucketize(at, cu[1:], right=True)
        slots = TokenSlots(row, cached + at - cu[row], cached + grown[row], cu)
        self.append = CacheAppend(cached, slots=slots)
        self._growth = grown, new if on_host(new) else None

    def _check_mask(self, mask: Tensor, batch: int, tokens: int) -> None:
        """Raises ValueError unless the mask is on the CPU, of the new or all tokens, and all 1."""
        total = max(int(self._host_lengths.max()), 0) + tokens
        fits = mask.shape in ((batch, tokens), (batch, total))
        if not (fits and on_host(mask) and mask.all()):
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} with a StaticCache: its rows hold no padding; "
                f"pack the prompts and give cu_seq_lens, or no mask or one of ones [{batch}, "
                f"{total}] on the CPU"
            )

    def _check_batch(self, batch: int) -> None:
        if batch != len(self.lengths):
            raise ValueError(f"the cache holds {len(self.lengths)} rows, this batch has {batch}")

    def _check_room(self, lengths: Tensor) -> None:
        """Raises ValueError if one of these lengths exceeds the capacity; on a GPU it asserts."""
        what = f"{int(lengths.max())} tokens" if on_host(lengths) else "the tokens"
        check_values(
            (lengths <= self.capacity).all(),
            f"{what} of a row do not fit into the cache's capacity={self.capacity}; give it more",
        )

    def _length_text(self) -> str:
        """Describes in errors how many tokens are held."""
        lengths = sorted(set(self._host_lengths.tolist()))
        return "an unknown number of" if UNKNOWN in lengths else ", ".join(map(str, lengths))
