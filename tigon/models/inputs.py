"""Packed sequences: their bounds and restarting positions, held against each other.

# B batch, T tokens
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, Unpack

import torch
from torch import Tensor

from tigon.kernels.attention.api import AttentionMask, Backend
from tigon.kernels.attention.backends import HALF, PLAIN
from tigon.kernels.runtime import check_values, on_host, runs_triton
from tigon.layers import Cache, KVCache
from tigon.layers.context import real_tokens
from tigon.models.arguments import BATCH, BatchArguments, Defaults, check_keywords, spelled_out
from tigon.models.config import Config
from tigon.models.decoder import Decoder

BOUNDS = ("cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")


def same_bounds(arguments: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """What is given of `cu_seq_lens` and its two other names; ValueError where they differ."""
    given = [(name, arguments[name]) for name in BOUNDS if arguments.get(name) is not None]
    for (name, a), (other, b) in itertools.pairwise(given):
        if a is b:
            continue
        values = ""
        if on_host(a) and on_host(b):
            values = f": {a.tolist()} and {b.tolist()}"
        else:
            a, b = (x.to(device, non_blocking=True) for x in (a, b))
        message = f"{name} and {other} differ{values}; queries and keys have the same bounds here"
        if a.shape != b.shape:
            raise ValueError(message)
        check_values((a == b).all(), message)
    return given[0][1] if given else None


def check_bounds(
    cu_seq_lens: Tensor, longest: int | None, total: int, device: torch.device
) -> tuple[Tensor, int | None]:
    """`cu_seq_lens` as int32 on the device, and the longest sequence if knowing it is free."""
    if cu_seq_lens.dim() != 1 or cu_seq_lens.is_floating_point() or len(cu_seq_lens) < 2:
        raise ValueError(
            f"cu_seq_lens must be integers [sequences + 1], not {cu_seq_lens.dtype} "
            f"{tuple(cu_seq_lens.shape)}"
        )
    given = on_host(cu_seq_lens)
    values = f": {cu_seq_lens.tolist()}" if given else ""
    cu = cu_seq_lens.to(device=device, dtype=torch.int32, non_blocking=True)
    lengths = cu_seq_lens.diff() if given else cu.diff()
    check_values((lengths >= 0).all(), f"cu_seq_lens is not sorted{values}")
    check_values(
        (cu[0] == 0) & (cu[-1] == total),
        f"cu_seq_lens must run from 0 to {_told(total, 'N')}, the number of tokens{values}",
    )
    if longest is not None:
        said = f"max_length_q={_told(longest, 'n')}"
        check_values(
            lengths.max() <= longest,
            f"{said} is less than the longest sequence of cu_seq_lens{values}",
        )
    elif given:
        longest = int(lengths.max())
    return cu, longest


def _told(number: int, letter: str) -> str:
    """A number for a message; a letter for it in a compiled graph, which serves any."""
    return letter if torch.compiler.is_compiling() else str(number)


def check_prefixes(prefixes: Tensor | None, cu: Tensor | None, tokens: int) -> Tensor | None:
    """`prefixes` as int64 [n, 2] on the host; None where no sequence has one."""
    if prefixes is None:
        return None
    if prefixes.device.type == "cpu" and not on_host(prefixes):
        raise ValueError(
            "prefixes inside torch.compile, where nobody can look at them: make the batch with "
            "Batch.of outside of it, and give model(batch=batch)"
        )
    count = None if cu is None else len(cu) - 1
    if cu is None or not on_host(prefixes) or prefixes.shape != (count, 2):
        raise ValueError(
            f"prefixes {tuple(prefixes.shape)} on {prefixes.device} must be [{count}, 2] on the "
            "CPU, for the sequences of cu_seq_lens, which are needed"
        )
    if prefixes.is_floating_point() or prefixes.dtype == torch.bool:
        raise TypeError(f"prefixes is {prefixes.dtype}: places of tokens are integers")
    given = prefixes.long()
    first, end = given.unbind(1)
    message = (
        "each of prefixes must be [first, end) of tokens in the row of its sequence and before it, "
        f"or (i, i): {given.tolist()}"
    )
    if (first > end).any():
        raise ValueError(message)
    if (first == end).all():
        return None
    first, end = (x.to(cu.device, non_blocking=True) for x in (first, end))
    own = cu[:-1].long()
    fits = (end <= own) & (first >= own // tokens * tokens)
    check_values((fits | (first == end)).all(), message)
    return given


def starts_of(cu: Tensor, batch: int, tokens: int) -> Tensor:
    """First tokens of the sequences that `cu` bounds in the flattened batch: [B, T]."""
    # Repeated ends (padding of cu_seq_lens itself) fall on the extra last slot
    starts = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=cu.device)
    starts = starts.index_fill(0, cu.long(), True)[:-1].view(batch, tokens)
    values = f": {cu.tolist()}" if on_host(cu) else ""
    rows = f"two rows of {_told(tokens, 'T')}{values}"
    check_values(starts[:, 0].all(), f"cu_seq_lens has a sequence that spans {rows}")
    return starts


def check_padding(key_mask: Tensor, starts: Tensor) -> None:
    """Each sequence of `cu_seq_lens` is all padding or all real: otherwise which would hold?"""
    torn = (key_mask[:, 1:] != key_mask[:, :-1]) & ~starts[:, 1:]
    where = ""
    if on_host(torn) and torn.any():
        row, column = torn.nonzero()[0].tolist()
        where = f": row {row} changes at token {column + 1}"
    check_values(
        ~torn.any(),
        "attention_mask begins or ends padding inside a sequence of cu_seq_lens"
        f"{where}; make padding a sequence of its own, or give one of the two",
    )


def check_positions(
    position_ids: Tensor,  # [B or 1, T]
    segment_ids: Tensor | None,  # [B, T], of cu_seq_lens
    key_mask: Tensor | None,  # [B, T]
) -> None:
    """Positions never fall inside each sequence of `cu_seq_lens`, except on padding."""
    restarts = position_ids[:, 1:] < position_ids[:, :-1]
    if segment_ids is not None:
        restarts = restarts & (segment_ids[:, 1:] == segment_ids[:, :-1])
    if key_mask is not None:
        restarts = restarts & key_mask[:, 1:]
    where = ""
    if on_host(restarts) and restarts.any():
        row, column = restarts.nonzero()[0].tolist()
        before, after = position_ids.expand(len(restarts), -1)[row, column : column + 2].tolist()
        where = f": token {column + 1} of row {row} has position {after} after {before}"
    check_values(
        ~restarts.any(),
        f"position_ids restart inside a sequence of cu_seq_lens{where}; give one of the two",
    )


def restarts(position_ids: Tensor, key_mask: Tensor | None, batch: int) -> Tensor:
    """True on the first token of every row and wherever the position does not increase."""
    position_ids = position_ids.expand(batch, -1)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    if key_mask is None:
        starts[:, 1:] = after <= before
    else:  # positions of padding mean nothing: the last real token counts
        at = torch.arange(position_ids.shape[1], device=position_ids.device)
        last = torch.where(key_mask, at, -1).cummax(1).values[:, :-1]
        before = torch.where(last < 0, -1, before.gather(1, last.clamp(min=0)))
        starts[:, 1:] = (after <= before) & key_mask[:, 1:]
    return starts


# What a forward pass reads: tokens or embeddings, positions, sequences, padding and cache.
#
# B batch, T new tokens, S all tokens (cached ones first), C model dim, N real tokens

TENSORS = (
    *("input_ids", "attention_mask", "position_ids", "inputs_embeds", "dropout_keys"),
    *("prefixes", *BOUNDS),
)


class Model(Protocol):
    """What a batch has to know of its model."""

    config: Config
    model: Decoder
    attention: Backend
    defaults: Defaults
    drop_padding: bool | None

    @property
    def causal(self) -> bool: ...

    @property
    def turning_rope(self) -> Any: ...


# No dataclass: FSDP's mixed precision would rebuild it with every float tensor in 16 bits
class Batch:
    """What a forward pass reads, checked and resolved; made by `Batch.of`.

    It can be made outside of the model's forward, since it runs none of its modules.
    """

    def __init__(
        self,
        input_ids: Tensor | None,  # [B, T], or else
        inputs_embeds: Tensor | None,  # [B, T, C]; used in the dtype that they have
        position_ids: Tensor,  # [B or 1, T]
        segment_ids: Tensor | None,  # [B, T], over the whole batch; None: a row is a sequence
        mask: AttentionMask,
        cache: Cache | None,
        defaults: Defaults,  # of the model, for what is asked of this batch
        drop_padding: bool | None,  # as on the model, or False where it would change numbers
        dropout_keys: Tensor | None = None,  # int64 [B, T]
    ):
        self.input_ids, self.inputs_embeds = input_ids, inputs_embeds
        self.position_ids, self.segment_ids = position_ids, segment_ids
        self.mask, self.cache = mask, cache
        self.dropout_keys = dropout_keys
        self.defaults = defaults
        self._drop = drop_padding
        self._append = None if cache is None else cache.append  # what the cache was asked for

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and new tokens of each: (B, T)."""
        given = self.inputs_embeds if self.input_ids is None else self.input_ids
        assert given is not None
        return given.shape[0], given.shape[1]

    @property
    def device(self) -> torch.device:
        return self.position_ids.device

    @property
    def real(self) -> Tensor | None:
        """Bool [B, T], False on padding; None where the host knows of no padding."""
        return real_tokens(self.mask)

    def check_cache(self) -> None:
        """The cache has taken no tokens, and promised no place, since this batch was made."""
        if self.cache is not None and self.cache.append is not self._append:
            raise ValueError(
                "this batch was made for past_key_values as they were before another pass or "
                "batch: make a batch for each pass, after the pass before"
            )

    @classmethod
    @spelled_out
    def of(
        cls, model: Model, input_ids: Tensor | None = None, **given: Unpack[BatchArguments]
    ) -> Self:
        """Resolve what `forward` is given, for `model(batch=...)`.

        Boundaries of packed sequences come from `cu_seq_lens`, or from `position_ids` that do not
        increase. With a cache to fill, the host may wait for the device to learn whether there
        are any.

        A sequence may go on from tokens of another one: `prefixes` has their places [first, end)
        in the flattened batch, in its row and before it. Its tokens see them as if they were its
        own first ones, and `position_ids`, which are needed, go on behind them: several answers
        to a prompt are [prompt, answer] and answers that go on from the prompt.
        """
        check_keywords("Batch.of", given, BATCH)
        _check_tensors({"input_ids": input_ids, **given})
        inputs_embeds = given.get("inputs_embeds")
        tokens = _tokens(input_ids, inputs_embeds, model.config)
        cache = given.get("past_key_values")
        if cache is None and given.get("use_cache"):
            cache = KVCache()
        if cache is not None:
            _check_cache(cache, model)
        keys = _check_keys(given.get("dropout_keys"), tokens)
        positions, segment_ids, mask = _resolve(model, tokens, cache, given)
        drop = model.drop_padding
        if cache is not None or mask.key_mask is None or model.turning_rope is not None:
            drop = False  # a RoPE that turns does so with the longest row, padding included
        own = input_ids, inputs_embeds, positions, segment_ids, mask, cache
        return cls(*own, model.defaults, drop, keys)

    def without_padding(self, x: Tensor) -> tuple[Tensor, Tensor, AttentionMask, Tensor | None]:
        """x [B, T, C], positions and mask for the blocks, with padding dropped or as they are.

        Where it is dropped, they are of the real tokens as one row [1, N], and the last result has
        their places [N] in the flattened batch; else that is None. See
        `LanguageModel.drop_padding`.
        """
        real = self.mask.drop_padding() if self._drops(x) else None
        if real is None:
            return x, self.position_ids, self.mask, None
        places, mask = real
        position_ids = self.position_ids.expand(self.shape).flatten()[places][None]
        return x.flatten(0, 1)[places][None], position_ids, mask, places

    def with_padding(self, hidden: Tensor, places: Tensor | None) -> Tensor:
        """Undo `without_padding`: hidden [1, N, C] goes to its places in [B, T, C]."""
        if places is None:
            return hidden
        b, t = self.shape
        padded = hidden.new_zeros(b * t, hidden.shape[-1]).index_copy(0, places, hidden[0])
        return padded.view(b, t, -1)

    def _drops(self, x: Tensor) -> bool:
        if self._drop is False or torch.compiler.is_compiling():
            return False
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if self._drop:
            return True
        # A dense mask of one long row would be larger than one of the batch
        by_bounds = x.is_cuda and x.dtype in HALF and self.mask.backend not in PLAIN
        return by_bounds and runs_triton(x)


