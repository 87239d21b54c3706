"""Steps with a cache of fixed size, which a CUDA graph can repeat.

# B rows at first, b rows now, V vocab
"""

from torch import Tensor

from tigon.generation.graph import Replay
from tigon.generation.prefill import prefill
from tigon.generation.prompt import Prompt
from tigon.generation.protocols import Model
from tigon.generation.sampling import Draws, Sampling
from tigon.layers import StaticCache
from tigon.layers.state import Quantize

ROUND = 256  # capacities are multiples of
ROOM = 8192  # tokens after the prompts that there is memory for at first; then it doubles


def make_cache(
    model: Model, prompt: Prompt, new: int, *, chunk: int = 1, quantize: Quantize = None
) -> StaticCache:
    """Room for every prompt and `new` tokens behind it, of which a step appends `chunk`."""
    capacity = -(-(max(prompt.lengths()) + new) // ROUND) * ROUND
    try:
        rows = len(prompt.ids)
        return model.static_cache(rows, capacity, chunk=max(16, chunk), quantize=quantize)
    except ValueError as error:
        raise ValueError(f"{error}: ask for fewer than {new} new tokens") from None


class StaticSteps:
    """The first step reads the prompts, each further one a token of every row."""

    can_remove_rows = True

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        draws: Draws,
        *,
        copies: int,  # rows of each prompt, which is read once
        prefill_chunk_size: int,
        quantize: Quantize = None,
    ):
        self._model, self._sampling, self._draws = model, sampling, draws
        self._cache = make_cache(model, prompt, min(max_tokens, ROOM), quantize=quantize)
        self._logits: Tensor | None = prefill(
            model, self._cache, prompt, prefill_chunk_size, copies
        )
        prompt = prompt.repeat(copies)
        self._seen = sampling.seen(*prompt, model.config.vocab_size)
        self._last = prompt.ids[:, -1:].clone()  # [b, 1]
        self._generated = self._last.new_zeros(1)  # tokens after the prompt, of every row
        self._held = max(prompt.lengths())  # tokens of the longest row in the cache
        self._replay = self._new_replay()

    def __call__(self, remaining: int) -> Tensor:
        if self._logits is None:
            if self._held == self._cache.capacity:
                self._cache.grow(self._held + min(remaining, self._held))
                self._replay = self._new_replay()
            self._held += 1
            return self._replay(self._step, remaining)
        logits, self._logits = self._logits, None
        return self._choose(logits)

    def select(self, index: Tensor) -> None:
        index = index.to(self._last.device)
        self._cache.select(index)
        self._draws.select(index)
        self._last = self._last[index]
        self._seen = None if self._seen is None else self._seen[index]
        self._replay = self._new_replay()

    def _step(self) -> Tensor:
        out = self._model(self._last, past_key_values=self._cache, logits_to_keep=1)
        return self._choose(out.logits[:, -1])

    def _choose(self, logits: Tensor) -> Tensor:
        new = self._sampling(logits, self._seen, self._generated, self._draws)[:, None]
        self._last.copy_(new.clamp(min=0))
        self._generated.add_(1)
        if self._seen is not None:
            self._seen.scatter_(1, self._last, True)
        return new

    def _new_replay(self) -> Replay:
        return Replay(next(self._model.parameters()), self._draws.generator)
