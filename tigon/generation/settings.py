"""What a call to generate leaves open, and what it gives that cannot be."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from tigon.generation.prompt import GenerationModel, PromptBatch
from tigon.utils.config import read_settings, setting, suggest
from tigon.utils.json import escape, quote

MAX_INT32 = 2**31 - 1  # of lengths and token ids, as in config.json
MOST_SEQUENCES = 2**16
MOST_PROPOSALS = 2**10
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30  # what scores in fp32 can be divided by
CacheImplementation = Literal["dynamic", "static", "quantized"]


class _Unset:
    """Stands where no argument was given, since None turns a setting off."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class GenerationSettings:
    """All that a call can leave open, with transformers' defaults.

    What only sampling goes by is checked where it is used.
    """

    max_new_tokens: int | None = setting(None, ge=0, le=MAX_INT32)
    max_length: int | None = setting(None, ge=1, le=MAX_INT32)
    min_new_tokens: int = setting(0, ge=0, le=MAX_INT32)
    num_return_sequences: int = setting(1, ge=1, le=MOST_SEQUENCES)
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_id: tuple[int, ...] = setting((), le=MAX_INT32)
    pad_token_id: int | None = setting(None, le=MAX_INT32)
    stop_strings: tuple[str, ...] = ()
    seed: int | None = setting(None, ge=-(2**63), le=2**64 - 1)
    use_cache: bool = True
    cache_implementation: CacheImplementation | None = None
    prefill_chunk_size: int = setting(8192, ge=1, le=MAX_INT32)
    num_assistant_tokens: int = setting(5, ge=1, le=MOST_PROPOSALS)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GenerationSettings)}
NONE_VALUES = DEFAULTS | {"top_k": 0}  # what None means in a call
DEFAULT_NEW_TOKENS = 20
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")
TOKEN_SETTINGS = ("eos_token_id", "pad_token_id")
# How a call runs is no matter of the model's files
CALL_ONLY = (
    "seed",
    "use_cache",
    "cache_implementation",
    "prefill_chunk_size",
    "num_assistant_tokens",
)


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


def resolve_settings(
    model: GenerationModel,
    generation_config: Any,
    given: Mapping[str, Any],
    others: Mapping[str, Any],
) -> tuple[GenerationSettings, dict[str, str]]:
    """Every setting: of the call, generation_config, the model's own, its config, or the default.

    `given` are the arguments that were given, and `others` those that generate has no name for.
    The second is what begins a message about a setting of the model's own: its file, by name.
    """
    own = _values("model.generation_config", model.generation_config)
    passed = _values("generation_config", generation_config)
    files = {name: file_prefix(model) for name in own.keys() - passed.keys() - given.keys()}
    _check_others(own | passed, others, files)
    if given.get("max_new_tokens") is not None and given.get("max_length") is not None:
        raise ValueError(
            f"max_new_tokens={given['max_new_tokens']} and max_length={given['max_length']}: "
            "give one of them"
        )
    config = {k: getattr(model.config, k, None) for k in TOKEN_SETTINGS}
    call = {k: NONE_VALUES[k] if v is None else v for k, v in given.items()}
    settings = dict(DEFAULTS)
    for layer in (_set(config), {k: v for k, v in own.items() if k not in CALL_ONLY}, passed, call):
        if layer.get("max_length") is not None:  # it comes before another's max_new_tokens
            settings["max_new_tokens"] = None
        settings |= {k: v for k, v in layer.items() if k in settings}
    settings["eos_token_id"] = _tokens(settings["eos_token_id"], ())
    settings["pad_token_id"] = _tokens(settings["pad_token_id"], None)
    read = read_settings(GenerationSettings, settings)
    if "" in read["stop_strings"]:
        strings = quote(list(read["stop_strings"]))
        file = files.get("stop_strings", "")
        raise ValueError(f"{file}stop_strings has an empty string: {strings}")
    vocab = model.config.vocab_size
    for name in TOKEN_SETTINGS:
        ids = read[name] if isinstance(read[name], tuple) else (read[name],)
        outside = [i for i in ids if i is not None and not 0 <= i < vocab]
        if outside and (name in passed or name in call):
            raise ValueError(f"{name}={outside[0]} is outside the vocabulary [0, {vocab})")
    # Ids that files have beyond the vocabulary do no harm: they are never generated. Rows could be
    # filled with negative ones
    read["eos_token_id"] = tuple(i for i in read["eos_token_id"] if i >= 0)
    if (read["pad_token_id"] or 0) < 0:
        read["pad_token_id"] = None
    _check_values(read, files)
    return GenerationSettings(**read), files