def _check_tensors(given: Mapping[str, Any]) -> None:
    for name in TENSORS:
        value = given.get(name)
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, config: Config) -> Tensor:
    """What is given of the two; raises unless it is one of them and well formed."""
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
    if input_ids is not None:
        _check_ids(input_ids, config.vocab_size)
    return tokens


def _check_ids(input_ids: Tensor, vocab: int) -> None:
    """Tokens on the host are below `vocab`; for those on a GPU nobody waits."""
    if not on_host(input_ids):
        return
    least, most = (int(i) for i in input_ids.aminmax())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise ValueError(f"input_ids has token {wrong}, outside of [0, {vocab})")


def _check_keys(keys: Tensor | None, tokens: Tensor) -> Tensor | None:
    shape = tokens.shape[:2]
    if keys is not None and (keys.dtype != torch.int64 or keys.shape != shape):
        raise ValueError(
            f"dropout_keys {keys.dtype} {tuple(keys.shape)} are not int64 [batch, tokens] = "
            f"{list(shape)}"
        )
    return None if keys is None else keys.to(tokens.device)


def _check_cache(cache: Cache, model: Model) -> None:
    """Raises unless the model can use a cache, and this one fits its layers."""
    name, layout = type(model).__name__, model.model.layout
    if not model.causal:
        raise ValueError(
            f"{name} with attention to both sides can neither use a cache nor "
            "generate: each new token would change the ones before it"
        )
    if cache.layout and cache.layout != layout:
        raise ValueError(
            f"past_key_values has {_layers(cache.layout)}, but this {name} {_layers(layout)}: "
            "give a cache of this model"
        )


