"""generate: transformers' call, over whichever steps are fastest and exact.

# B batch, T prompt tokens
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tigon.distributed.collectives import check_same_on_all_ranks
from tigon.generation.loop import (
    LAG,
    Continuations,
    Criterion,
    StoppingCriteria,
    StopStrings,
    run_steps,
)
from tigon.generation.output import GenerationOutput, Recording
from tigon.generation.prompt import (
    DecodingTokenizer,
    GenerationModel,
    PromptBatch,
    Streamer,
    check_past,
    check_prompt,
)
from tigon.generation.sampling import Draws, Sampling
from tigon.generation.settings import (
    GenerationSettings,
    resolve_max_new_tokens,
    resolve_settings,
    warn_length,
    warn_unused,
)
from tigon.generation.speculative import SpeculativeSteps
from tigon.generation.steps import Call, DynamicSteps, StaticSteps, choose_cache, is_sharded
from tigon.layers import KVCache, StaticCache
from tigon.utils.json import quote
from tigon.utils.memory import check_memory

CachedSteps = DynamicSteps | StaticSteps | SpeculativeSteps


@overload
def generate(
    model: GenerationModel,
    input_ids: Tensor,
    *,
    return_dict_in_generate: Literal[True],
    **arguments: Any,
) -> GenerationOutput: ...


@overload
def generate(
    model: GenerationModel,
    input_ids: Tensor,
    *,
    return_dict_in_generate: Literal[False] | None = None,
    **arguments: Any,
) -> Tensor: ...


def generate(
    model: GenerationModel,
    input_ids: Any = None,  # int [B, T]; without a default `inputs=` would not be named
    *,
    attention_mask: Tensor | None = None,  # [B, T], 0 on padding, which is on the left
    generation_config: Any = None,  # a dict, or an object with to_dict()
    tokenizer: DecodingTokenizer | None = None,
    streamer: Callable[[Tensor], object] | Streamer | None = None,
    stopping_criteria: Sequence[Criterion] | None = None,
    past_key_values: KVCache | StaticCache | None = None,
    assistant_model: GenerationModel | None = None,
    **arguments: Any,
) -> Tensor | GenerationOutput:
    """Returns prompts and continuations [B, T + new], as transformers' `generate` does.

    Other arguments are the fields of `GenerationSettings`. Missing ones come from
    `generation_config`, then `model.generation_config`, then the config (eos and pad), then
    transformers' defaults: greedy; with `do_sample` temperature 1 and top_k 50; 20 new tokens. In a
    call None turns a setting off: no top_k, top_p or min_p, no penalty, no eos, 20 new tokens.
    Other arguments of transformers are accepted with values that change nothing.

    A row ends after an eos token, but not before `min_new_tokens`, or after the token that
    completes a stop string (decoded with `tokenizer`). It is then filled with pad_token_id, or eos
    without one. `num_return_sequences` samples n rows of each prompt: [B * n, T + new]. With a seed
    a call always samples the same tokens and does not touch the global random state. `streamer`
    gets the new tokens [B] of each step, on the CPU; transformers' streamers work too.
    `stopping_criteria` are called after each token, with all tokens [B, T + n] and the scores if
    these are returned, and say which rows end: a bool, or bool [B].

    `past_key_values`: a cache that holds the beginning of `input_ids`; only the tokens behind it
    are read, and those of this call are added. With `return_dict_in_generate` it is returned with
    the tokens, as a GenerationOutput; and with `output_scores` and `output_logits` what each token
    was chosen by. `assistant_model`, smaller and with the same tokenizer, proposes
    `num_assistant_tokens` (5) at a time. docs/generation.md has the caches, and what is exact.

    Raises ValueError for a value that is out of range or differs between ranks of a model. Warns of
    an argument without effect, and of a text that may exceed the model's context.
    """
    settings, files = resolve_settings(model, generation_config, arguments)
    pad, eos = settings.pad_token_id, settings.eos_token_id
    prompt = check_prompt(model, input_ids, attention_mask, pad, eos)
    cached = None if past_key_values is None else check_past(past_key_values, prompt)
    inputs: dict[str, Any] = {"input_ids": prompt.ids, "attention_mask": prompt.mask}
    inputs |= {"settings": settings, "past_key_values": cached}
    check_same_on_all_ranks(model.communication_groups, "generate", inputs, model.device)
    max_tokens = resolve_max_new_tokens(prompt, settings, files.get("max_length", ""))
    call = _make_call(model, assistant_model, prompt, settings, max_tokens, past_key_values)
    warn_unused(arguments, settings, assistant_model is not None, call.cache)
    warn_length(max(prompt.lengths()) + max_tokens, model.config.max_position_embeddings)
    rows = prompt.repeat(settings.num_return_sequences).ids
    stop = _make_stop_strings(settings, tokenizer, files)
    criteria = None
    if stopping_criteria:
        share = functools.partial(_first_of_ranks, model)
        criteria = StoppingCriteria(stopping_criteria, rows, share)
    emit = streamer.put if isinstance(streamer, Streamer) else streamer
    scores = call.recording.scores
    output = Continuations(rows, max_tokens, eos, pad, stop, emit, criteria, scores)
    if isinstance(streamer, Streamer):
        streamer.put(rows.cpu())
    fields = _run(call, output) if max_tokens else {"past_key_values": past_key_values}
    if isinstance(streamer, Streamer):
        streamer.end()
    # Outside of inference mode, so that the caller may train on the result
    sequences = torch.cat((rows, output.tensor().to(rows.device)), 1)
    as_dict = settings.return_dict_in_generate
    return GenerationOutput(sequences, **fields) if as_dict else sequences


def _make_stop_strings(
    settings: GenerationSettings, tokenizer: DecodingTokenizer | None, files: Mapping[str, str]
) -> StopStrings | None:
    """Returns what detects the call's stop strings; ValueError for some without a tokenizer."""
    if not settings.stop_strings:
        return None
    if tokenizer is None:
        text = f"stop_strings {quote(list(settings.stop_strings))} need the model's tokenizer"
        raise ValueError(f"{files.get('stop_strings', '')}{text}: tokenizer=")
    return StopStrings(settings.stop_strings, tokenizer)


