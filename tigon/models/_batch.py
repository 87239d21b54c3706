"""What a forward pass reads: tokens or embeddings, positions, sequences, padding and cache.

# B batch, T new tokens, S all tokens (cached ones first), C model dim, N real tokens
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, Unpack

import torch
from torch import Tensor

from tigon.kernels._attention_backends import HALF, PLAIN
from tigon.kernels._check import check, on_host
from tigon.kernels._triton import runs_triton
from tigon.kernels.attention import AttentionMask, Backend
from tigon.layers import Cache, KVCache
from tigon.layers.context import real_tokens
from tigon.models import _sequences
from tigon.models._arguments import BATCH, BatchArguments, Defaults, check_keywords, spelled_out
from tigon.models._config import Config
from tigon.models._decoder import Decoder

TENSORS = (
    *("input_ids", "attention_mask", "position_ids", "inputs_embeds", "dropout_keys"),
    *("prefixes", *_sequences.BOUNDS),
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
        real = self.mask.unpadded() if self._drops(x) else None
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
    name, holds = type(model).__name__, model.model.holds
    if not model.causal:
        raise ValueError(
            f"{name} with attention to both sides can neither use a cache nor "
            "generate: each new token would change the ones before it"
        )
    if cache.holds and cache.holds != holds:
        raise ValueError(
            f"past_key_values has {_layers(cache.holds)}, but this {name} {_layers(holds)}: "
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
    cu_seq_lens, bounds = _sequences.same_bounds(given, device), None
    if position_ids is not None:
        position_ids = _positions(position_ids, batch, tokens).to(device)
    longest = given.get("max_length_q")
    longest = given.get("max_length_k") if longest is None else longest
    if cu_seq_lens is not None:
        bounds, longest = _sequences.check_bounds(cu_seq_lens, longest, batch * tokens, device)
    prefixes = _sequences.check_prefixes(given.get("prefixes"), bounds, tokens)
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
            starts = _sequences.starts_of(bounds, batch, tokens)
            if key_mask is not None:
                _sequences.check_padding(key_mask, starts)
        elif position_ids is not None and tokens > 1:
            starts = _sequences.restarts(position_ids, key_mask, batch)
    if starts is not None and (cache is not None or on_host(starts)) and not starts[:, 1:].any():
        starts = bounds = None
    segment_ids = None if starts is None else starts.flatten().cumsum(0).view(batch, tokens) - 1
    if position_ids is None:
        position_ids = torch.arange(past, past + tokens, device=device)[None]
        if starts is not None:
            position_ids = position_ids - torch.where(starts, position_ids, 0).cummax(1).values
    elif cu_seq_lens is not None:
        _sequences.check_positions(position_ids, segment_ids, key_mask)
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
        check(
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