def _layers(holds: Sequence[str]) -> str:
    runs = ((len(list(run)), held) for held, run in itertools.groupby(holds))
    return ", ".join(f"{n} layers of {held}" for n, held in runs)


def _resolve(
    model: Model, new: Tensor, cache: Cache | None, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, AttentionMask]:
    """Positions [B or 1, T], segment ids [B, T] of packed sequences, and the attention mask."""
    batch, tokens, device = *new.shape[:2], new.device
    attention_mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    cu_seq_lens, bounds = same_bounds(given, device), None
    if position_ids is not None:
        position_ids = _positions(position_ids, batch, tokens).to(device)
    longest = given.get("max_length_q")
    longest = given.get("max_length_k") if longest is None else longest
    if cu_seq_lens is not None:
        bounds, longest = check_bounds(cu_seq_lens, longest, batch * tokens, device)
    prefixes = check_prefixes(given.get("prefixes"), bounds, tokens)
    if prefixes is not None:
        _check_sharing(model, cache, position_ids)
    past: int | Tensor = 0
    if cache is not None:
        past = cache.begin(batch, tokens, attention_mask, cu_seq_lens)
    if isinstance(past, Tensor):  # the device knows, and the cache will mask
        if position_ids is None:
            position_ids = past[:, None] + torch.arange(tokens, device=device)
        return position_ids, None, AttentionMask(tokens, backend=model.attention)
    key_mask = _key_mask(attention_mask, batch, past + tokens, device)
    starts = None
    if past == 0:
        if bounds is not None:
            starts = starts_of(bounds, batch, tokens)
            if key_mask is not None:
                check_padding(key_mask, starts)
        elif position_ids is not None and tokens > 1:
            starts = restarts(position_ids, key_mask, batch)
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


