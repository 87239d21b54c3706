"""Generation steps with a dynamic or a static cache, prefill, and CUDA graphs of a step.

# B rows at first, b rows now, T prompt tokens, N tokens of a pack, V vocab
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.generation.loop import FEW_STEPS
from tigon.generation.output import Recording
from tigon.generation.prompt import GenerationModel, PromptBatch
from tigon.generation.sampling import Draws, Sampling
from tigon.generation.settings import MAX_INT32, CacheImplementation, GenerationSettings
from tigon.kernels.runtime import runs_triton
from tigon.layers import Cache, KVCache, StaticCache
from tigon.layers.kv_state import Quantize
from tigon.utils.graph_capture import capture_graph, on_capture_stream
from tigon.utils.memory import split_by_size


def _read_prompts(
    model: GenerationModel, cache: StaticCache, prompt: PromptBatch, max_tokens: int
) -> Tensor:
    """Fills an empty cache by parts of at most `max_tokens`; returns logits [B, V]."""
    lengths = prompt.lengths()
    flat = prompt.ids.flatten() if prompt.mask is None else prompt.ids[prompt.mask]
    bounds = list(itertools.accumulate(lengths, initial=0))
    logits = []
    for part in split_by_size(range(len(lengths)), lengths.__getitem__, max_tokens):
        start, stop = part[0], part[-1] + 1
        ids, rows = flat[bounds[start] : bounds[stop]], cache.rows(start, stop)
        even = len(set(lengths[start:stop])) == 1
        if even:
            for chunk in ids.view(stop - start, -1).split(max(max_tokens, 1), 1):
                out = model(chunk, past_key_values=rows, logits_to_keep=1)
            logits.append(out.logits[:, -1])
            continue
        ends = torch.tensor(bounds[start : stop + 1], device="cpu") - bounds[start]
        out = model(
            ids[None],
            past_key_values=rows,
            cu_seq_lens=ends,
            max_length_q=max(lengths[start:stop]),
            logits_to_keep=ends[1:] - 1,
        )
        logits.append(out.logits[0])
    return torch.cat(logits)


def _read_rest(
    model: GenerationModel, cache: StaticCache, prompt: PromptBatch, max_tokens: int
) -> Tensor:
    """Fills a cache that holds the beginning of each prompt with the rest, row by row; returns
    logits [B, V]."""
    logits = []
    for row, ids in enumerate(prompt.unpadded()):
        state = cache.rows(row, row + 1)
        for chunk in ids[state.length :].split(max_tokens):
            out = model(chunk[None], past_key_values=state, logits_to_keep=1)
        logits.append(out.logits[:, -1])
    return torch.cat(logits)


@dataclass(frozen=True)
class Call:
    """The checked arguments of a call, of which its steps are made."""

    model: GenerationModel
    assistant: GenerationModel | None
    prompt: PromptBatch
    settings: GenerationSettings
    max_tokens: int  # after the prompts
    sampling: Sampling
    recording: Recording
    cache: CacheImplementation
    past: KVCache | StaticCache | None  # with the first tokens of each prompt
    kept_rows: int  # whose cache is used after the call

    @property
    def rows(self) -> PromptBatch:
        """The prompts with num_return_sequences copies of each."""
        return self.prompt.repeat(self.settings.num_return_sequences)

    def make_cache(self, new: int, **options: Any) -> StaticCache:
        """Returns the model's static cache, `past` if there is one, with room for every prompt and
        `new` tokens after it; `options` are those of `static_cache`."""
        if isinstance(self.past, StaticCache):
            if self.past.capacity < (capacity := self._capacity(new)):
                self.past.grow(capacity)
            return self.past
        quantize: Quantize = "int8" if self.cache == "quantized" else None
        return self.make_empty_cache(self.model, new, quantize=quantize, **options)

    def make_empty_cache(self, model: GenerationModel, new: int, **options: Any) -> StaticCache:
        """Returns a model's static cache as `make_cache` does, without tokens; raises ValueError
        if the model cannot have so many."""
        try:
            return model.static_cache(len(self.prompt.ids), self._capacity(new), **options)
        except ValueError as error:
            raise ValueError(f"{error}: ask for fewer than {new} new tokens") from None

    def _capacity(self, new: int) -> int:
        return -(-(max(self.prompt.lengths()) + new) // ROUND) * ROUND

    def prefill(self, model: GenerationModel, cache: StaticCache, prompt: PromptBatch) -> Tensor:
        """Fills the cache with prompts and repeats its rows; returns the logits after them."""
        read = _read_prompts if cache.length == 0 else _read_rest
        logits = read(model, cache, prompt, self.settings.prefill_chunk_size)
        copies = self.settings.num_return_sequences
        if copies > 1:
            cache.expand(copies)
        return logits.repeat_interleave(copies, 0)


# The choice of a cache

# Models with one tokenizer may pad their vocabularies to different sizes: a multiple of FILL, at
# most FILLED rows apart (151,936 and 152,064 in Qwen2.5)
FILL, FILLED = 64, 512


def is_sharded(model: GenerationModel) -> bool:
    """Returns whether FSDP gathers the parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def choose_cache(
    model: GenerationModel,
    assistant: GenerationModel | None,
    settings: GenerationSettings,
    total: int,
    past: Cache | None,
    kept_rows: int,  # whose cache is returned
) -> CacheImplementation:
    """Returns the cache that is requested or given, or static on a GPU and for several rows that
    are kept if it is exact for `total` tokens, or dynamic.

    Raises ValueError if the one that is requested would not be exact.
    """
    requested, use_cache = settings.cache_implementation, settings.use_cache
    setting = f"cache_implementation={requested!r}"
    if past is not None:
        if requested is not None:
            raise ValueError(f"past_key_values and {setting}: give one of them")
        requested = "static" if isinstance(past, StaticCache) else "dynamic"
        setting = f"past_key_values={type(past).__name__}"
    if assistant is not None:
        # Rows that have all their tokens keep proposing until the others have theirs
        total += settings.num_assistant_tokens
        _check_assistant(model, assistant, requested, total, use_cache)
        requested = requested or "static"
    if not use_cache and requested is not None:
        raise ValueError(f"use_cache=False and {setting}: give one of them")
    if not use_cache or requested == "dynamic":
        return "dynamic"
    obstacle = _obstacle(model, total)
    if obstacle is None:
        is_static = model.device.type == "cuda" or kept_rows > 1
        return requested or ("static" if is_static else "dynamic")
    if requested is not None:
        raise ValueError(f"{setting}: {obstacle}; take 'dynamic'")
    return "dynamic"


