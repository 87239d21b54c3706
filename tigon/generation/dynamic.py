"""Steps with a cache that grows, or with none: for CPUs, sharded models and turning RoPEs.

# B rows, T prompt tokens, V vocab
"""

import torch
from torch import Tensor

from tigon.generation.prompt import Prompt
from tigon.generation.protocols import Model
from tigon.generation.sampling import Draws, Sampling
from tigon.layers import KVCache

ROOM = 1024  # tokens after the prompt that there is memory for at first


class DynamicSteps:
    """Prompts keep their padding, and finished rows stay in the batch."""

    can_remove_rows = False

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        draws: Draws,
        use_cache: bool,
    ):
        ids, mask = prompt
        self._model, self._sampling, self._draws = model, sampling, draws
        self._cache = KVCache() if use_cache else None
        self._length = ids.shape[1]
        self._tokens, self._visible = ids, mask
        self._positions: Tensor | None = None
        self._extend(min(max_tokens, ROOM))
        self._seen = sampling.seen(ids, mask, model.config.vocab_size)
        self._generated = ids.new_zeros(1)  # tokens after the prompt, of every row

    def __call__(self, remaining: int) -> Tensor:
        n = self._length
        if n == self._tokens.shape[1]:
            self._extend(min(remaining, n))
        visible, positions = self._visible, self._positions
        if self._cache is not None and n == self._model.cache_restart:
            self._cache = KVCache()
        start = 0 if self._cache is None or self._cache.length == 0 else n - 1
        logits = self._model(
            self._tokens[:, start:n],
            attention_mask=None if visible is None else visible[:, :n],
            position_ids=None if positions is None else positions[:, start:n],
            past_key_values=self._cache,
            use_cache=self._cache is not None,
            logits_to_keep=1,
        ).logits[:, -1]
        new = self._sampling(logits, self._seen, self._generated, self._draws)[:, None]
        token = new.clamp(min=0)
        self._tokens[:, n : n + 1] = token
        if self._seen is not None:
            self._seen.scatter_(1, token, True)
        self._generated += 1
        self._length += 1
        return new

    def _extend(self, count: int) -> None:
        """Memory for so many tokens more, which are visible."""
        ids, visible = self._tokens, self._visible
        self._tokens = torch.cat((ids, ids.new_zeros(len(ids), count)), 1)
        if visible is not None:
            self._visible = torch.cat((visible, visible.new_ones(len(ids), count)), 1)
            self._positions = (self._visible.cumsum(-1) - 1).clamp_(min=0)

    def select(self, index: Tensor) -> None:
        raise NotImplementedError("rows of a KVCache stay to the end")
