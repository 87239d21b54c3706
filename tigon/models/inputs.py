"""The inputs of a forward pass, checked and resolved: tokens, positions, sequences, padding, cache.

# B batch, T new tokens, S all tokens (cached ones first), C model dim, N real tokens
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, Unpack

import torch
from torch import Tensor

from tigon.kernels.attention.backends import HALF, PLAIN, Backend
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.runtime import check_values, host_can_read, on_host, runs_triton
from tigon.layers import Cache, ContextShard, KVCache
from tigon.layers.context import real_tokens
from tigon.models.arguments import BATCH, BatchArguments, Defaults, expand_kwargs_signature
from tigon.models.config import ModelConfig
from tigon.models.decoder import Decoder
from tigon.utils.config import check_keywords

BOUNDS = ("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")
TENSORS = (
    *("input_ids", "attention_mask", "position_ids", "inputs_embeds", "dropout_keys"),
    *("prefixes", *BOUNDS),
)


class BatchModel(Protocol):
    """The attributes of a model that `Batch.of` reads."""

    config: ModelConfig
    model: Decoder
    attention: Backend
    defaults: Defaults
    drop_padding: bool | None

    @property
    def causal(self) -> bool: ...

    @property
    def dynamic_rope(self) -> Any: ...


# No dataclass: in one, a user's fully_shard casts all float tensors, by torch's default policy
class Batch:
    """The inputs of a forward pass, checked and resolved by `Batch.of`.

    It can be made outside of the model's forward, since it runs no module.
    """

    def __init__(
        self,
        input_ids: Tensor | None,  # [B, T], or else
        inputs_embeds: Tensor | None,  # [B, T, C]; used in the dtype that they have
        position_ids: Tensor,  # [B or 1, T]
        segment_ids: Tensor | None,  # [B, T], over the whole batch; None: a row is a sequence
        mask: AttentionMask,
        cache: Cache | None,
        defaults: Defaults,  # of the model
        drop_padding: bool | None,  # as on the model, or False if it would change numbers
        dropout_keys: Tensor | None = None,  # int64 [B, T]
        # Context parallelism: T are one rank's tokens; the mask is that of whole rows
        shard: ContextShard | None = None,
    ):
        self.input_ids, self.inputs_embeds = input_ids, inputs_embeds
        self.position_ids, self.segment_ids = position_ids, segment_ids
        self.mask, self.cache = mask, cache
        self.dropout_keys, self.shard = dropout_keys, shard
        self.defaults, self.drops_padding = defaults, drop_padding
        self._append = None if cache is None else cache.append  # to detect passes in between

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and new tokens of each: (B, T)."""
        tokens = self.inputs_embeds if self.input_ids is None else self.input_ids
        assert tokens is not None
        return tokens.shape[0], tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the positions, and of the tokens."""
        return self.position_ids.device

    @property
    def real(self) -> Tensor | None:
        """Bool [B, T], False on padding; None if there is no padding."""
        return real_tokens(self.mask) if self.shard is None else self.shard.real

    def check_cache(self) -> None:
        """Raises ValueError if the cache has been used since this batch was made."""
        if self.cache is not None and self.cache.append is not self._append:
            raise ValueError(
                "past_key_values has been used since this batch was made: make each batch after "
                "the pass before it"
            )

    @classmethod
    @expand_kwargs_signature
    def of(
        cls, model: BatchModel, input_ids: Tensor | None = None, **kwargs: Unpack[BatchArguments]
    ) -> Self:
        """Resolves the arguments of `forward`, for `model(batch=...)`.

        A packed sequence begins at a bound of `cu_seq_lens`, or where `position_ids` do not
        increase. If a cache is to be filled, the host may wait for the device to find these.

        Sequences may share a prefix: `prefixes` has for each the range [first, end) of tokens in
        the flattened batch, earlier in the same row, that it attends to as if it began with them.
        `position_ids` are then needed and continue after the prefix. So several answers to a
        prompt are packed as [prompt, answer] followed by answers with the prompt as prefix.
        """
        check_keywords("Batch.of", kwargs, BATCH)
        for name, value in {"input_ids": input_ids, **kwargs}.items():
            if name in TENSORS and not isinstance(value, Tensor | None):
                raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
        inputs_embeds = kwargs.get("inputs_embeds")
        tokens = _check_tokens(input_ids, inputs_embeds, model.config)
        if inputs_embeds is not None and model.model.needs_ids:
            raise ValueError(
                f"inputs_embeds {tuple(tokens.shape)}: {type(model).__name__} needs the ids of "
                "tokens for the inputs of its layers; give input_ids"
            )
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache"):
            cache = KVCache()
        if cache is not None:
            _check_cache(cache, model)
        keys = _check_dropout_keys(kwargs.get("dropout_keys"), tokens)
        positions, segment_ids, mask = _resolve(model, tokens, cache, kwargs)
        drop = model.drop_padding
        if cache is not None or mask.key_mask is None or model.dynamic_rope is not None:
            drop = False  # padding counts in the length by which a dynamic RoPE is chosen
        inputs = input_ids, inputs_embeds, positions, segment_ids, mask, cache
        return cls(*inputs, model.defaults, drop, keys)

    def drop_padding(self, x: Tensor) -> tuple[Tensor, Tensor, AttentionMask, Tensor | None]:
        """x [B, T, C], positions and mask for the blocks, and the indices of the real tokens.

        If padding is dropped, the real tokens are one row [1, N], and the indices [N] are into the
        flattened batch. Otherwise nothing changes, and the indices are None. See
        `LanguageModel.drop_padding`.
        """
        unpadded = self.mask.drop_padding() if self._should_drop(x) else None
        if unpadded is None:
            return x, self.position_ids, self.mask, None
        indices, mask = unpadded
        position_ids = self.position_ids.expand(self.shape).flatten()[indices][None]
        return x.flatten(0, 1)[indices][None], position_ids, mask, indices

    def restore_padding(self, hidden: Tensor, real_token_indices: Tensor | None) -> Tensor:
        """Undoes `drop_padding`: hidden [1, N, C] becomes [B, T, C] with zeros at padding."""
        if real_token_indices is None:
            return hidden
        b, t = self.shape
        padded = hidden.new_zeros(b * t, hidden.shape[-1])
        return padded.index_copy(0, real_token_indices, hidden[0]).view(b, t, -1)

    def _should_drop(self, x: Tensor) -> bool:
        """Whether to drop padding: as the model says, or by default where it is faster."""
        if self.drops_padding is False or not host_can_read(x):
            return False
        if self.drops_padding:
            return True
        # A dense mask of one long row would be larger than one of the batch
        is_varlen = x.is_cuda and x.dtype in HALF and self.mask.backend not in PLAIN
        return is_varlen and runs_triton(x)


def _resolve(
    model: BatchModel, new: Tensor, cache: Cache | None, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, AttentionMask]:
    """Resolves positions [B or 1, T], segment ids [B, T] of packed sequences or None, and the
    attention mask; tells the cache that a pass begins."""
    batch, tokens, device = *new.shape[:2], new.device
    attention_mask = arguments.get("attention_mask")
    position_ids = arguments.get("position_ids")
    cu_seq_lens, bounds = merge_bounds(arguments, device), None
    if position_ids is not None:
        position_ids = _check_position_ids(position_ids, batch, tokens).to(device)
    longest = arguments.get("max_length_q")
    longest = arguments.get("max_length_k") if longest is None else longest
    if cu_seq_lens is not None:
        bounds, longest = check_bounds(cu_seq_lens, longest, batch * tokens, device)
    prefixes = check_prefixes(arguments.get("prefixes"), bounds, tokens)
    if prefixes is not None:
        _check_prefix_support(model, cache, position_ids)
    past = 0 if cache is None else cache.begin(batch, tokens, attention_mask, cu_seq_lens)
    if isinstance(past, Tensor):  # lengths on the device: the cache will mask
        if position_ids is None:
            position_ids = past[:, None] + torch.arange(tokens, device=device)
        return position_ids, None, AttentionMask(tokens, backend=model.attention)
    key_mask = _key_mask(attention_mask, batch, past + tokens, device)
    starts = None
    if past == 0:
        if bounds is not None:
            starts = mark_sequence_starts(bounds, batch, tokens)
            if key_mask is not None:
                check_padding(key_mask, starts)
        elif position_ids is not None and tokens > 1:
            starts = find_restarts(position_ids, key_mask, batch)
    if starts is not None and (cache is not None or on_host(starts)) and not starts[:, 1:].any():
        starts = bounds = None
    segment_ids = None if starts is None else starts.flatten().cumsum(0).view(batch, tokens) - 1
    if position_ids is None:
        position_ids = torch.arange(past, past + tokens, device=device)[None]
        if starts is not None:
            position_ids = position_ids - torch.where(starts, position_ids, 0).cummax(1).values
    elif cu_seq_lens is not None:
        check_positions(position_ids, segment_ids, key_mask)
    mask = AttentionMask(
        tokens,
        past=past,
        segment_ids=segment_ids,
        key_mask=key_mask,
        causal=model.causal,
        cu_seq_lens=bounds,
        longest=longest,
        prefixes=prefixes,
        backend=model.attention,
    )
    return position_ids, segment_ids, mask


def _check_tokens(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, config: ModelConfig
) -> Tensor:
    """`input_ids` or `inputs_embeds`; raises if both or neither are given, for a wrong shape, and
    for a token on the host that is outside of the vocabulary."""
    embedded = inputs_embeds is not None
    name, tokens = ("inputs_embeds", inputs_embeds) if embedded else ("input_ids", input_ids)
    sizes = (config.hidden_size,) if embedded else ()
    if tokens is None or (embedded and input_ids is not None):
        raise ValueError("give input_ids or inputs_embeds, one of them")
    if tokens.dim() != 2 + len(sizes) or tokens.shape[2:] != sizes:
        expected = ", ".join(("batch", "tokens", *map(str, sizes)))
        raise ValueError(f"{name} {tuple(tokens.shape)} is not [{expected}]")
    if not tokens.shape[0] or not tokens.shape[1]:
        raise ValueError(f"{name} {tuple(tokens.shape[:2])} has no tokens: give at least one")
    if not embedded and on_host(tokens):
        least, most = (int(i) for i in tokens.aminmax())
        if least < 0 or most >= config.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"input_ids has token {wrong}, outside of [0, {config.vocab_size})")
    return tokens


def _check_dropout_keys(keys: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Returns the keys on the tokens' device; ValueError unless int64 [B, T] or None."""
    shape = tokens.shape[:2]
    if keys is None:
        return None
    if keys.dtype != torch.int64 or keys.shape != shape:
        kind = f"{keys.dtype} {tuple(keys.shape)}"
        raise ValueError(f"dropout_keys {kind} are not int64 [batch, tokens] = {list(shape)}")
    return keys.to(tokens.device)


