"""Masks of a batch, in the forms that attention backends take.

# B batch, T query tokens, N = B * T, S key tokens, n sequences, or blocks of tokens
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tigon.kernels.attention.backends import CUDNN_MAX_TOKENS, MIN_KERNEL_TOKENS
from tigon.kernels.attention.sequences import PrefixedKeys, PrefixVisibility, Sequences
from tigon.kernels.runtime import next_power_of_2

MAX_REAL_SHARE = 7 / 8  # share of real tokens in a batch up to which padding is dropped
BLOCK = 128  # tokens in a block of FlexAttention's masks: its own default
WORTH_SPLITTING = 2**20  # scores of a head that must be saved


class AttentionMask:
    """The keys that each query sees: causal, in its own sequence, and never padding.

    `tokens` T queries follow `past` cached ones. `segment_ids` [B, S] number the packed sequences
    in order; `key_mask` bool [B, S] is False on padding. Without `causal` attention is
    bidirectional. `cu_seq_lens` int32 [n + 1] are the bounds of the same sequences in the flattened
    batch, given with segment_ids; `longest` is at least the length of the longest sequence.
    `prefixes` int64 [n, 2], on the host, are ranges of the flattened batch, each in the row of its
    sequence and before it, which the sequence continues as if they were its first tokens; an empty
    range is no prefix. `backend` is "auto" or the name of one. One mask serves a whole forward pass
    and caches what layers derive from it.
    """

    def __init__(
        self,
        tokens: int,
        *,
        past: int = 0,
        segment_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
        causal: bool = True,
        cu_seq_lens: Tensor | None = None,
        longest: int | None = None,
        prefixes: Tensor | None = None,
        backend: str = "auto",
    ):
        if cu_seq_lens is not None and segment_ids is None:
            raise ValueError("cu_seq_lens without segment_ids: give both, or neither for rows")
        if prefixes is not None and (cu_seq_lens is None or past or not causal):
            raise ValueError("prefixes are of causal sequences with cu_seq_lens, without a cache")
        self.tokens = tokens
        self.past = past
        self.segment_ids = segment_ids
        self.key_mask = key_mask
        self.causal = causal
        self.after = 0  # keys behind those of the queries
        self.full_mask: Self | None = None  # where the queries are a part of rows: the mask of all
        self.cu_seq_lens = cu_seq_lens
        self.longest = longest
        self.prefixes = prefixes
        self.backend = backend
        self.plans: dict[Any, Any] = {}  # of attention(), per kind of layer
        self._derived: dict[Hashable, Any] = {}
        # On the host: cu, and which are real
        self._padding_runs: tuple[Tensor, Tensor] | None = None
        self._before: PrefixVisibility | None = None  # of padded rows

    def _once(self, key: Hashable, derive: Callable[[], Any]) -> Any:
        """Returns the result of `derive`, cached under `key`."""
        # Under torch.compile, a layer that is recomputed must not write to anything outside itself.
        # The compiler merges equal operations, though only in training graphs
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return derive()
        if key not in self._derived:
            self._derived[key] = derive()
        return self._derived[key]

    @property
    def keys(self) -> int:
        """S, the number of keys."""
        return self.past + self.tokens + self.after

    @property
    def rows(self) -> bool:
        """Whether each row is one sequence, without padding."""
        return self.segment_ids is None and self.key_mask is None

    def chunks(self, size: int, batch: int, device: torch.device, first: int = 0) -> Self:
        """Returns the mask whose queries see no keys but those of their own chunk: `size` real
        tokens, counted from the beginning of a sequence.

        `batch` and `device` are those of the keys, before which each row has `first` tokens more.
        """
        if self.rows and first % size + self.keys <= size:
            return self
        if self.prefixes is not None:
            raise ValueError(
                "attention in chunks does not know prefixes: repeat the tokens instead"
            )
        kind = "chunks", size, first
        return self._once(kind, lambda: self._in_chunks(size, batch, device, first))

    def _in_chunks(self, size: int, batch: int, device: torch.device, first: int) -> Self:
        """Builds the mask of `chunks`: each chunk is a sequence."""
        options: dict[str, Any] = {"past": self.past, "key_mask": self.key_mask}
        segments, bounds, longest = self.segment_ids, self.cu_seq_lens, self.longest
        # Between bounds that the caller gave tokens are all real or all padding
        real = self.key_mask if bounds is None else None
        if segments is None:
            segments = torch.zeros(batch, self.keys, dtype=torch.int64, device=device)
            bounds, longest = torch.arange(batch + 1, device=device) * self.keys, self.keys
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        before = torch.ones_like(segments) if real is None else real.long()
        before = before.cumsum(1) - before  # real tokens of the row
        index = first + before - before.where(begins, 0).cummax(1).values
        chunk = index // size
        begins[:, 1:] |= chunk[:, 1:] != chunk[:, :-1]
        options["segment_ids"] = begins.long().cumsum(1)
        if bounds is not None and longest is not None and real is None and not self.past:
            # As many chunks of each sequence as of the longest: some are empty
            parts = torch.arange(0, longest, size, device=device)
            starts = (bounds[:-1, None] + parts).minimum(bounds[1:, None]).flatten()
            options["cu_seq_lens"] = torch.cat((starts, bounds[-1:])).int()
            options["longest"] = min(longest, size)
        return self._like(self.tokens, **options)

    def slice_queries(self, first: int, end: int) -> Self:
        """Returns the mask of queries [first, end) and the S keys they see; without a cache."""
        keys = end if self.causal else self.tokens
        segments, real = (
            None if x is None else x[:, :keys] for x in (self.segment_ids, self.key_mask)
        )
        part = self._like(end - first, past=first, segment_ids=segments, key_mask=real)
        part.after, part.full_mask, part.prefixes = keys - end, self, self.prefixes
        # Kept is what is derived from a part, and no part: that would be a cycle with `full_mask`
        part.plans, part._derived = self._once(("part", first, end), lambda: ({}, {}))
        return part

    def _like(self, tokens: int, **options: Any) -> Self:
        """Returns a mask with other tokens and the same options."""
        return type(self)(tokens, causal=self.causal, backend=self.backend, **options)

    def sequences(self) -> Sequences | str:
        """Returns the sequences of the flattened batch, or the reason why they are not known.

        Padding at either end of a sequence counts as a separate sequence. If the caller gave no
        bounds, the host waits for the device, once; during a CUDA graph capture it raises
        ValueError instead.
        """
        return self._once("sequences", self._find_sequences)

    def _find_sequences(self) -> Sequences | str:
        """Returns the batch's sequences as a flattened batch, or the reason why it has none."""
        if self.full_mask is not None:
            return self._sequences_of_part(self.full_mask)
        if self.past:
            return "the cache holds padding"
        if self.cu_seq_lens is not None and self.longest is not None:
            return self._from_bounds(self.cu_seq_lens, self.longest)
        if torch.compiler.is_compiling():
            return "torch.compile cannot look at their lengths: give cu_seq_lens and max_length_q"
        device = (self.segment_ids if self.key_mask is None else self.key_mask).device  # type: ignore[union-attr]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The backend that needs no lengths would compile now, which a capture forbids
            raise ValueError(
                "a CUDA graph is being captured, and the host does not know how long the "
                "sequences are: give cu_seq_lens and max_length_q"
            )
        if self.cu_seq_lens is not None:
            return self._from_bounds(self.cu_seq_lens, int(self.cu_seq_lens.diff().max()))
        return self._find_padding(device)

    def _sequences_of_part(self, full_mask: Self) -> Sequences | str:
        """Returns queries and keys of each sequence; kernels want keys to end with the last query.

        Some sequences have no queries here.
        """
        full = full_mask.sequences()
        if isinstance(full, str):
            return full
        row, token = full.cu // full_mask.tokens, full.cu % full_mask.tokens
        queries = row * self.tokens + (token - self.past).clamp(0, self.tokens)
        keys = self._clip_bounds(full.cu, full_mask.tokens)
        longest = min(full.longest, self.keys)
        key_sequences = PrefixedKeys(keys, longest)
        if self.prefixes is not None and self.segment_ids is not None:
            prefixes = self._clip_bounds(self.prefixes, full_mask.tokens)
            key_sequences = PrefixedKeys.build(prefixes, keys, longest, self.segment_ids.numel())
        return Sequences(queries, min(full.longest, self.tokens), key_sequences)

    def _clip_bounds(self, bounds: Tensor, tokens: int) -> Tensor:
        """Clips bounds of runs in flattened rows of `tokens` tokens to the rows' first S."""
        return bounds // tokens * self.keys + (bounds % tokens).clamp(max=self.keys)

    def _from_bounds(self, cu: Tensor, longest: int) -> Sequences:
        """Returns the sequences that `cu` bounds, with their prefixes' keys if they have any."""
        keys = None
        if self.prefixes is not None and self.segment_ids is not None:
            keys = PrefixedKeys.build(self.prefixes, cu, longest, self.segment_ids.numel())
        return Sequences(cu, longest, keys)

    @property
    def before(self) -> PrefixVisibility | None:
        """The ranges of tokens that sequences see as their prefix; None without prefixes."""
        if self.full_mask is not None:
            full = self.full_mask.before
            return None if full is None else full.slice_queries(self.past, self.past + self.tokens)
        if self.prefixes is None or self.cu_seq_lens is None or self.segment_ids is None:
            return self._before
        prefixes, cu, shape = self.prefixes, self.cu_seq_lens, self.segment_ids.shape
        return self._once("before", lambda: PrefixVisibility.build(prefixes, cu, *shape))

    def _find_padding(self, device: torch.device) -> Sequences | str:
        """Returns the real tokens of padded rows as sequences, or the reason why they are none."""
        code = torch.zeros((), dtype=torch.uint8, device=device)
        if self.segment_ids is not None:
            first = torch.ones_like(self.segment_ids, dtype=torch.bool)
            first[:, 1:] = self.segment_ids[:, 1:] != self.segment_ids[:, :-1]
            code = code + first
        if self.key_mask is not None:
            code = code + 2 * self.key_mask.to(torch.uint8)
        code = code.cpu()  # [B, T]; one copy to the host for both
        real, begins = code >= 2, (code % 2).bool()
        begins[:, 0] = True
        sequence = begins.flatten().cumsum(0)
        if self.key_mask is not None:
            begins[:, 1:] |= real[:, 1:] != real[:, :-1]
            runs = sequence[(begins & real).flatten()]
            if len(runs) != len(runs.unique()):
                return "there is padding inside a sequence"
        cu = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel()).int()
        self._padding_runs = cu, real.flatten()[cu[:-1].long()]
        longest = int(cu.diff().max())
        return Sequences(cu.to(device, non_blocking=True), longest)

    def drop_padding(self) -> tuple[Tensor, Self] | None:
        """Returns the indices [N] of real tokens in the flattened batch, and their mask as one row.

        Returns None if there is too little padding, if some is inside a sequence, or if the caller
        gave bounds, which make sequences of padding.
        """
        if self.key_mask is None or self.past or self.cu_seq_lens is not None:
            return None
        self.sequences()
        if self._padding_runs is None or not self._padding_runs[1].any():
            return None
        cu, real = self._padding_runs
        lengths, device = cu.diff(), self.key_mask.device
        real_lengths = lengths[real]
        if real_lengths.sum() > MAX_REAL_SHARE * cu[-1]:
            return None
        index = real.repeat_interleave(lengths).nonzero()[:, 0]
        places = torch.arange(len(real_lengths), device="cpu")
        segments = places.repeat_interleave(real_lengths)[None]
        cu = F.pad(real_lengths.cumsum(0), (1, 0)).int().to(device)
        longest = int(real_lengths.max())
        bounds: dict[str, Any] = {"cu_seq_lens": cu, "longest": longest}
        mask = self._like(len(index), segment_ids=segments.to(device), **bounds)
        return index.to(device), mask

    def even(self, longest: int) -> Self:
        """Returns the mask of the same batch as rows of `longest` tokens, each a sequence."""
        return self._once("even", lambda: self._like(longest))

    def pad(self, tokens: int, keys: int, batch: int, device: torch.device) -> Self:
        """Returns the mask padded on the right; what padded queries see is undefined."""
        return self._once("padded", lambda: self._pad(tokens, keys, batch, device))

    def _pad(self, tokens: int, keys: int, batch: int, device: torch.device) -> Self:
        """Returns the mask with room for more tokens and keys, which nothing sees."""
        segments, real, more = self.segment_ids, self.key_mask, keys - self.keys
        if segments is not None:  # one more sequence, in each row the last
            segments = torch.cat([segments, (segments[:, -1:] + 1).expand(-1, more)], 1)
        elif real is None and not self.causal:  # causal attention never sees it
            real = torch.ones(batch, self.keys, dtype=torch.bool, device=device)
        if real is not None:
            real = F.pad(real, (0, more))
        mask = self._like(tokens, past=self.past, segment_ids=segments, key_mask=real)
        mask.after = keys - self.past - tokens
        mask._before = None if self.before is None else self.before.pad(tokens - self.tokens)
        return mask

    def needs_dense(self, window: int | None) -> bool:
        """Whether `is_causal` alone does not describe the mask."""
        windowed = window is not None and window < self.keys
        return windowed or not self.rows or (self.past > 0 and self.tokens > 1)

    def split_sequences(self, batch: int) -> list[Self]:
        """Returns a mask for each packed sequence of a flattened batch, if one by one they have so
        many fewer scores than rows that it pays; else none. The host reads the bounds."""
        cu, more = self.cu_seq_lens, self.past or self.full_mask is not None
        if cu is None or more or self.key_mask is not None or self.prefixes is not None:
            return []

        def split() -> list[Self]:
            lengths = [n for n in cu.diff().tolist() if n]
            saved = batch * self.tokens**2 - sum(n**2 for n in lengths)
            whole = sum(lengths) == batch * self.tokens
            return [self._like(n) for n in lengths] if whole and saved >= WORTH_SPLITTING else []

        return self._once("split", split)

    def dense(self, window: int | None, device: torch.device) -> Tensor:
        """Returns bool [B or 1, 1, T, S], True where a query attends to a key."""
        return self._once(("dense", window), lambda: self._build(window, device))

    def bias(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns `dense` as an additive mask: 0 or -inf, [B or 1, 1, T, S]."""

        # Given a bool mask, SDPA makes this in every layer and saves each for the backward pass
        def spell() -> Tensor:
            seen = self._build(window, device)  # not kept: it would be half as much again
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))

        return self._once(("bias", window, dtype), spell)

    def _build(self, window: int | None, device: torch.device) -> Tensor:
        """Builds the dense mask, bool [B or 1, 1, T, S]."""
        query = torch.arange(self.past, self.past + self.tokens, device=device)[:, None]
        key = torch.arange(self.keys, device=device)[None, :]
        seen = key <= query if self.causal else torch.ones_like(key <= query)  # [T, S]
        if window is not None:
            seen = seen & ((query - key).abs() < window)
        seen = seen[None]
        if self.segment_ids is not None:
            query_segments = self.segment_ids[:, self.past : self.past + self.tokens]
            seen = seen & (query_segments[:, :, None] == self.segment_ids[:, None, :])
        if self.before is not None:
            seen = seen | self.before.visible((..., None), query, key, window)
        if self.key_mask is not None:
            # A padded query sees itself: a row without any key would be NaN
            seen = seen & self.key_mask[:, None, :] | (key == query)[None]
        return seen[:, None]

    def blocks(self, window: int | None, device: torch.device) -> BlockMask:
        """Returns the mask for FlexAttention: [T / 128, S / 128] blocks and a mask_mod."""
        return self._once(("blocks", window), lambda: self._build_blocks(window, device))

    def _build_blocks(self, window: int | None, device: torch.device) -> BlockMask:
        """Builds FlexAttention's block mask from the bounds of sequences, without a dense mask."""
        past, causal, segments, real = self.past, self.causal, self.segment_ids, self.key_mask
        # A number would be compiled into the kernel
        offset, before = torch.full((), past, device=device) if past else None, self.before

        def visible(b: Tensor, h: Tensor, index: Tensor, key: Tensor) -> Tensor:
            query = index if offset is None else index + offset
            seen = key <= query if causal else key == key
            if window is not None:
                seen = seen & (query - key < window) & (key - query < window)
            if segments is not None:
                seen = seen & (segments[b, query] == segments[b, key])
            if before is not None:
                seen = seen | before.visible((b, index), query, key, window)
            if real is not None:
                seen = seen & real[b, key] | (key == query)
            return seen

        def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
            """Counts the key blocks that each query block reads, and orders these first."""
            order = blocks.int().argsort(dim=-1, descending=True, stable=True)
            return blocks.sum(-1).int()[:, None], order.int()[:, None]

        any_visible, all_visible = self._visible_blocks(window, device)
        return BlockMask.from_kv_blocks(
            *listed(any_visible & ~all_visible),
            *listed(all_visible),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(self.tokens, self.keys),
        )

    def _visible_blocks(self, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns bool [B or 1, n, m] twice: whether any pair of a block of queries and one of keys
        may be visible, and whether all pairs are."""
        # create_block_mask would go through a dense [T, S]. Segments are numbered in order, so a
        # block's first and last tokens tell what is in it.
        past, segments = self.past, self.segment_ids
        (q0, q1, q_full), (k0, k1, k_full) = (
            _block_bounds(*span, device) for span in ((past, past + self.tokens), (0, self.keys))
        )
        q0, q1 = q0[:, None], q1[:, None]
        any_visible = (k0 <= q1) if self.causal else torch.ones_like(k0 <= q1)
        all_visible = (k1 <= q0) if self.causal else any_visible
        all_visible = all_visible & q_full[:, None] & k_full
        if window is not None:
            any_visible = any_visible & (q0 - k1 < window) & (k0 - q1 < window)
            all_visible = all_visible & (q1 - k0 < window) & (k1 - q0 < window)
        any_visible, all_visible = any_visible[None], all_visible[None]
        if segments is not None:
            s0, s1, r0, r1 = (segments[:, at] for at in (q0, q1, k0, k1))  # [B, n, 1] and [B, n]
            any_visible = any_visible & (s0 <= r1[:, None]) & (r0[:, None] <= s1)
            all_visible = all_visible & (s0 == r1[:, None]) & (r0[:, None] == s1)
        if self.before is not None:
            any_visible = any_visible | self.before.blocks(q0, k0, BLOCK, window)
        if self.key_mask is not None:
            padded = F.pad(self.key_mask, (0, -self.keys % BLOCK)).unflatten(1, (-1, BLOCK))
            any_visible = any_visible & padded.any(-1)[:, None] | (k0 <= q1) & (q0 <= k1)
            all_visible = all_visible & padded.all(-1)[:, None]
        return any_visible, all_visible


def _block_bounds(first: int, end: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the first and last token of each block of [first, end), and whether it is full."""
    begins = torch.arange(first, end, BLOCK, device=device)
    return begins, (begins + BLOCK - 1).clamp(max=end - 1), begins + BLOCK <= end


# cu_seqlens in few sizes, for CUDA graphs

MIN_SEQUENCES = 8  # sequences that there is room for


def pad_cu_seqlens(mask: AttentionMask, total: int, windows: Iterable[int]) -> AttentionMask:
    """Pads the bounds to one of few sizes, for CUDA graphs, whose sizes cannot change.

    `total` tokens in all. Empty sequences are appended, and `longest` is rounded up, but never past
    a length that decides on a backend or on a window of `windows`: attention has the same bits.
    Sequences of one length, which are computed as rows, stay as they are.
    """
    cu, longest = mask.cu_seq_lens, mask.longest
    if cu is None or longest is None or (len(cu) - 1) * longest == total:
        return mask
    padding_count = padded_count(len(cu) - 1) + 1 - len(cu)
    return mask._like(
        mask.tokens,
        segment_ids=mask.segment_ids,
        key_mask=mask.key_mask,
        cu_seq_lens=torch.cat([cu, cu.new_full((padding_count,), total)]) if padding_count else cu,
        longest=round_max_seqlen(longest, mask.tokens, windows),
    )


def padded_count(sequences: int) -> int:
    """Returns the number of sequences after padding, a power of two unless deterministic."""
    # FlashAttention-2 divides the sum of dQ by their number where it is to be deterministic
    if torch.are_deterministic_algorithms_enabled():
        return sequences
    return next_power_of_2(max(sequences, MIN_SEQUENCES))


def round_max_seqlen(longest: int, tokens: int, windows: Iterable[int]) -> int:
    """Rounds up to a power of two, but not past `tokens` or a change of backend or window."""
    edges = (MIN_KERNEL_TOKENS - 1, CUDNN_MAX_TOKENS, tokens, *windows)
    return min(
        next_power_of_2(max(longest, MIN_KERNEL_TOKENS)),
        *(edge for edge in edges if edge >= longest),
    )
