"""The settings of generate: defaults, sources in order of precedence, and checks."""

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


@dataclass(frozen=True)
class GenerationSettings:
    """All settings of a call, with transformers' defaults.

    Values that only sampling uses are checked by `_check_values`.
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
    return_dict_in_generate: bool = False
    output_scores: bool = False
    output_logits: bool = False


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GenerationSettings)}
NONE_VALUES = DEFAULTS | {"top_k": 0}  # the meaning of None in a call
DEFAULT_NEW_TOKENS = 20
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
TOKEN_SETTINGS = ("eos_token_id", "pad_token_id")
OUTPUTS = ("output_scores", "output_logits")
# Settings that are not read from the model's files
CALL_ONLY = (
    "seed",
    "use_cache",
    "cache_implementation",
    "prefill_chunk_size",
    "num_assistant_tokens",
    "return_dict_in_generate",
    *OUTPUTS,
)


# Arguments of transformers' generate that are not supported, by the value besides None with which
# they change nothing
_UNSUPPORTED_BY_NEUTRAL_VALUE: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
        "inputs_embeds max_time prefix_allowed_tokens_fn top_h watermarking_config",
    ),
    (
        ([],),
        "bad_words_ids begin_suppress_tokens constraints force_words_ids logits_processor "
        "suppress_tokens",
    ),
    (
        (0,),
        "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length "
        "no_repeat_ngram_size penalty_alpha",
    ),
    ((1,), "encoder_repetition_penalty guidance_scale num_beam_groups num_beams typical_p"),
    ((False,), "output_attentions output_hidden_states synced_gpus token_healing"),
    ((False, True), "disable_compile"),
    (([], {}), "sequence_bias"),
)
UNSUPPORTED = {
    name: neutral for neutral, names in _UNSUPPORTED_BY_NEUTRAL_VALUE for name in names.split()
}


def resolve_settings(
    model: GenerationModel, generation_config: Any, arguments: Mapping[str, Any]
) -> tuple[GenerationSettings, dict[str, str]]:
    """Resolves every setting: the call, generation_config, the model's, its config, the default.

    `arguments` are the call's. Also returns the path of the model's generation_config.json, as the
    prefix of a message, for each setting that comes from it.
    """
    model_values = _values("model.generation_config", model.generation_config)
    passed = _values("generation_config", generation_config)
    from_files = model_values.keys() - passed.keys() - arguments.keys()
    files = {name: file_prefix(model) for name in from_files}
    unsupported = {k: v for k, v in arguments.items() if k not in DEFAULTS}
    _check_unsupported(model_values | passed, unsupported, files)
    new, total = (arguments.get(name) for name in ("max_new_tokens", "max_length"))
    if new is not None and total is not None:
        raise ValueError(f"max_new_tokens={new} and max_length={total}: give one of them")
    config = {k: getattr(model.config, k, None) for k in TOKEN_SETTINGS}
    call = {k: NONE_VALUES.get(k) if v is None else v for k, v in arguments.items()}
    settings = dict(DEFAULTS)
    for layer in (
        _drop_none(config),
        {k: v for k, v in model_values.items() if k not in CALL_ONLY},
        passed,
        call,
    ):
        if layer.get("max_length") is not None:  # overrides max_new_tokens of lower layers
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
    # Ids of files beyond the vocabulary are never generated; negative ones could fill rows
    read["eos_token_id"] = tuple(i for i in read["eos_token_id"] if i >= 0)
    if (read["pad_token_id"] or 0) < 0:
        read["pad_token_id"] = None
    _check_values(read, files)
    return GenerationSettings(**read), files


def set_do_sample(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with do_sample: not with temperature 0, but with another of SAMPLING."""
    if settings.get("temperature") == 0:
        return {**settings, "do_sample": False, "temperature": None}
    return {**settings} | ({"do_sample": True} if settings.keys() & {*SAMPLING} else {})