def _check_sharing(model: Model, cache: Cache | None, position_ids: Tensor | None) -> None:
    """Raises ValueError for a pass in which sequences cannot go on from tokens of another."""
    if cache is not None or not model.causal or not model.model.shares_prefixes:
        name = type(model).__name__
        raise ValueError(
            f"prefixes need causal attention in all layers and no cache, and this {name} has "
            f"{'a cache' if cache is not None else 'other layers'}: repeat the tokens instead"
        )
    if position_ids is None:
        raise ValueError("prefixes without position_ids: give those that go on behind the prefixes")


def _key_mask(mask: Tensor | None, batch: int, total: int, device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} is not [batch, cached + new tokens] = "
            f"[{batch}, {total}]"
        )
    # One of 0 and -inf, to be added, would be read the other way round
    if mask.is_floating_point():
        check_values(
            ((mask == 0) | (mask == 1)).all(),
            f"attention_mask is {mask.dtype} and has other values than 0 and 1: give 1 on tokens "
            "and 0 on padding",
        )
    if on_host(mask) and mask.all():
        return None
    return mask.to(device=device, dtype=torch.bool)


def _positions(position_ids: Tensor, batch: int, tokens: int) -> Tensor:
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids is {position_ids.dtype}: positions are integers")
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    if position_ids.shape not in ((1, tokens), (batch, tokens)):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} is not [1 or {batch}, {tokens}]"
        )
    return position_ids
