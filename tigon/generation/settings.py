"""What a call to generate leaves open, and what it gives that cannot be."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from tigon.generation.caches import Caches
from tigon.generation.protocols import Model


class _Unset:
    """Stands where no argument was given, since None turns a setting off."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class Settings:
    """All that a call can leave open, with transformers' defaults."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int = 0
    num_return_sequences: int = 1
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_id: Sequence[int] = ()
    pad_token_id: int | None = None
    stop_strings: Sequence[str] = ()
    seed: int | None = None
    use_cache: bool = True
    cache_implementation: Caches | None = None
    prefill_chunk_size: int = 8192
    num_assistant_tokens: int = 5


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Settings)}
OFF = DEFAULTS | {"top_k": 0}  # what None means in a call
DEFAULT_NEW_TOKENS = 20
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
TOKENS = ("eos_token_id", "pad_token_id")
# How a call runs is no matter of the model's files
OURS = ("seed", "use_cache", "cache_implementation", "prefill_chunk_size", "num_assistant_tokens")


class Rule(NamedTuple):
    kind: type  # bool, Integral or Real
    minimum: float = -math.inf
    maximum: float = math.inf


# The bounds of the numbers that only sampling goes by are checked where they are used
RULES = {
    "max_new_tokens": Rule(Integral, 0),
    "max_length": Rule(Integral, 1),
    "min_new_tokens": Rule(Integral, 0),
    "num_return_sequences": Rule(Integral, 1),
    "do_sample": Rule(bool),
    "temperature": Rule(Real),
    "top_k": Rule(Integral),
    "top_p": Rule(Real),
    "min_p": Rule(Real),
    "repetition_penalty": Rule(Real),
    "seed": Rule(Integral, -(2**63), 2**64 - 1),
    "use_cache": Rule(bool),
    "prefill_chunk_size": Rule(Integral, 1),
    "num_assistant_tokens": Rule(Integral, 1),
}
KINDS = {bool: "True or False", Integral: "a whole number", Real: "a number"}

# What transformers' generate takes, changes the output, and is not followed here, with the values
# besides None at which it changes nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "disable_compile": (False, True),
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
    "inputs_embeds": (),
    "logits_processor": ([],),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "past_key_values": (),
    "penalty_alpha": (0,),
    "prefix_allowed_tokens_fn": (),
    "return_dict_in_generate": (False,),
    "sequence_bias": ([], {}),
    "stopping_criteria": ([],),
    "suppress_tokens": ([],),
    "synced_gpus": (False,),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


def settle(
    model: Model, generation_config: Any, given: Mapping[str, Any], others: Mapping[str, Any]
) -> Settings:
    """Every setting: of the call, generation_config, the model's own, its config, or the default.

    `given` are the arguments that were given, and `others` those that generate has no name for.
    """
    own = _values("model.generation_config", model.generation_config)
    passed = _values("generation_config", generation_config)
    _check_others(own | passed, others)
    if given.get("max_new_tokens") is not None and given.get("max_length") is not None:
        raise ValueError(
            f"max_new_tokens={given['max_new_tokens']} and max_length={given['max_length']}: "
            "give one of them"
        )
    config = {k: getattr(model.config, k, None) for k in TOKENS}
    call = {k: OFF[k] if v is None else v for k, v in given.items()}
    settings = dict(DEFAULTS)
    for layer in (_set(config), {k: v for k, v in own.items() if k not in OURS}, passed, call):
        if layer.get("max_length") is not None:  # it comes before another's max_new_tokens
            settings["max_new_tokens"] = None
        settings |= {k: v for k, v in layer.items() if k in settings}
    for name, rule in RULES.items():
        settings[name] = _check(name, settings[name], rule)
    # Ids that files have beyond the vocabulary do no harm: they are never generated
    for name in TOKENS:
        vocab = model.config.vocab_size if name in passed or name in call else None
        settings[name] = _tokens(name, settings[name], vocab)
    settings["stop_strings"] = _strings(settings["stop_strings"])
    copies = settings["num_return_sequences"]
    if copies > 1 and not settings["do_sample"]:
        raise ValueError(
            f"num_return_sequences={copies} need do_sample=True, else all are the same"
        )
    return Settings(**settings)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _values(name: str, config: Any) -> dict[str, Any]:
    """What a generation_config sets, as a mapping or as transformers' object."""
    config = config.to_dict() if hasattr(config, "to_dict") else config or {}
    if not isinstance(config, Mapping):
        raise TypeError(f"{name}={config!r} is neither a dict nor a GenerationConfig")
    return _set(config)


def _check_others(configured: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """What is not followed must not be asked for."""
    unknown = [repr(name) for name in others if name not in UNSUPPORTED]
    if unknown:
        raise TypeError(f"generate has no argument {', '.join(unknown)}")
    asked = {**configured, **others}
    for key, harmless in UNSUPPORTED.items():
        value = asked.get(key)
        if value is not None and value not in harmless:
            where = "" if key in others else "generation_config has "
            raise ValueError(
                f"{where}{key}={value!r}, which generate does not follow; give {key}=None "
                "to do without"
            )


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check(name: str, value: Any, rule: Rule) -> Any:
    """The value as a number of Python's, if it is one, or None."""
    if value is None:
        return None
    if not _is(value, rule.kind):
        raise TypeError(f"{name}={value!r} is not {KINDS[rule.kind]}")
    if value < rule.minimum:
        raise ValueError(f"{name}={value} is below {rule.minimum}")
    if value > rule.maximum:
        raise ValueError(f"{name}={value} is above {rule.maximum}")
    return float(value) if rule.kind is Real else int(value) if rule.kind is Integral else value


def _tokens(name: str, value: Any, vocab: int | None) -> Any:
    """One token id or None; of eos_token_id a list. Old files say -1 for none."""
    several = name == "eos_token_id"
    ids = value if several and isinstance(value, list | tuple) else [value]
    ids = [i for i in ids if i is not None and not (_is(i, Integral) and i == -1)]
    for i in ids:
        if not _is(i, Integral):
            raise TypeError(f"{name}={value!r} is not a token id{' or a list' * several}")
        if vocab is not None and not 0 <= i < vocab:
            raise ValueError(f"{name}={value!r} is outside the vocabulary [0, {vocab})")
    return ids if several else next(iter(ids), None)


def _strings(value: Any) -> Sequence[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop_strings={value!r} is not a string or a list of strings")
    if "" in strings:
        raise ValueError(f"stop_strings has an empty string: {list(strings)}")
    return strings


def warn_of_unused(given: Mapping[str, Any], do_sample: bool, assisted: bool, cache: str) -> None:
    """About arguments that change nothing, whoever calls generate."""
    for used, needed, names in (
        (do_sample, "do_sample=True", SAMPLING),
        (assisted, "assistant_model", ("num_assistant_tokens",)),
        (cache != "dynamic", "a static cache", ("prefill_chunk_size",)),
    ):
        unused = [name for name in names if given.get(name) is not None]
        if unused and not used:
            warnings.warn(f"without {needed}, nothing comes of {', '.join(unused)}", stacklevel=3)


def max_new(prompt: int, settings: Settings) -> int:
    """Most tokens that a row may get after a prompt of so many."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    if settings.max_length is None:
        return DEFAULT_NEW_TOKENS
    if settings.max_length <= prompt:
        raise ValueError(
            f"max_length={settings.max_length} leaves no room after a prompt of {prompt} tokens"
        )
    return settings.max_length - prompt
