"""generate: transformers' call, over whichever steps are fastest and exact.

# B batch, T prompt tokens
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.distributed.agreement import check_same_on_all_ranks
from tigon.generation.loop import LAG, Continuations, find_stops, run_steps
from tigon.generation.prompt import Decodes, Model, Prompt, Steps, Streamer, check_prompt
from tigon.generation.sampling import Draws, Sampling
from tigon.generation.settings import (
    DEFAULTS,
    UNSET,
    Caches,
    Settings,
    max_new,
    settle,
    warn_of_length,
    warn_of_unused,
)
from tigon.generation.speculative import SpeculativeSteps
from tigon.generation.steps import DynamicSteps, StaticSteps, choose_cache, is_sharded
from tigon.utils import memory
from tigon.utils.memory import format_gib


def generate(
    model: Model,
    input_ids: Tensor,  # [B, T]
    *,
    attention_mask: Tensor | None = None,  # [B, T], 0 on padding, which is on the left
    generation_config: Any = None,  # a dict, or an object with to_dict()
    max_new_tokens: int | None = UNSET,
    max_length: int | None = UNSET,
    min_new_tokens: int | None = UNSET,
    num_return_sequences: int | None = UNSET,
    do_sample: bool | None = UNSET,
    temperature: float | None = UNSET,
    top_k: int | None = UNSET,
    top_p: float | None = UNSET,
    min_p: float | None = UNSET,
    repetition_penalty: float | None = UNSET,
    eos_token_id: int | Sequence[int] | None = UNSET,
    pad_token_id: int | None = UNSET,
    stop_strings: str | Sequence[str] | None = UNSET,
    tokenizer: Decodes | None = None,
    seed: int | None = UNSET,
    streamer: Callable[[Tensor], object] | Streamer | None = None,
    use_cache: bool | None = UNSET,
    cache_implementation: Caches | None = UNSET,
    prefill_chunk_size: int | None = UNSET,
    assistant_model: Model | None = None,
    num_assistant_tokens: int | None = UNSET,
    **others: Any,
) -> Tensor:
    """Prompts and continuations [B, T + new], as transformers' `generate` makes them.

    What the call leaves open comes from `generation_config`, then from `model.generation_config`,
    then from the config (eos and pad), then from transformers' defaults: greedy; with `do_sample`
    temperature 1 and top_k 50; 20 new tokens when there is neither max_new_tokens nor max_length
    (prompt and continuation). In a call None turns a setting off, whatever the model's says: no
    limit to the likeliest (top_k, top_p, min_p), no penalty, no eos, 20 new tokens. Of how a call
    runs (from `use_cache` on, and the seed), the model's own files decide nothing, and None is the
    default. `others` are arguments of transformers' that may be given if they change nothing.

    Without attention_mask, tokens that are pad_token_id are padding, unless that ends texts too. A
    row ends after an eos token, but not before `min_new_tokens`, or after the token that completes
    a stop string (decoded with `tokenizer`), and is then filled with pad_token_id, or eos without
    one. `num_return_sequences` samples so many rows of each prompt, one after the other: [B * n,
    T + new]. With a seed a call always samples the same tokens and leaves the global random state
    alone; without one it uses that state, of which on a GPU it may use a few draws more than there
    are tokens. `streamer` is called with the new tokens [B], on the CPU, of each step; an object
    with `put` and `end` is used as transformers uses its streamers.

    `cache_implementation`: "dynamic" grows; "static" has room for 8192 new tokens at first, which
    doubles, decodes with a CUDA graph and reads prompts `prefill_chunk_size` (8192) tokens at a
    time; "quantized" is a static one in int8. By default static on a GPU, dynamic on a CPU, under
    FSDP, and where a text can pass the length at which its RoPE turns (dynamic, LongRoPE).
    `assistant_model`, smaller and with the same
    tokenizer, proposes `num_assistant_tokens` (5) at a time: the greedy tokens stay what they are,
    and sampled ones are distributed as they were, though a seed draws others.

    A value that cannot be, or that differs between ranks of a model, is an error that names it; an
    argument without effect gets a warning, and so does a text that may pass the model's context.
    """
    arguments = locals()
    given = {name: arguments[name] for name in DEFAULTS if arguments[name] is not UNSET}
    settings, files = settle(model, generation_config, given, others)
    eos = settings.eos_token_id
    prompt = check_prompt(model, input_ids, attention_mask, settings.pad_token_id, eos)
    _check_ranks(model, prompt, settings)
    sampling = Sampling.of(settings, model.config.vocab_size, model.device)
    _check_rows(model, len(prompt.ids), settings)
    rows = prompt.repeat(settings.num_return_sequences)
    max_tokens = max_new(prompt, settings, files.get("max_length", ""))
    emit = streamer.put if isinstance(streamer, Streamer) else streamer
    stop = find_stops(settings.stop_strings, tokenizer, files.get("stop_strings", ""))
    output = Continuations(rows.ids, max_tokens, eos, settings.pad_token_id, stop, emit)
    cache = choose_cache(model, assistant_model, settings, prompt.ids.shape[1] + max_tokens)
    warn_of_unused(given, settings.do_sample, assistant_model is not None, cache)
    warn_of_length(max(prompt.lengths()) + max_tokens, model.config.max_position_embeddings)
    if isinstance(streamer, Streamer):
        streamer.put(rows.ids.cpu())
    if max_tokens:
        _run(model, assistant_model, prompt, settings, sampling, cache, output)
    if isinstance(streamer, Streamer):
        streamer.end()
    # Outside of inference mode, for the caller may train on what comes back
    return torch.cat((rows.ids, output.tensor().to(rows.ids.device)), 1)


def _check_rows(model: Model, prompts: int, settings: Settings) -> None:
    """ValueError for more rows than there is memory for the scores of one token each."""
    rows, vocab = prompts * settings.num_return_sequences, model.config.vocab_size
    needed, there = 4 * rows * vocab, memory.total_memory(model.device)
    if needed > there:
        raise ValueError(
            f"num_return_sequences={settings.num_return_sequences} of {prompts} prompts: their "
            f"scores over {vocab} tokens take {format_gib(needed)}, and {model.device} has "
            f"{format_gib(there)}"
        )


def _check_ranks(model: Model, prompt: Prompt, settings: Settings) -> None:
    given = {"input_ids": prompt.ids, "attention_mask": prompt.mask, "settings": settings}
    check_same_on_all_ranks(model.together, "generate", given, model.device)


def _run(
    model: Model,
    assistant: Model | None,
    prompt: Prompt,
    settings: Settings,
    sampling: Sampling,
    cache: Caches,
    output: Continuations,
) -> None:
    """Generate on the model's device until every row of `output` has ended."""
    device, copies, generator = prompt.ids.device, settings.num_return_sequences, None
    seed = settings.seed
    if model.together and seed is None and settings.do_sample:
        drawn = torch.randint(1 << 62, (1,), device=device)
        for ranks in model.together:
            drawn = ranks.gather(drawn)[:1]  # the first rank's, so that all draw the same
        seed = int(drawn)
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
    chosen = output.max_tokens, sampling, Draws(len(output.tokens), device, generator)
    options: dict[str, Any] = {
        "copies": copies,
        "prefill_chunk_size": settings.prefill_chunk_size,
        "quantize": "int8" if cache == "quantized" else None,
    }
    with contextlib.ExitStack() as stack:
        # FSDP keeps what it gathers in, and could not train with memory of inference mode
        stack.enter_context(torch.no_grad() if is_sharded(model) else torch.inference_mode())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            # Steps whose tokens are dropped may still run: their graph must not be freed
            stack.callback(torch.cuda.current_stream(device).synchronize)
        steps: Steps
        if assistant is not None:
            options["proposals"] = settings.num_assistant_tokens
            steps = SpeculativeSteps(model, assistant, prompt, *chosen, **options)
        elif cache == "dynamic":
            steps = DynamicSteps(model, prompt.repeat(copies), *chosen, settings.use_cache)
        else:
            steps = StaticSteps(model, prompt, *chosen, **options)
        # Ranks that share a sharded model must all make the same number of steps
        lag = 0 if cache == "dynamic" else LAG
        run_steps(steps, output, lag, in_step=bool(model.together))
