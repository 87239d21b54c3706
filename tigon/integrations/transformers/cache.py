"""transformers' Cache over Tigon's caches.

# B rows, K kv heads, S cached tokens, D head dim
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from tigon.layers import KVCache, StaticCache
from tigon.layers.kv_state import GrowingKV, KVState, StateSpec
from tigon.models.base import LanguageModel


class TigonCache(DynamicCache):
    """A cache of transformers whose keys, values and states are in `native`.

    The model alone adds to it. What `generate` of either library returns goes on in the other.
    """

    native: KVCache | StaticCache
    _model: Callable[[], LanguageModel | None] | None  # which it is of, if that is known

    def __init__(self, native: KVCache | StaticCache | None = None):
        super().__init__()
        self.native = KVCache() if native is None else native
        self._model = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy may go with a copy of the model."""
        return vars(self) | {"_model": None}

    def hand_to(self, model: LanguageModel) -> Self:
        """Returns the cache as one of this model; ValueError if it holds tokens of another one."""
        known = None if self._model is None else self._model()
        if known not in (None, model) and self.native.length != 0:
            raise ValueError(
                "the cache holds tokens of another model, though of the same shapes: each model "
                "goes on with its own"
            )
        self._model = weakref.ref(model)
        return self

    def __len__(self) -> int:
        return len(self.native.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens in {len(self)} layers)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the tokens of every row; ValueError if rows of a static cache differ."""
        length = self.native.length
        if length is None:
            raise ValueError(
                "rows of the cache hold different numbers of tokens: go on with generate, without "
                "beams, or with texts of one length"
            )
        return length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns the tokens that fit into a row; -1 if the cache grows."""
        return getattr(self.native, "capacity", -1)

    @property
    def batch_size(self) -> int:
        """The rows of the cache; 0 before the first pass."""
        return self.native.rows if isinstance(self.native, KVCache) else len(self.native.lengths)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can drop the last tokens, which layers with one state for all cannot."""
        return all(state.history is not None for state in self.native.states)

    @property
    def is_compileable(self) -> bool:
        """False: the model makes its own masks."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it holds any tokens."""
        return bool(self.batch_size)

    @property
    def is_linear(self) -> list[bool]:
        """Says of each layer whether it keeps one state for all tokens."""
        return [not isinstance(state, KVState) for state in self.native.states]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: only the model's own layers add to the cache."""
        raise NotImplementedError(
            "keys and values of a TigonCache come from the model: fill a DynamicCache, which the "
            "model takes over"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens of each row; a number above 0 is how many stay.

        Raises ValueError if a layer keeps one state for all tokens.
        """
        length = tokens_to_remove
        if tokens_to_remove <= 0:
            length = max(self.get_seq_length() + tokens_to_remove, 0)
        if isinstance(self.native, KVCache):
            self.native.crop(length)
        elif self.native.length != length:
            self.native.crop(torch.full_like(self.native.lengths, length, device="cpu"))

    def reset(self) -> None:
        """Drops all tokens."""
        if isinstance(self.native, StaticCache):
            self.native.reset(0, len(self.native.lengths))
        else:
            self.native.crop(0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of the index, in its order."""
        self.native.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows into the order of the beams."""
        self.native.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self.native.expand(repeats)


def open_cache(model: Any, config: Any, arguments: Mapping[str, Any]) -> TigonCache | None:
    """Returns the cache of a forward pass with these keywords, or None if it has none.

    `model` is the native one. Without `use_cache` the config decides, for calls without labels in
    evaluation mode. Raises TypeError or ValueError for a cache that cannot be taken over.
    """
    for name in ("cache", "past_key_values"):  # as in transformers, the first if both are given
        if arguments.get(name) is not None:
            return take_over(arguments[name], model)
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        labels = arguments.get("labels"), arguments.get("shift_labels")
        scores = model.training or labels != (None, None)
        use_cache = getattr(config, "use_cache", False) and model.causal and not scores
    return TigonCache().hand_to(model) if use_cache else None


def take_over(cache: Any, model: LanguageModel) -> TigonCache:
    """Returns the cache as one of this model.

    A DynamicCache becomes one in place, so that whoever holds it sees what is added; keys and
    values of prefixes keep their gradients. Raises TypeError for another class, and ValueError for
    layers that do not fit or are known to be of another model.
    """
    if isinstance(cache, TigonCache):
        return cache.hand_to(model)
    if isinstance(cache, KVCache | StaticCache):
        return TigonCache(cache).hand_to(model)
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded one" if type(cache) is DynamicCache else f"a {type(cache).__name__}"
        raise TypeError(
            f"the cache is {kind}: Tigon's models take over a DynamicCache alone; leave it out"
        )
    native = _read(cache, model)
    cache.__class__ = TigonCache
    cache.__dict__ = TigonCache(native).hand_to(model).__dict__
    return cast(TigonCache, cache)


def _read(cache: Cache, model: LanguageModel) -> KVCache:
    """Returns a native cache with transformers' keys and values."""
    layers: list[Any] = cache.layers
    length = cache.get_seq_length() if layers else 0
    if not length:
        return KVCache()
    rows = next(len(layer.keys) for layer in layers if hasattr(layer, "keys"))
    states = model.model.make_states(StateSpec(rows, None, model.dtype, model.device))
    owners = [i for i, block in enumerate(model.model.blocks) if block.kv_source is None]
    for i, state in zip(owners, states, strict=True):
        layer: Any = layers[i] if i < len(layers) else None
        if type(state) is not GrowingKV or not _fits(layer, state, length):
            raise ValueError(
                f"layer {i} of the cache does not hold {length} tokens of {state.layout}, which "
                "this model needs: give a cache that it has filled"
            )
        # Tokens out of the window are missing, and never read
        pad = 0, 0, length - layer.keys.shape[2], 0
        state.keys, state.values = (
            functional.pad(x.to(model.device, model.dtype), pad) for x in (layer.keys, layer.values)
        )
    return KVCache(states, rows, length)


def _fits(layer: Any, state: GrowingKV, length: int) -> bool:
    """Whether transformers' layer has keys and values [B, K, S, D] of so many tokens."""
    if not getattr(layer, "is_initialized", False) or not isinstance(layer, DynamicLayer):
        return False
    shapes = {(x.shape[1], x.shape[3]) for x in (layer.keys, layer.values) if x is not None}
    return shapes == {(state.kv_heads, state.head_dim)} and layer.get_seq_length() == length