def _make_call(
    model: GenerationModel,
    assistant: GenerationModel | None,
    prompt: PromptBatch,
    settings: GenerationSettings,
    max_tokens: int,
    past: KVCache | StaticCache | None,
) -> Call:
    """Chooses the cache; raises ValueError for one that does not fit, and if the scores of one
    token in all rows exceed the device's memory."""
    (prompts, tokens), vocab = prompt.ids.shape, model.config.vocab_size
    rows, as_dict = prompts * settings.num_return_sequences, settings.return_dict_in_generate
    subject = f"num_return_sequences={settings.num_return_sequences} of {prompts} prompts: their "
    subject += f"scores over {vocab} tokens take"
    check_memory(4 * rows * vocab, model.device, subject)
    outputs = ("scores", "logits") if as_dict else ()
    recording = Recording([x for x in outputs if getattr(settings, f"output_{x}")], rows)
    sampling = Sampling(settings, vocab, model.device, recording.last)
    kept_rows = rows if as_dict or past is not None else 0
    cache = choose_cache(model, assistant, settings, tokens + max_tokens, past, kept_rows)
    return Call(
        model, assistant, prompt, settings, max_tokens, sampling, recording, cache, past, kept_rows
    )


def _first_of_ranks(model: GenerationModel, x: Tensor) -> Tensor:
    """Returns x [n] of the first rank that shares the model, on all its ranks."""
    for ranks in model.communication_groups:
        x = ranks.gather(x)[: len(x)]
    return x


def _run(call: Call, output: Continuations) -> dict[str, Any]:
    """Generates on the model's device into `output`, until all its rows have ended.

    Returns the other fields of a GenerationOutput; none if no cache is kept.
    """
    device, in_step = call.prompt.ids.device, bool(call.model.communication_groups)
    with contextlib.ExitStack() as stack:
        # FSDP reuses its buffers in training, and the caller a cache, which inference mode would
        # not allow
        in_training = call.kept_rows or is_sharded(call.model)
        stack.enter_context(torch.no_grad() if in_training else torch.inference_mode())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            # The graph must outlive steps that are still running
            stack.callback(torch.cuda.current_stream(device).synchronize)
        steps = _make_steps(call, output)
        if not call.kept_rows:
            # Ranks that share a sharded model must all make the same number of steps
            run_steps(steps, output, 0 if call.cache == "dynamic" else LAG, in_step=in_step)
            return {}
        recorder = Recorder(steps, output, call.recording)
        run_steps(recorder, output, 0, in_step=in_step)
        return recorder.finish()


class Recorder:
    """Runs steps, records each at once, and leaves the cache of ended rows as it is."""

    def __init__(self, steps: CachedSteps, output: Continuations, recording: Recording):
        self._steps, self._output, self._recording = steps, output, recording
        self._unfinished = set(output.unfinished)

    def __call__(self, remaining: int) -> Tensor:
        """Returns the next tokens [B, n], or ABSENT."""
        self._recording.update(self._output.tokens)
        if self._output.unfinished != self._unfinished:
            self._unfinished = set(self._output.unfinished)
            counts = [len(tokens) for tokens in self._output.tokens]
            self._steps.hold({i: n for i, n in enumerate(counts) if i not in self._unfinished})
        return self._steps(remaining)

    def finish(self) -> dict[str, Any]:
        """Returns the fields of a GenerationOutput without the sequences, after the last step."""
        tokens = self._output.tokens
        cache = self._steps.finish([*map(len, tokens)])
        return self._recording.finish(tokens) | {"past_key_values": cache}


def _make_steps(call: Call, output: Continuations) -> CachedSteps:
    """Makes the steps of a call, which have read the prompts if their cache is a static one."""
    device, generator, seed = call.prompt.ids.device, None, call.settings.seed
    if call.model.communication_groups and seed is None and call.settings.do_sample:
        seed = int(_first_of_ranks(call.model, torch.randint(1 << 62, (1,), device=device)))
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
    draws = Draws(len(output.tokens), device, generator)
    if call.cache == "dynamic":
        return DynamicSteps(call, draws, output.pad)
    return StaticSteps(call, draws) if call.assistant is None else SpeculativeSteps(call, draws)