def _check_assistant(
    model: GenerationModel,
    assistant: GenerationModel,
    requested: CacheImplementation | None,
    total: int,
    use_cache: bool,
) -> None:
    """Raises if the assistant cannot propose tokens to the model, in texts of `total` tokens."""
    if model.communication_groups:
        raise ValueError(
            "assistant_model does not work with a model loaded with mesh=: leave it out"
        )
    if not callable(getattr(assistant, "static_cache", None)):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, not a model that "
            "tigon.from_pretrained loads"
        )
    if not use_cache or requested == "dynamic":
        raise ValueError(
            "assistant_model needs a cache that can go back: cache_implementation='static' or "
            "'quantized'"
        )
    drafted, vocab = assistant.config.vocab_size, model.config.vocab_size
    larger = max(drafted, vocab)
    if drafted != vocab and (larger % FILL or larger - min(drafted, vocab) > FILLED):
        raise ValueError(
            f"assistant_model has a vocabulary of {drafted} tokens, but the model one of {vocab}: "
            "only a model with the same tokenizer can propose tokens"
        )
    if assistant.device != model.device:
        raise ValueError(
            f"assistant_model is on {assistant.device}, but the model on {model.device}"
        )
    for name, m in (("assistant_model", assistant), ("the model beside assistant_model", model)):
        obstacle = _obstacle(m, total)
        if obstacle is not None:
            raise ValueError(
                f"{name}: {obstacle}; proposals need a static cache with num_assistant_tokens more "
                "than the text: ask for fewer tokens, or leave assistant_model out"
            )


