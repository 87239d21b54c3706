"""What a call to generate leaves open, and what it gives that cannot be.

# B rows, T prompt tokens
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.generation.protocols import Decodes, Model
from tigon.generation.stopping import StopStrings

Caches = Literal["dynamic", "static", "quantized"]

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


class Prompt(NamedTuple):
    """On the model's device; padding is on the left."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T], True on real tokens; None: all are

    def lengths(self) -> list[int]:
        """Real tokens of each row, for which the host waits."""
        b, t = self.ids.shape
        return [t] * b if self.mask is None else self.mask.sum(1).tolist()


def settle(model: Model, **given: Any) -> dict[str, Any]:
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


def find_stops(strings: Sequence[str], tokenizer: Decodes | None) -> StopStrings | None:
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings {list(strings)} need the model's tokenizer: tokenizer=")
    if "" in strings:
        raise ValueError(f"stop_strings has an empty string: {list(strings)}")
    return StopStrings(strings, tokenizer)


def check_prompt(model: Model, ids: Tensor, mask: Tensor | None) -> Prompt:
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
    return Prompt(ids.to(device=model.device, dtype=torch.long), mask)


def most_new(prompt: int, new: int | None, length: int | None, source: Mapping[str, Any]) -> int:
    """Most tokens that a row may get."""
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
    return new


def is_sharded(model: Model) -> bool:
    """Whether FSDP gathers the parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def choose_cache(
    model: Model, asked: Caches | None, total: int, sharded: bool, use_cache: bool
) -> Caches:
    """The cache for up to `total` tokens: a static one on a GPU wherever it is exact."""
    if asked is not None and asked not in get_args(Caches):
        raise ValueError(
            f"cache_implementation={asked!r} is not one of {', '.join(get_args(Caches))}"
        )
    if not use_cache and asked is not None:
        raise ValueError(f"use_cache=False and cache_implementation={asked!r}: give one of them")
    if not use_cache or asked == "dynamic":
        return "dynamic"
    obstacle = "FSDP gathers parameters step by step" if sharded else _turning(model, total)
    if obstacle is None:
        return asked or ("static" if model.device.type == "cuda" else "dynamic")
    if asked is not None:
        raise ValueError(f"cache_implementation={asked!r}: {obstacle}; take 'dynamic'")
    return "dynamic"


def _turning(model: Model, total: int) -> str | None:
    """Why keys that were rotated in one call would be rotated otherwise in the next, if so."""
    config = model.config
    for rope in config.ropes.values():
        kind = rope.get("rope_type")
        fixed = {
            "dynamic": config.max_position_embeddings,
            "longrope": rope.get("original_max_position_embeddings"),
        }.get(kind, total)
        if total > fixed:
            return f"{kind} RoPE rotates all keys anew when a text of up to {total} passes {fixed}"
    return None


def check_assistant(
    model: Model, assistant: Model, proposals: int, total: int, goes_back: bool
) -> None:
    """Whether one can propose to the other, for texts of up to `total` tokens."""
    if not goes_back:
        raise ValueError(
            "assistant_model needs a cache that can go back: cache_implementation='static' or "
            "'quantized'"
        )
    if proposals < 1:
        raise ValueError(f"num_assistant_tokens={proposals} is not above 0")
    theirs, ours = assistant.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        raise ValueError(
            f"assistant_model has a vocabulary of {theirs} tokens, but the model one of {ours}: "
            "only a model with the same tokenizer can propose tokens"
        )
    if assistant.device != model.device:
        raise ValueError(
            f"assistant_model is on {assistant.device}, but the model on {model.device}"
        )
    obstacle = _turning(assistant, total)
    if obstacle is not None:
        raise ValueError(f"assistant_model: {obstacle}, which its static cache cannot follow")