def _check_cache(cache: Cache, model: BatchModel) -> None:
    """Raises ValueError if the model cannot use a cache, or this one has other layers."""
    name, state_kinds = type(model).__name__, model.model.state_kinds
    if not model.causal:
        raise ValueError(
            f"{name} has bidirectional attention, so it can neither use a cache nor generate: a "
            "new token would change those before it"
        )
    if cache.layout and cache.layout != state_kinds:
        raise ValueError(
            f"past_key_values has {_describe_layers(cache.layout)}, but this {name} "
            f"{_describe_layers(state_kinds)}: give a cache of this model"
        )


def _describe_layers(state_kinds: Sequence[str]) -> str:
    """Describes layers in a message by runs of equal kinds, as "2 layers of a, 1 layers of b"."""
    runs = ((len(list(run)), kind) for kind, run in itertools.groupby(state_kinds))
    return ", ".join(f"{n} layers of {kind}" for n, kind in runs)


def _check_prefix_support(
    model: BatchModel, cache: Cache | None, position_ids: Tensor | None
) -> None:
    """Raises ValueError for a pass in which sequences cannot share a prefix."""
    if cache is not None or not model.causal or not model.model.shares_prefixes:
        name = type(model).__name__
        raise ValueError(
            f"prefixes need causal attention in all layers and no cache, and this {name} has "
            f"{'a cache' if cache is not None else 'other layers'}: repeat the tokens instead"
        )
    if position_ids is None:
        raise ValueError(
            "prefixes without position_ids: give positions that continue after each prefix"
        )


