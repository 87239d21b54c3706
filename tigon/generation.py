"""The sampling loop over any causal language model.

# B batch, T prompt tokens, V vocab
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.layers import KVCache

# transformers' defaults for whatever neither the call nor generation_config.json says
DEFAULTS: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "eos_token_id": (),
    "stop_strings": (),
}
DEFAULT_NEW_TOKENS = 20
SAMPLING = ("temperature", "top_k", "top_p", "min_p")

# Keys of generation_config.json that change the output and are not followed here, with the
# values besides null at which they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


class Model(Protocol):
    """What the loop needs of a model."""

    config: Any
    generation_config: dict[str, Any]

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any: ...


class Decodes(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@runtime_checkable
class Streamer(Protocol):
    """transformers' streamers: the prompt, then the new tokens of each step, then the end."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores [B, V] where `seen` is True move down: positive / penalty, negative * penalty."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """-inf below the k-th largest score of a row; scores equal to it all stay."""
    kth = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < kth, float("-inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """-inf outside the smallest set of tokens whose probability reaches p."""
    ascending, order = scores.sort()
    remove = ascending.softmax(-1).cumsum(-1) <= 1 - p
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), float("-inf"))


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """-inf where the probability is below p times the largest of the row."""
    probabilities = scores.softmax(-1)
    floor = p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < floor, float("-inf"))


@dataclass(frozen=True)
class Sampling:
    """How logits become a token: transformers' processors, in transformers' order."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    def __post_init__(self) -> None:
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is not above 0")
        if not self.do_sample:
            return
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} is not above 0; do_sample=False is greedy"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is not in [0, 1]")

    def scores(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Logits [B, V] of the next token to the fp32 scores that it is chosen by."""
        scores = logits.float()
        if seen is not None:
            scores = penalize_repetition(scores, seen, self.repetition_penalty)
        if not self.do_sample:
            return scores
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k:
            scores = keep_top_k(scores, self.top_k)
        if self.top_p < 1:
            scores = keep_top_p(scores, self.top_p)
        return keep_min_p(scores, self.min_p) if self.min_p else scores

    def __call__(
        self, logits: Tensor, seen: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The next token of every row: [B]."""
        scores = self.scores(logits, seen)
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)