def _check_values(values: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """ValueError for a number that cannot be used as it is now; `files`: where a value is from."""
    factor = f"is not above 0, between {SMALLEST_FACTOR} and {LARGEST_FACTOR}"
    sampled = {
        "temperature": (_is_factor, f"{factor}; do_sample=False is greedy"),
        "top_k": (lambda k: k >= 0, "is negative; 0 keeps every token"),
        "top_p": (lambda p: 0 < p <= 1, "is not in (0, 1]"),
        "min_p": (lambda p: 0 <= p <= 1, "is not in [0, 1]"),
    }
    greedy = {
        "num_return_sequences": (lambda n: n == 1, "need do_sample=True, else all are the same")
    }
    checks = {"repetition_penalty": (_is_factor, factor)}
    for name, (fits, fault) in (checks | (sampled if values["do_sample"] else greedy)).items():
        if not fits(values[name]):
            raise ValueError(f"{files.get(name, '')}{name}={quote(values[name])} {fault}")


def _is_factor(value: float) -> bool:
    return SMALLEST_FACTOR <= value <= LARGEST_FACTOR


def file_prefix(model: GenerationModel) -> str:
    """The model's generation_config.json, to begin a message with."""
    source = getattr(model.config, "source", None)
    return f"{escape(Path(getattr(source, 'name', ''), 'generation_config.json'))}: "


def check_generation_config(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value of a generation_config.json of another type or range than its
    setting, wherever it is not used too."""
    known = {k: v for k, v in _set(values).items() if k in DEFAULTS and k not in CALL_ONLY}
    tokens = {k: _tokens(known[k], None) for k in TOKEN_SETTINGS if k in known}
    read_settings(GenerationSettings, _set(known | tokens))


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _values(name: str, config: Any) -> dict[str, Any]:
    """What a generation_config sets, as a mapping or as transformers' object."""
    config = config.to_dict() if hasattr(config, "to_dict") else config or {}
    if not isinstance(config, Mapping):
        raise TypeError(f"{name}={config!r} is neither a dict nor a GenerationConfig")
    return _set(config)


def _check_others(
    configured: Mapping[str, Any], others: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """What is not followed must not be asked for."""
    unknown = [name for name in others if name not in UNSUPPORTED]
    if unknown:
        hints = (suggest(name, DEFAULTS) for name in unknown)
        message = f"generate has no argument {', '.join(map(repr, unknown))}"
        raise TypeError("; ".join([message, *filter(None, hints)]))
    asked = {**configured, **others}
    for key, harmless in UNSUPPORTED.items():
        value = asked.get(key)
        if value is not None and value not in harmless:
            where = "" if key in others else f"{files.get(key, '')}generation_config has "
            raise ValueError(
                f"{where}{key}={quote(value)}, which generate does not follow; give {key}=None "
                "to do without"
            )


def _tokens(value: Any, none: Any) -> Any:
    """Token ids without None and -1, which old files say for no token."""

    def given(i: Any) -> bool:
        return i is not None and not (isinstance(i, Integral) and i == -1)

    if isinstance(value, list | tuple):
        return [i for i in value if given(i)]
    return value if given(value) else none


def warn_unused(given: Mapping[str, Any], do_sample: bool, assisted: bool, cache: str) -> None:
    """About arguments that change nothing, whoever calls generate."""
    for used, needed, names in (
        (do_sample, "do_sample=True", SAMPLING_SETTINGS),
        (assisted, "assistant_model", ("num_assistant_tokens",)),
        (cache != "dynamic", "a static cache", ("prefill_chunk_size",)),
    ):
        unused = [name for name in names if given.get(name) is not None]
        if unused and not used:
            warnings.warn(f"without {needed}, nothing comes of {', '.join(unused)}", stacklevel=3)


def warn_length(longest: int, context: int) -> None:
    if longest > context:
        warnings.warn(
            f"a text of up to {longest} tokens is longer than the {context} of the model's "
            "max_position_embeddings; it may make little sense beyond those",
            stacklevel=3,
        )


def resolve_max_new_tokens(prompt: PromptBatch, settings: GenerationSettings, file: str) -> int:
    """Most tokens that a row may get after the prompt. `file` begins a message on max_length."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    if settings.max_length is None:
        return DEFAULT_NEW_TOKENS
    held = prompt.ids.shape[1]
    if settings.max_length <= held:
        raise ValueError(
            f"{file}max_length={settings.max_length} leaves no room after a prompt of {held} tokens"
        )
    return settings.max_length - held