def _obstacle(model: GenerationModel, total: int) -> str | None:
    """Returns why a static cache cannot be exact for `total` tokens; None if it is."""
    if is_sharded(model):
        return "FSDP gathers parameters step by step"
    rope = model.dynamic_rope
    if rope is None or total <= rope.original_length:
        return None
    kind, length = rope.rope_type, rope.original_length
    return f"{kind} RoPE rotates all keys anew when a text of up to {total} passes {length}"


# CUDA graphs

WARM_UP = 2  # steps before capture, which compile kernels and create handles


class GraphedStep:
    """Runs a step eagerly at first, then by replaying a CUDA graph, with the same result.

    The step changes tensors in place and returns one; its launches must not depend on their values.
    No step is computed twice. Without Triton, and on the CPU, all steps are eager, since plain
    torch may sync with the device. Graphs that never run at once and whose results are made
    outside of them may share a memory `pool`.
    """

    def __init__(self, model: GenerationModel, generator: torch.Generator | None, pool: Any = None):
        weight = next(model.parameters())
        self._device, self._generator = weight.device, generator
        self._possible = self._device.type == "cuda" and runs_triton(weight)
        if pool is None and self._possible:
            pool = torch.cuda.graph_pool_handle()
        self._pool = pool
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self, step: Callable[[], Tensor], remaining: int) -> Tensor:
        """Runs the next of at most `remaining` steps, which overwrites the last step's result."""
        if self._graph is None:
            if not self._possible or remaining <= FEW_STEPS:
                return step()
            if self._warm < WARM_UP:
                self._warm += 1
                with on_capture_stream(self._device):
                    return step()
            self._capture(step)
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        return self._result

    def _capture(self, step: Callable[[], Tensor]) -> None:
        """Captures the step in a CUDA graph, and the tensor that it returns, without running it."""
        graph = torch.cuda.CUDAGraph()
        # Leaving inference mode turns gradients on, also within no_grad
        mode = torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()
        # Generators create tensors here, which graphs outside of inference mode may use later
        with torch.inference_mode(False):
            if self._generator is not None:
                graph.register_generator_state(self._generator)
            with capture_graph(graph, self._device, self._pool), mode:
                self._result = step()
        self._graph = graph


# Dynamic steps

DYNAMIC_CAPACITY = 1024  # initial room for tokens after the prompt


class DynamicSteps:
    """Steps with a growing cache or none: for CPUs, sharded models and dynamic RoPEs.

    Prompts keep their padding, and finished rows stay in the batch; after `hold` they read `pad`.
    """

    def __init__(self, call: Call, draws: Draws, pad: int):
        ids, mask = call.rows
        self._model, self._sampling, self._draws = call.model, call.sampling, draws
        self._cache: KVCache | None = None  # all tokens are read again and again
        self._pad = pad
        if call.settings.use_cache:
            self._cache = cast(KVCache, call.past or KVCache())
            if call.settings.num_return_sequences > 1:
                self._cache.expand(call.settings.num_return_sequences)
        self._ended: Tensor | None = None  # bool [b, 1]
        self._length = ids.shape[1]
        self._tokens, self._visible = ids, mask
        self._positions: Tensor | None = None
        self._extend(min(call.max_tokens, DYNAMIC_CAPACITY))
        self._seen = call.sampling.seen(ids, mask, call.model.config.vocab_size)
        self._generated = ids.new_zeros(1)  # tokens after the prompt, of every row

    def __call__(self, remaining: int) -> Tensor:
        """Returns the next tokens [b, 1]; reads the whole text again at `cache_restart` tokens."""
        n, restart = self._length, self._model.cache_restart
        if n == self._tokens.shape[1]:
            self._extend(min(remaining, n))
        visible, positions = self._visible, self._positions
        start = 0 if self._cache is None else self._cache.length
        if self._cache is not None and restart is not None and start < restart <= n:
            self._cache.crop(0)
            start = 0
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
        if self._ended is not None:
            token = token.masked_fill(self._ended, self._pad)
        self._tokens[:, n : n + 1] = token
        if self._seen is not None:
            self._seen.scatter_(1, token, True)
        self._generated += 1
        self._length += 1
        return new

    def _extend(self, count: int) -> None:
        """Allocates room for `count` more tokens, which are visible."""
        ids, visible = self._tokens, self._visible
        self._tokens = torch.cat((ids, ids.new_zeros(len(ids), count)), 1)
        if visible is not None:
            self._visible = torch.cat((visible, visible.new_ones(len(ids), count)), 1)
            self._positions = (self._visible.cumsum(-1) - 1).clamp_(min=0)

    def hold(self, ended: Mapping[int, int]) -> None:
        """Lets these rows read padding, since all rows of a KVCache grow alike."""
        rows = range(len(self._tokens))
        self._ended = torch.tensor([[row in ended] for row in rows], device=self._tokens.device)

    def finish(self, tokens: Sequence[int]) -> KVCache | None:
        """Returns the cache, with padding behind the ends of rows."""
        return self._cache


