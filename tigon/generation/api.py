"""generate: transformers' call, over whichever steps are fastest and exact.

# B batch, T prompt tokens
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.generation.dynamic import DynamicSteps
from tigon.generation.loop import LAG, drive
from tigon.generation.protocols import Decodes, Model, Steps, Streamer
from tigon.generation.sampling import Draws, Sampling
from tigon.generation.settings import (
    Caches,
    check_assistant,
    check_prompt,
    choose_cache,
    find_stops,
    is_sharded,
    most_new,
    settle,
)
from tigon.generation.speculative import SpeculativeSteps
from tigon.generation.static import StaticSteps
from tigon.generation.stopping import Continuations


def generate(
    model: Model,
    input_ids: Tensor,  # [B, T]
    *,
    attention_mask: Tensor | None = None,  # [B, T], 0 on padding, which is on the left
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Decodes | None = None,
    seed: int | None = None,
    streamer: Callable[[Tensor], object] | Streamer | None = None,
    use_cache: bool = True,
    cache_implementation: Caches | None = None,
    prefill_chunk_size: int = 8192,
    assistant_model: Model | None = None,
    num_assistant_tokens: int = 5,
) -> Tensor:
    """Prompt and continuation [B, T + new], as transformers' `generate` makes them.

    What the call leaves open comes from `model.generation_config`, then from the config (eos and
    pad), then from transformers' defaults: greedy; with `do_sample` temperature 1 and top_k 50
    (0 is off); 20 new tokens when there is neither max_new_tokens nor max_length (prompt and
    continuation). A row ends after an eos token (`eos_token_id=[]`: none) or after the token that
    completes a stop string (decoded with `tokenizer`), and is then filled with pad_token_id, or
    eos without one. With a seed a call always samples the same tokens and leaves the global
    random state alone; without one it uses that state, of which on a GPU it may use a few draws
    more than there are tokens. `streamer` is called with the new tokens [B], on the CPU, of each
    step; an object with `put` and `end` is used as transformers uses its streamers.

    `cache_implementation`: "dynamic" grows; "static" is allocated once, decodes with a CUDA graph
    and reads prompts `prefill_chunk_size` tokens at a time; "quantized" is a static one in int8.
    By default static on a GPU, dynamic on a CPU, under FSDP, and where a text can pass the length
    at which its RoPE turns (dynamic, LongRoPE). `assistant_model`, smaller and of the same
    vocabulary, proposes `num_assistant_tokens` at a time: the greedy tokens stay what they are,
    and sampled ones are distributed as they were, though a seed draws others.
    """
    settings = settle(
        model,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        stop_strings=stop_strings,
    )
    eos, pad, strings = (settings.pop(k) for k in ("eos_token_id", "pad_token_id", "stop_strings"))
    sampling = Sampling(**settings)
    stop = find_stops(strings, tokenizer)
    prompt = check_prompt(model, input_ids, attention_mask)
    b, t = prompt.ids.shape
    most = most_new(t, max_new_tokens, max_length, model.generation_config)
    if pad is None or pad < 0:  # old configs say -1 for none
        if stop is not None and not eos and b > 1:
            raise ValueError("stop_strings for several rows need pad_token_id to fill short ones")
        pad = eos[0] if eos else 0
    if prefill_chunk_size < 1:
        raise ValueError(f"prefill_chunk_size={prefill_chunk_size} is not above 0")
    sharded = is_sharded(model)
    if assistant_model is not None:
        goes_back = use_cache and cache_implementation != "dynamic"
        check_assistant(model, assistant_model, num_assistant_tokens, t + most, goes_back)
        cache_implementation = cache_implementation or "static"
    cache = choose_cache(model, cache_implementation, t + most, sharded, use_cache)
    options: dict[str, Any] = {
        "prefill_chunk_size": prefill_chunk_size,
        "quantize": "int8" if cache == "quantized" else None,
    }

    emit: Callable[[Tensor], object] | None = None
    if isinstance(streamer, Streamer):
        emit = streamer.put
        emit(prompt.ids.cpu())
    elif streamer is not None:
        emit = streamer
    said = Continuations(prompt.ids, most, eos, pad, stop, emit)

    device = prompt.ids.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    draws = Draws(b, device, generator)
    given = prompt, most, sampling, draws
    with contextlib.ExitStack() as stack:
        # FSDP keeps what it gathers in, and could not train with memory of inference mode
        stack.enter_context(torch.no_grad() if sharded else torch.inference_mode())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            # A graph must not go while steps of it run that were launched in vain
            stack.callback(torch.cuda.current_stream(device).synchronize)
        if most:
            steps: Steps
            if assistant_model is not None:
                steps = SpeculativeSteps(
                    model, assistant_model, *given, proposals=num_assistant_tokens, **options
                )
            elif cache == "dynamic":
                steps = DynamicSteps(model, *given, use_cache)
            else:
                steps = StaticSteps(model, *given, **options)
            # Ranks that share a sharded model must all make the same number of steps
            drive(steps, said, 0 if cache == "dynamic" else LAG)
    if isinstance(streamer, Streamer):
        streamer.end()
    # Outside of inference mode, for the caller may train on what comes back
    tokens = torch.cat((prompt.ids, said.tensor().to(device)), 1)
    longest = max(n + len(new) for n, new in zip(prompt.lengths(), said.said, strict=True))
    if longest > model.config.max_position_embeddings:
        warnings.warn(
            f"a text of {longest} tokens is longer than the {model.config.max_position_embeddings} "
            "of the model's max_position_embeddings; it may make little sense beyond those",
            stacklevel=2,
        )
    return tokens