def _check_values(values: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Raises ValueError for a number that this call cannot use; `files` prefixes messages."""
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
    """Returns whether scores in fp32 can be divided by it: a positive number of a usual size."""
    return SMALLEST_FACTOR <= value <= LARGEST_FACTOR


def file_prefix(model: GenerationModel) -> str:
    """Returns the path of the model's generation_config.json, as the prefix of a message."""
    source = getattr(model.config, "source", None)
    return f"{escape(Path(getattr(source, 'name', ''), 'generation_config.json'))}: "


def check_generation_config(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value of generation_config.json of a wrong type or range."""
    known = {k: v for k, v in _drop_none(values).items() if k in DEFAULTS and k not in CALL_ONLY}
    tokens = {k: _tokens(known[k], None) for k in TOKEN_SETTINGS if k in known}
    read_settings(GenerationSettings, _drop_none(known | tokens))


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _values(name: str, config: Any) -> dict[str, Any]:
    """Returns the values that are not None of a generation_config: a dict, transformers' object or
    None. `name` begins a message."""
    config = config.to_dict() if hasattr(config, "to_dict") else config or {}
    if not isinstance(config, Mapping):
        raise TypeError(f"{name}={config!r} is neither a dict nor a GenerationConfig")
    return _drop_none(config)


def _check_unsupported(
    configured: Mapping[str, Any], unsupported: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Raises TypeError for unknown arguments of the call, and ValueError for unsupported ones, of
    call or config, with values that change the output."""
    unknown = [name for name in unsupported if name not in UNSUPPORTED]
    if unknown:
        hints = (suggest(name, ("input_ids", *DEFAULTS)) for name in unknown)
        message = f"generate has no argument {', '.join(map(repr, unknown))}"
        raise TypeError("; ".join([message, *filter(None, hints)]))
    values = {**configured, **unsupported}
    for key, harmless in UNSUPPORTED.items():
        value = values.get(key)
        if value is not None and value not in harmless:
            where = "" if key in unsupported else f"{files.get(key, '')}generation_config has "
            raise ValueError(
                f"{where}{key}={quote(value)}, which generate does not support: give {key}=None"
            )


def _tokens(value: Any, none: Any) -> Any:
    """Returns token ids as a list without None and -1, a single id as it is or `none`."""

    def is_token(i: Any) -> bool:
        return i is not None and not (isinstance(i, Integral) and i == -1)

    if isinstance(value, list | tuple):
        return [i for i in value if is_token(i)]
    return value if is_token(value) else none


def warn_unused(
    arguments: Mapping[str, Any], settings: GenerationSettings, assisted: bool, cache: str
) -> None:
    """Warns of arguments of the call that have no effect."""
    for used, needed, names in (
        (settings.do_sample, "do_sample=True", (*SAMPLING, "seed")),
        (assisted, "assistant_model", ("num_assistant_tokens",)),
        (cache != "dynamic", "a static cache", ("prefill_chunk_size",)),
        (settings.return_dict_in_generate, "return_dict_in_generate=True", OUTPUTS),
    ):
        unused = [n for n in names if arguments.get(n) is not None and arguments[n] is not False]
        if unused and not used:
            warnings.warn(f"{', '.join(unused)} has no effect without {needed}", stacklevel=3)


def warn_length(longest: int, context: int) -> None:
    """Warns if text becomes longer than the context that the model was trained on."""
    if longest > context:
        warnings.warn(
            f"a text of up to {longest} tokens exceeds max_position_embeddings={context}: its end "
            "may make little sense",
            stacklevel=3,
        )


def resolve_max_new_tokens(prompt: PromptBatch, settings: GenerationSettings, file: str) -> int:
    """Returns the limit of tokens after the prompt, 20 if the settings have none.

    Raises ValueError, with the prefix `file`, for a max_length that the prompt takes up.
    """
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    if settings.max_length is None:
        return DEFAULT_NEW_TOKENS
    length = prompt.ids.shape[1]
    if settings.max_length <= length:
        raise ValueError(
            f"{file}max_length={settings.max_length} leaves no room after a prompt of {length} "
            "tokens"
        )
    return settings.max_length - length