# Static steps

ROUND = 256  # capacities are multiples of this
INITIAL_CAPACITY = 8192  # initial room for tokens after the prompts; then it doubles


class StaticSteps:
    """Steps with a static cache, which a CUDA graph replays on a GPU.

    The constructor reads the prompts; the first step only chooses the tokens after them.
    """

    def __init__(self, call: Call, draws: Draws):
        model, prompt = call.model, call.rows
        self._model, self._sampling, self._draws = model, call.sampling, draws
        rows_differ = call.kept_rows > 1  # each keeps a length of its own, for `finish`
        room = min(call.max_tokens, INITIAL_CAPACITY)
        self._cache = call.make_cache(room, rollback=int(rows_differ))
        self._logits: Tensor | None = call.prefill(model, self._cache, call.prompt)
        self._prompt_lengths = prompt.lengths()
        # Tokens that are kept of each row [b]; one more is overwritten again and again
        self._limits = torch.full_like(self._cache.lengths, MAX_INT32) if rows_differ else None
        self._seen = call.sampling.seen(*prompt, model.config.vocab_size)
        self._last = prompt.ids[:, -1:].clone()  # [b, 1]
        self._generated = self._last.new_zeros(1)  # tokens after the prompt, of every row
        self._length = max(self._prompt_lengths)  # tokens of the longest row in the cache
        self._replay = GraphedStep(self._model, self._draws.generator)

    def __call__(self, remaining: int) -> Tensor:
        """Returns the next tokens [b, 1]; the cache doubles when it is full."""
        if self._logits is None:
            if self._length == self._cache.capacity:
                self._cache.grow(self._length + min(remaining, self._length))
                self._replay = GraphedStep(self._model, self._draws.generator)
            self._length += 1
            return self._replay(self._step, remaining)
        logits, self._logits = self._logits, None
        return self._choose(logits)

    def select(self, index: Tensor) -> None:
        """Keeps the rows of the index."""
        index = index.to(self._last.device)
        self._cache.select(index)
        self._draws.select(index)
        self._last = self._last[index]
        self._seen = None if self._seen is None else self._seen[index]
        self._replay = GraphedStep(self._model, self._draws.generator)

    def hold(self, ended: Mapping[int, int]) -> None:
        """Drops what is read behind the ends of these rows."""
        if self._limits is not None:
            limits = [self._prompt_lengths[row] + n - 1 for row, n in ended.items()]
            self._limits[list(ended)] = self._limits.new_tensor(limits)

    def finish(self, tokens: Sequence[int]) -> StaticCache:
        """Returns the cache, in which each row has its own length."""
        self.hold(dict(enumerate(tokens)))
        if self._limits is not None:
            self._cache.crop(self._limits)
        self._cache.refresh()
        return self._cache

    def _step(self) -> Tensor:
        """Runs the model on the last tokens; returns the next [b, 1]."""
        if self._limits is not None:
            self._cache.crop(self._limits)
        out = self._model(self._last, past_key_values=self._cache, logits_to_keep=1)
        return self._choose(out.logits[:, -1])

    def _choose(self, logits: Tensor) -> Tensor:
        """Chooses the next token of each row from its logits, notes it, and returns them [b, 1]."""
        new = self._sampling(logits, self._seen, self._generated, self._draws)[:, None]
        self._last.copy_(new.clamp(min=0))
        self._generated.add_(1)
        if self._seen is not None:
            self._seen.scatter_(1, self._last, True)
        return new