class StopStrings:
    """Whether the last token of a row completed one of the strings, wherever that began."""

    def __init__(self, strings: Sequence[str], tokenizer: Decodes):
        self.strings, self.tokenizer = strings, tokenizer
        # A token is at least a byte. One more, since decoders treat the first of a text apart
        self.window = max(len(s.encode()) for s in strings) + 1

    def __call__(self, tokens: Tensor) -> list[bool]:
        """For tokens [B, any]: prompt and continuation."""
        return [self._completes(row) for row in tokens[:, -self.window :].tolist()]

    def _completes(self, ids: list[int]) -> bool:
        before = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        # An unfinished character is U+FFFD until its last byte
        old = len(before.rstrip("\ufffd"))
        return any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self.strings)


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
) -> Tensor:
    """Prompt and continuation [B, T + new], as transformers' `generate` makes them.

    What the call leaves open comes from `model.generation_config`, then from the config (eos and
    pad), then from transformers' defaults: greedy; with `do_sample` temperature 1 and top_k 50
    (0 is off); 20 new tokens when there is neither max_new_tokens nor max_length (prompt and
    continuation). A row ends after an eos token (`eos_token_id=[]`: none) or after the token that
    completes a stop string (decoded with `tokenizer`), and is then filled with pad_token_id, or
    eos without one. With a seed a call always samples the same tokens and leaves the global
    random state alone; without one it uses that state. `streamer` is called with the new tokens
    [B] of each step; an object with `put` and `end` is used as transformers uses its streamers.
    """
    settings = _settle(
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
    stop = _stop_strings(strings, tokenizer)
    prompt, mask = _prompt(model, input_ids, attention_mask)
    b, t = prompt.shape
    total = _total(t, max_new_tokens, max_length, model.generation_config)
    if pad is None or pad < 0:  # old configs say -1 for none
        if stop is not None and not eos and b > 1:
            raise ValueError("stop_strings for several rows need pad_token_id to fill short ones")
        pad = eos[0] if eos else 0
    if streamer is None:
        emit: Callable[[Tensor], object] | None = None
    elif isinstance(streamer, Streamer):
        emit = streamer.put
        emit(prompt.cpu())
    else:
        emit = streamer

    # FSDP keeps what it gathers in, and could not train with memory of inference mode
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    # Allocated outside of that mode, for the caller may train on what comes back
    tokens = prompt.new_full((b, total), pad)
    tokens[:, :t] = prompt
    with torch.no_grad() if sharded else torch.inference_mode():
        length = _decode(model, tokens, t, mask, sampling, eos, pad, stop, seed, emit, use_cache)
    if isinstance(streamer, Streamer):
        streamer.end()
    return tokens[:, :length]


def _decode(
    model: Model,
    tokens: Tensor,  # [B, most tokens], filled in place
    prompt: int,
    mask: Tensor | None,  # [B, T]
    sampling: Sampling,
    eos: Sequence[int],
    pad: int,
    stop: StopStrings | None,
    seed: int | None,
    emit: Callable[[Tensor], object] | None,
    use_cache: bool,
) -> int:
    """The loop; returns how many columns of `tokens` are filled."""
    b, total = tokens.shape
    device = tokens.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    ends = torch.tensor(eos, device=device)
    done = torch.zeros(b, dtype=torch.bool, device=device)
    cache = KVCache() if use_cache else None
    visible = positions = seen = None
    if mask is not None:
        visible = torch.ones(b, total, dtype=torch.bool, device=device)
        visible[:, :prompt] = mask
        positions = (visible.cumsum(-1) - 1).clamp_(min=0)
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(b, model.config.vocab_size, dtype=torch.bool, device=device)
        present = torch.ones_like(tokens[:, :prompt], dtype=torch.bool) if mask is None else mask
        # Padding's ids may stand for real tokens of the same row: only ever turn True
        seen.scatter_reduce_(1, tokens[:, :prompt], present, "amax")

    for n in range(prompt, total):
        if cache is not None and n == model.config.cache_restart:
            cache = KVCache()
        start = 0 if cache is None or cache.length == 0 else n - 1
        logits = model(
            tokens[:, start:n],
            attention_mask=None if visible is None else visible[:, :n],
            position_ids=None if positions is None else positions[:, start:n],
            past_key_values=cache,
            use_cache=use_cache,
            logits_to_keep=1,
        ).logits[:, -1]
        new = sampling(logits, seen, generator)
        if n > prompt and (eos or stop is not None):
            new = torch.where(done, pad, new)
        tokens[:, n] = new
        if seen is not None:
            seen.scatter_(1, new[:, None], True)
        if emit is not None:
            emit(new)
        if eos:
            done = done | (new[:, None] == ends).any(-1)
        if stop is not None:
            done = done | torch.tensor(stop(tokens[:, : n + 1]), device=device)
        if (eos or stop is not None) and n + 1 < total and done.all():
            return n + 1
    return total


def _settle(model: Model, **given: Any) -> dict[str, Any]:
    """Every setting: the call's, or generation_config's, or the config's, or the default."""
    source = model.generation_config
    for key, harmless in UNSUPPORTED.items():
        value = source.get(key)
        if value is not None and value not in harmless:
            raise ValueError(
                f"generation_config has {key}={value!r}, which generate does not follow; "
                f"del model.generation_config[{key!r}] to do without"
            )
    tokens = {k: getattr(model.config, k, None) for k in ("eos_token_id", "pad_token_id")}
    settings: dict[str, Any] = dict.fromkeys(given)
    for layer in (DEFAULTS, tokens, source, given):
        settings |= {k: layer[k] for k in settings if layer.get(k) is not None}
    unused = [k for k in SAMPLING if given[k] is not None and not settings["do_sample"]]
    if unused:
        warnings.warn(f"without do_sample=True, {', '.join(unused)} do nothing", stacklevel=3)
    if isinstance(settings["eos_token_id"], int):
        settings["eos_token_id"] = [settings["eos_token_id"]]
    if isinstance(settings["stop_strings"], str):
        settings["stop_strings"] = [settings["stop_strings"]]
    return settings


def _stop_strings(strings: Sequence[str], tokenizer: Decodes | None) -> StopStrings | None:
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings {list(strings)} need the model's tokenizer: tokenizer=")
    if "" in strings:
        raise ValueError(f"stop_strings has an empty string: {list(strings)}")
    return StopStrings(strings, tokenizer)


def _prompt(model: Model, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Prompt and its mask on the model's device; no mask when there is no padding."""
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"input_ids must be integers [B, T], not {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise ValueError(f"input_ids {tuple(ids.shape)} is an empty prompt")
    vocab = model.config.vocab_size
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):
        row, column = ((ids < 0) | (ids >= vocab)).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}] is {ids[row, column]}, outside the vocabulary [0, {vocab})"
        )
    if mask is not None:
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} does not fit input_ids {tuple(ids.shape)}"
            )
        mask = mask.to(device=model.device, dtype=torch.bool)
        if mask.all():
            mask = None
        elif not mask[:, -1].all():
            row = int(mask[:, -1].int().argmin())
            raise ValueError(f"row {row} of attention_mask ends in padding; pad on the left")
    return ids.to(device=model.device, dtype=torch.long), mask


def _total(prompt: int, new: int | None, length: int | None, source: Mapping[str, Any]) -> int:
    """Most tokens of prompt and continuation together."""
    if new is not None and length is not None:
        raise ValueError(f"max_new_tokens={new} and max_length={length}: give one of them")
    if new is None and length is None:
        new, length = source.get("max_new_tokens"), source.get("max_length")
    if new is None:
        new = DEFAULT_NEW_TOKENS if length is None else length - prompt
        if new <= 0:
            raise ValueError(
                f"max_length={length} leaves no room after a prompt of {prompt} tokens"
            )
    if new < 0:
        raise ValueError(f"max_new_tokens={new} is negative")
    return prompt + new