def _key_mask(mask: Tensor | None, batch: int, total: int, device: torch.device) -> Tensor | None:
    """`attention_mask` as bool [batch, total] on the device; None if there is none, or if it is on
    the host and masks no token."""
    if mask is None:
        return None
    if mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} is not [batch, cached + new tokens] = "
            f"[{batch}, {total}]"
        )
    # An additive mask, 0 and -inf, would be read the other way round
    if mask.is_floating_point():
        check_values(
            ((mask == 0) | (mask == 1)).all(),
            f"attention_mask is {mask.dtype} and has other values than 0 and 1: give 1 on tokens "
            "and 0 on padding",
        )
    if on_host(mask) and mask.all():
        return None
    return mask.to(device=device, dtype=torch.bool)


def _check_position_ids(position_ids: Tensor, batch: int, tokens: int) -> Tensor:
    """Returns positions as [B or 1, T], also from [T]; raises for others."""
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids is {position_ids.dtype}: positions are integers")
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    if position_ids.shape not in ((1, tokens), (batch, tokens)):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} is not [1 or {batch}, {tokens}]"
        )
    return position_ids


# Packed sequences: checks of their bounds, and where they begin


def merge_bounds(arguments: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """The `cu_seq_lens` of the arguments under any of its three names; raises if they differ."""
    bounds = [(name, arguments[name]) for name in BOUNDS if arguments.get(name) is not None]
    for (name, a), (other, b) in itertools.pairwise(bounds):
        if a is b:
            continue
        are_on_host = on_host(a) and on_host(b)
        values = f": {a.tolist()} and {b.tolist()}" if are_on_host else ""
        if not are_on_host:
            a, b = (x.to(device, non_blocking=True) for x in (a, b))
        message = f"{name} and {other} differ{values}: give the same bounds for queries and keys"
        if a.shape != b.shape:
            raise ValueError(message)
        check_values((a == b).all(), message)
    return bounds[0][1] if bounds else None


def check_bounds(
    cu_seq_lens: Tensor, longest: int | None, total: int, device: torch.device
) -> tuple[Tensor, int | None]:
    """Returns `cu_seq_lens` as int32 on the device, and the longest sequence's length if the host
    knows it; raises unless they rise from 0 to `total`, and for a sequence longer than
    `longest`."""
    if cu_seq_lens.dim() != 1 or cu_seq_lens.is_floating_point() or len(cu_seq_lens) < 2:
        raise ValueError(
            f"cu_seq_lens must be integers [sequences + 1], not {cu_seq_lens.dtype} "
            f"{tuple(cu_seq_lens.shape)}"
        )
    is_on_host = on_host(cu_seq_lens)
    values = f": {cu_seq_lens.tolist()}" if is_on_host else ""
    cu = cu_seq_lens.to(device=device, dtype=torch.int32, non_blocking=True)
    lengths = cu_seq_lens.diff() if is_on_host else cu.diff()
    check_values((lengths >= 0).all(), f"cu_seq_lens is not sorted{values}")
    check_values(
        (cu[0] == 0) & (cu[-1] == total),
        f"cu_seq_lens must run from 0 to {_format_size(total, 'N')}, the number of tokens{values}",
    )
    if longest is not None:
        value = f"max_length_q={_format_size(longest, 'n')}"
        check_values(
            lengths.max() <= longest,
            f"{value} is less than the longest sequence of cu_seq_lens{values}",
        )
    elif is_on_host:
        longest = int(lengths.max())
    return cu, longest


def _format_size(number: int, letter: str) -> str:
    """The number as text, or the letter in a compiled graph, which is for any number."""
    return letter if torch.compiler.is_compiling() else str(number)


def check_prefixes(prefixes: Tensor | None, cu: Tensor | None, tokens: int) -> Tensor | None:
    """Return `prefixes` as int64 [sequences, 2] on the host, or None if no sequence has a prefix;
    raises unless each lies in the row of its sequence and before it. `tokens`: of a row."""
    if prefixes is None:
        return None
    if prefixes.device.type == "cpu" and not on_host(prefixes):
        raise ValueError(
            "prefixes cannot be checked inside torch.compile: make the batch with Batch.of outside "
            "of it, and call model(batch=batch)"
        )
    count = None if cu is None else len(cu) - 1
    if cu is None or not on_host(prefixes) or prefixes.shape != (count, 2):
        raise ValueError(
            f"prefixes {tuple(prefixes.shape)} on {prefixes.device} must be [{count}, 2] on the "
            "CPU, for the sequences of cu_seq_lens, which are needed"
        )
    if prefixes.is_floating_point() or prefixes.dtype == torch.bool:
        raise TypeError(f"prefixes is {prefixes.dtype}: token indices are integers")
    ranges = prefixes.long()
    first, end = ranges.unbind(1)
    message = (
        "each of prefixes must be [first, end) of tokens in the row of its sequence and before it, "
        f"or (i, i): {ranges.tolist()}"
    )
    if (first > end).any():
        raise ValueError(message)
    if (first == end).all():
        return None
    first, end = (x.to(cu.device, non_blocking=True) for x in (first, end))
    starts = cu[:-1].long()
    fits = (end <= starts) & (first >= starts // tokens * tokens)
    check_values((fits | (first == end)).all(), message)
    return ranges


def mark_sequence_starts(cu: Tensor, batch: int, tokens: int) -> Tensor:
    """Bool [B, T], True where a sequence of `cu` begins; raises for one across two rows."""
    # Repeated ends (padding of cu_seq_lens itself) fall on the extra last slot
    starts = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long(), True)[:-1].view(batch, tokens)
    values = f": {cu.tolist()}" if on_host(cu) else ""
    rows = f"two rows of {_format_size(tokens, 'T')}{values}"
    check_values(starts[:, 0].all(), f"cu_seq_lens has a sequence that spans {rows}")
    return starts


def check_padding(key_mask: Tensor, starts: Tensor) -> None:
    """Raises ValueError for a sequence of `cu_seq_lens` that is padding only in part."""
    mixed = (key_mask[:, 1:] != key_mask[:, :-1]) & ~starts[:, 1:]
    position = _first_true(mixed)
    detail = "" if position is None else f": row {position[0]} changes at token {position[1] + 1}"
    check_values(
        ~mixed.any(),
        "attention_mask begins or ends padding inside a sequence of cu_seq_lens"
        f"{detail}; make padding a sequence of its own, or give one of the two",
    )


def check_positions(
    position_ids: Tensor,  # [B or 1, T]
    segment_ids: Tensor | None,  # [B, T], of cu_seq_lens
    key_mask: Tensor | None,  # [B, T]
) -> None:
    """Raises ValueError if positions of real tokens decrease in a sequence of `cu_seq_lens`."""
    restarts = position_ids[:, 1:] < position_ids[:, :-1]
    if segment_ids is not None:
        restarts = restarts & (segment_ids[:, 1:] == segment_ids[:, :-1])
    if key_mask is not None:
        restarts = restarts & key_mask[:, 1:]
    detail = ""
    if (position := _first_true(restarts)) is not None:
        row, column = position
        before, after = position_ids.expand(len(restarts), -1)[row, column : column + 2].tolist()
        detail = f": token {column + 1} of row {row} has position {after} after {before}"
    check_values(
        ~restarts.any(),
        f"position_ids restart inside a sequence of cu_seq_lens{detail}; give one of the two",
    )


def _first_true(x: Tensor) -> list[int] | None:
    """Row and column of the first True in x [B, T]; None if there is none or x is on a GPU."""
    return x.nonzero()[0].tolist() if on_host(x) and x.any() else None


def find_restarts(position_ids: Tensor, key_mask: Tensor | None, batch: int) -> Tensor:
    """Bool [B, T], True on each row's first token, and on real tokens whose position does not
    exceed that of the real token before."""
    position_ids = position_ids.expand(batch, -1)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    if key_mask is None:
        starts[:, 1:] = after <= before
    else:  # compare with the last real token: positions of padding have no meaning
        at = torch.arange(position_ids.shape[1], device=position_ids.device)
        last = torch.where(key_mask, at, -1).cummax(1).values[:, :-1]
        before = torch.where(last < 0, -1, before.gather(1, last.clamp(min=0)))
        starts[:, 1:] = (after <= before) & key_mask[:, 1:]
    return starts
