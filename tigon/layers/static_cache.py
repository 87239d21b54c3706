"""Keys and values in memory that is allocated once, so that a CUDA graph can decode.

# B rows, T new tokens of each, N new tokens of all, R slots, S tokens in all, H query heads,
# K kv heads, D head dim
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from tigon.kernels.append_attention import append_attention
from tigon.kernels.attention import AttentionMask, attention
from tigon.kernels.kv_buffers import KVBuffers, append_tokens
from tigon.layers._check import check, on_host

UNKNOWN = -1  # a length that only the device knows


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under `torch.autocast`; None outside of it."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class Places(NamedTuple):
    """Where new tokens of all rows go, each [N]."""

    rows: Tensor
    positions: Tensor
    ends: Tensor  # the length of the token's row after them


@dataclass
class Pass:
    """What one forward pass does; without places, `append_attention` does all of it."""

    grown: Tensor | int  # tokens that each row gains
    known: Tensor | int | None  # the same for the host, None where it cannot tell
    held: int = 0  # tokens before, where there are places
    places: Places | None = None
    masks: dict[int, AttentionMask] = field(default_factory=dict)  # by how many of them are seen


class StaticCache:
    """Room for `capacity` tokens in each of `rows` rows, which may differ in length.

    `shapes` are (kv heads, head dim, window or None) of every layer; one with a window keeps its
    last window + chunk - 1 tokens. An empty cache takes prompts: [rows, T], or packed [1, N] with
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
        shapes: Sequence[tuple[int, int, int | None]],
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        chunk: int = 16,
        quantize: Literal["int8"] | None = None,
    ):
        for name, value in (("rows", rows), ("capacity", capacity), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: a StaticCache needs at least 1")
        if quantize not in (None, "int8"):
            raise ValueError(f"quantize={quantize!r} is not None or 'int8'")
        self.capacity, self.chunk = capacity, chunk
        self.layers: list[KVBuffers] = []
        with torch.inference_mode(False):  # what is made inside of it cannot be used outside
            for heads, dim, window in shapes:
                slots = capacity if window is None else min(capacity, window + chunk - 1)
                self.layers.append(_allocate((rows, heads, slots, dim), dtype, device, quantize))
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
            self._known = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self._pass = Pass(0, 0)

    @property
    def length(self) -> int | None:
        """Tokens that every row holds; None if rows differ, or if only the device knows."""
        least, most = (int(n) for n in self._known.aminmax())
        return least if least == most != UNKNOWN else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, and kv heads and head dim of the first."""
        _, heads, _, dim = self.layers[0].keys.shape
        return len(self.layers), heads, dim

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and scales."""
        return sum(x.nbytes for buffers in self.layers for x in buffers if x is not None)

    def rows(self, start: int, stop: int) -> Self:
        """A cache over these rows that shares their memory: what it takes, this one holds."""
        if not 0 <= start < stop <= len(self.lengths):
            raise ValueError(f"rows({start}, {stop}) of a cache of {len(self.lengths)} rows")
        view = copy.copy(self)
        view.layers = [_each(buffers, lambda x: x[start:stop]) for buffers in self.layers]
        view.lengths, view._known = self.lengths[start:stop], self._known[start:stop]
        return view

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` [n], in that order, in new memory; the host waits."""
        if index.dim() != 1 or not len(index):
            raise ValueError(f"select {tuple(index.shape)}: give an index [n] of rows to keep")
        index = index.to(self.lengths.device)
        with torch.inference_mode(False):
            self.layers = [
                _each(buffers, lambda x: x.index_select(0, index)) for buffers in self.layers
            ]
            self.lengths = self.lengths.index_select(0, index)
            self._known = self.lengths.to("cpu", torch.int64)

    def expand(self, n: int) -> None:
        """Every row n times, one after the other, in new memory; the host waits."""
        self.select(torch.arange(len(self.lengths)).repeat_interleave(n))

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
        new = lengths.to(self.lengths.device, non_blocking=True)
        least = min(buffers.keys.shape[2] for buffers in self.layers)
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

    def refresh(self) -> None:
        """Tell the host what `lengths` are, after replays of a CUDA graph; it waits for them."""
        self._known.copy_(self.lengths)

    def begin(
        self,
        batch: int,
        tokens: int,
        *,
        attention_mask: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> int | Tensor:
        """Prepare for [batch, tokens] new tokens; how many the rows hold, int or [rows]."""
        if attention_mask is not None:
            self._check_mask(attention_mask, batch, tokens)
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
                self._pass = Pass(tokens, tokens)
                return self.lengths
            if held is None:
                raise ValueError(
                    f"{tokens} new tokens for rows that hold {self._spell()} tokens: more than "
                    f"chunk={self.chunk} go into rows of one known length, as rows(i, i + 1) has"
                )
        self._pass = self._place(held, batch, tokens, cu_seq_lens)
        return held

    def attend(
        self,
        layer: int,
        q: Tensor,  # [B, T, H, D], or [1, N, H, D]
        k: Tensor,  # [B, T, K, D]
        v: Tensor,  # [B, T, K, D]
        mask: AttentionMask,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store k and v; attention of q to them and to what is before them, as q."""
        if q.requires_grad or k.requires_grad or v.requires_grad:
            raise ValueError(
                "a StaticCache keeps no gradients: call the model inside torch.no_grad() or "
                "torch.inference_mode(), or give it a KVCache"
            )
        if mask.segment_ids is not None and mask.cu_seq_lens is None:
            raise ValueError(
                "position_ids restart: a StaticCache takes packed prompts with cu_seq_lens"
            )
        now, buffers = self._pass, self.layers[layer]
        dtype = autocast_dtype(q.device)
        if dtype is not None:
            # A scale may have made q wider than that; a cache from outside of autocast stays so
            dtype = buffers.keys.dtype if buffers.key_scales is None else dtype
            q, k, v = (x.to(dtype) for x in (q, k, v))
        if now.places is None:
            out = append_attention(
                q, k, v, buffers, self.lengths, window=window, softcap=softcap, scale=scale
            )
        else:
            keys, values = k, v
            seen = now.held if window is None else min(now.held, window - 1)
            if seen:
                earlier = _read(buffers, now.held - seen, now.held, k.dtype)
                keys, values = (torch.cat(x, 1) for x in zip(earlier, (k, v), strict=True))
            if seen < now.held:
                own = AttentionMask(mask.tokens, past=seen, backend=mask.backend)
                mask = now.masks.setdefault(seen, own)
            out = attention(q, keys, values, mask=mask, window=window, softcap=softcap, scale=scale)
            append_tokens(k.flatten(0, 1), v.flatten(0, 1), buffers, *now.places)
        if layer == len(self.layers) - 1:
            self._end()
        return out

    def _end(self) -> None:
        now, self._pass = self._pass, Pass(0, 0)  # masks can be large
        self.lengths.add_(now.grown)
        if now.known is None:
            self._known.fill_(UNKNOWN)
        else:
            self._known.add_(now.known * (self._known != UNKNOWN))

    def _place(self, held: int, batch: int, tokens: int, cu_seq_lens: Tensor | None) -> Pass:
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
        places = Places(row, held + at - cu[row], held + grown[row])
        return Pass(grown, known if on_host(known) else None, held, places)

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


def _allocate(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    quantize: str | None,
) -> KVBuffers:
    """Buffers [B, K, R, D]; what lies in slots without a token does not matter."""
    if quantize is None:
        return KVBuffers(*torch.empty(2, *shape, dtype=dtype, device=device))
    values = torch.empty(2, *shape, dtype=torch.int8, device=device)
    return KVBuffers(*values, *torch.empty(2, *shape[:3], dtype=torch.float32, device=device))


def _each(buffers: KVBuffers, do: Callable[[Tensor], Tensor]) -> KVBuffers:
    keys, values, *scales = buffers
    return KVBuffers(do(keys), do(values), *(x if x is None else do(x) for x in scales))


def _read(buffers: KVBuffers, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, K, D] of the positions from start to stop."""
    slots = torch.arange(start, stop, device=buffers.keys.device) % buffers.keys.shape[2]

    def read(x: Tensor, scales: Tensor | None) -> Tensor:
        x = x[:, :, slots]
        if scales is not None:
            x = x.float() * scales[:, :, slots, None]
        return x.to(dtype).transpose(1, 2)

    return read(buffers.keys, buffers.key_scales), read(buffers.values, buffers.value_scales)
