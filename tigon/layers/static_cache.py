"""A cache whose memory is allocated once, so that a CUDA graph can decode.

# B batch, T new tokens of a row, N new tokens of all, R rows of the cache
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from tigon.kernels._check import check, on_host
from tigon.kernels.attention import AttentionMask
from tigon.layers.cache import Cache
from tigon.layers.context import Append, Places
from tigon.layers.state import MakeStates, Quantize, State

UNKNOWN = -1  # a length that only the device knows


class StaticCache(Cache):
    """Room for `capacity` tokens in each of `rows` rows, which may differ in length.

    `make` makes the state of each layer; attention with a window keeps its last
    window + chunk - 1 tokens. An empty cache takes prompts: [rows, T], or packed [1, N] with
    `cu_seq_lens` [rows + 1], of which sequence i is row i. After that all rows take T tokens at a
    time, up to `chunk`, and any number where all hold equally many, as the single row of
    `rows(i, i + 1)`: so a long prompt can come in parts. There is no padding.

    With `quantize="int8"`, keys and values take half the memory of bf16 ones, and each is off by
    up to 1/254 of the largest of its token and head. Attention among prompts, or within a part of
    one, still goes by the exact ones.

    `lengths` [rows] int32 is what a forward pass goes by. It changes them in place and waits for
    nothing, so that passes of up to `chunk` tokens can be captured in a CUDA graph. The host keeps
    count to raise early: `refresh` after replays, which it does not see. No gradients.
    """

    def __init__(
        self,
        make: MakeStates,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        chunk: int = 16,
        quantize: Quantize = None,
    ):
        for name, value in (("rows", rows), ("capacity", capacity), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: a StaticCache needs at least 1")
        if quantize not in (None, "int8"):
            raise ValueError(f"quantize={quantize!r} is not None or 'int8'")
        self.capacity, self.chunk = capacity, chunk
        options: dict[str, Any] = {"chunk": chunk, "dtype": dtype, "device": device}
        options["quantize"] = quantize
        with torch.inference_mode(False):  # what is made inside of it cannot be used outside
            super().__init__(make(rows, capacity, **options))
            self._make: Callable[[int, int], list[State]] = functools.partial(
                make, **options | {"device": "meta"}
            )
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
            self._known = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self._growth: tuple[Tensor | int, Tensor | int | None] = 0, 0  # of `lengths`, of `_known`

    @property
    def length(self) -> int | None:
        """Tokens that every row holds; None if rows differ, or if only the device knows."""
        least, most = (int(n) for n in self._known.aminmax())
        return least if least == most != UNKNOWN else None

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states)

    def rows(self, start: int, stop: int) -> Self:
        """A cache over these rows that shares their memory: what it takes, this one holds."""
        if not 0 <= start < stop <= len(self.lengths):
            raise ValueError(f"rows({start}, {stop}) of a cache of {len(self.lengths)} rows")
        view = copy.copy(self)
        view.states = [state.map(lambda x: x[start:stop]) for state in self.states]
        view.lengths, view._known = self.lengths[start:stop], self._known[start:stop]
        return view

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` [n], in that order, in new memory; the host waits."""
        if index.dim() != 1 or not len(index):
            raise ValueError(f"select {tuple(index.shape)}: give an index [n] of rows to keep")
        index = index.to(self.lengths.device)
        with torch.inference_mode(False):
            super().select(index)
            self.lengths = self.lengths.index_select(0, index)
            self._known = self.lengths.to("cpu", torch.int64)

    def expand(self, n: int) -> None:
        """Every row n times, one after the other, in new memory; the host waits."""
        self.select(torch.arange(len(self.lengths)).repeat_interleave(n))

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens in each row, in new memory; the host waits.

        A ring of a window is full when it no longer grows, and until then token i is in slot i.
        """
        self.refresh()
        with torch.inference_mode(False):
            for i, larger in enumerate(self._make(len(self.lengths), capacity)):
                self.states[i] = self.states[i].resized(larger)
        self.capacity = capacity

    def crop(self, lengths: Tensor) -> None:
        """Forget the tokens of each row beyond `lengths` [rows]; shorter rows stay as they are.

        Where layers have windows, only the last `chunk` tokens of a row can be forgotten, or all:
        what was in view before others is no longer held.
        """
        if lengths.shape != self.lengths.shape:
            raise ValueError(
                f"crop to lengths {tuple(lengths.shape)} of a cache of {len(self.lengths)} rows"
            )
        values = f" {lengths.tolist()}" if on_host(lengths) else ""
        new, least = lengths.to(self.lengths.device, non_blocking=True), self.check_crop()
        near = (new >= self.lengths - self.chunk) | (self.lengths <= least) | (new == 0)
        check(
            ((new >= 0) & near).all(),
            f"crop to lengths{values}: they are negative, or more than the chunk={self.chunk} "
            "tokens back that layers with a window still know",
        )
        self.lengths.clamp_(max=new)
        if on_host(lengths):
            self._known.clamp_(max=lengths)
        else:
            self._known.fill_(UNKNOWN)

    def check_crop(self) -> int:
        """How many of a row's last tokens all layers tell apart; ValueError if one tells none."""
        for layer, state in enumerate(self.states):
            if state.history is None:
                raise ValueError(
                    f"layer {layer} keeps one {state.holds} for all tokens of a row, from which "
                    "the last ones cannot be taken away"
                )
        return min(state.history for state in self.states if state.history is not None)

    def refresh(self) -> None:
        """Tell the host what `lengths` are, after replays of a CUDA graph; it waits for them."""
        self._known.copy_(self.lengths)

    def begin(
        self, batch: int, tokens: int, mask: Tensor | None = None, cu_seq_lens: Tensor | None = None
    ) -> int | Tensor:
        """Prepare for [batch, tokens] new tokens; how many the rows hold, int or [rows]."""
        if mask is not None:
            self._check_mask(mask, batch, tokens)
        held = self.length
        if held != 0:
            if cu_seq_lens is not None:
                raise ValueError(
                    f"cu_seq_lens with a cache that already holds {self._spell()} tokens: packed "
                    "prompts need an empty one"
                )
            if tokens <= self.chunk:
                self._check_batch(batch)
                known = self.lengths if (self._known == UNKNOWN).any() else self._known
                self._check_room(known + tokens)
                self.append, self._growth = Append(lengths=self.lengths), (tokens, tokens)
                return self.lengths
            if held is None:
                raise ValueError(
                    f"{tokens} new tokens for rows that hold {self._spell()} tokens: more than "
                    f"chunk={self.chunk} go into rows of one known length, as rows(i, i + 1) has"
                )
        self._place(held, batch, tokens, cu_seq_lens)
        return held

    def open(self, make: MakeStates, x: Tensor, mask: AttentionMask) -> list[State]:
        if mask.segment_ids is not None and mask.cu_seq_lens is None:
            raise ValueError(
                "position_ids restart: a StaticCache takes packed prompts with cu_seq_lens"
            )
        return self.states

    def end(self, mask: AttentionMask) -> None:
        grown, known = self._growth
        self.append = None  # its masks can be large
        self.lengths.add_(grown)
        if known is None:
            self._known.fill_(UNKNOWN)
        else:
            self._known.add_(known * (self._known != UNKNOWN))

    def _place(self, held: int, batch: int, tokens: int, cu_seq_lens: Tensor | None) -> None:
        """Any number of tokens behind the `held` ones of every row."""
        rows = len(self.lengths)
        if cu_seq_lens is None:
            self._check_batch(batch)
            cu_seq_lens = torch.arange(rows + 1, device="cpu") * tokens
        elif len(cu_seq_lens) != rows + 1:
            raise ValueError(
                f"cu_seq_lens has {len(cu_seq_lens) - 1} sequences, but the cache {rows} rows"
            )
        known = cu_seq_lens.diff()
        self._check_room(held + known)
        cu = cu_seq_lens.to(self.lengths.device, torch.int64, non_blocking=True)
        grown, at = cu.diff(), torch.arange(batch * tokens, device=cu.device)
        row = torch.bucketize(at, cu[1:], right=True)
        places = Places(row, held + at - cu[row], held + grown[row], cu)
        self.append = Append(held, places=places)
        self._growth = grown, known if on_host(known) else None

    def _check_mask(self, mask: Tensor, batch: int, tokens: int) -> None:
        """It may say, where the host sees it, that there is no padding."""
        whole = max(int(self._known.max()), 0) + tokens
        fits = mask.shape in ((batch, tokens), (batch, whole))
        if not (fits and on_host(mask) and mask.all()):
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} with a StaticCache: its rows hold no padding; "
                f"pack the prompts and give cu_seq_lens, or no mask or one of ones [{batch}, "
                f"{whole}] on the CPU"
            )

    def _check_batch(self, batch: int) -> None:
        if batch != len(self.lengths):
            raise ValueError(f"the cache holds {len(self.lengths)} rows, this batch has {batch}")

    def _check_room(self, lengths: Tensor) -> None:
        what = f"{int(lengths.max())} tokens" if on_host(lengths) else "the tokens"
        check(
            (lengths <= self.capacity).all(),
            f"{what} of a row do not fit into the cache's capacity={self.capacity}; give it more",
        )

    def _spell(self) -> str:
        """How many tokens are held, for errors."""
        known = sorted(set(self._known.tolist()))
        return "an unknown number of" if UNKNOWN in known else ", ".join(map(str, known))
