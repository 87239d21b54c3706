"""transformers' generate: by Tigon's own loop where that follows all that is asked, else by
transformers' loop over the forward pass of a Tigon model.

# B rows, T prompt tokens
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from tigon.generation import GenerationOutput
from tigon.generation.settings import SAMPLING, UNSUPPORTED
from tigon.integrations.transformers.cache import TigonCache, take_over
from tigon.layers import StaticCache
from tigon.models.causal_lm import CausalLM

# Settings that have one meaning in both loops; lengths are computed from others
SAME = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("stop_strings", "num_return_sequences", "use_cache"),
    *("cache_implementation", "return_dict_in_generate", "output_scores", "output_logits"),
)
TOKENS = ("eos_token_id", "pad_token_id")
LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
# Settings that change no token: of files, of compilation, of drafts and of beams
WITHOUT_EFFECT = (
    *("bos_token_id", "transformers_version", "compile_config", "disable_compile"),
    *("max_cache_len", "cache_config", "early_stopping", "length_penalty", "low_memory"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "prefill_chunk_size", "is_assistant"),
)
FOLLOWED = frozenset((*SAME, *TOKENS, *LENGTHS, *WITHOUT_EFFECT))
# Arguments of the call that both loops take, and what tokenizers give beside ids
CALL = ("stopping_criteria", "streamer", "tokenizer", "assistant_model", "seed")
TENSORS = ("input_ids", "attention_mask", "cache")
IGNORED = ("token_type_ids", "mm_token_type_ids")
GROWING = (None, "dynamic", "static")  # give the same tokens
TOKENIZERS = ("tokenizer", "assistant_tokenizer")  # transformers' loop hands them on to forward


class TigonGeneration(GenerationMixin):
    """transformers' `generate` for a Tigon model."""

    native: CausalLM
    config: Any

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates as transformers' `generate`, with its arguments and outputs.

        Greedy tokens and samples, also with a draft of Tigon's, stop strings, stopping criteria,
        scores and caches over turns come from Tigon's own loop, with static caches and CUDA graphs
        on a GPU; all else, such as beams, logits processors and prompt lookup, from transformers'.
        Both give the same tokens. `seed` is an argument of the own loop alone: ValueError where
        another is needed.
        """
        cache, past = kwargs.pop("cache", None), kwargs.pop("past_key_values", None)
        if cache is not None or past is not None:
            kwargs["cache"] = past if cache is None else cache
        arguments = own_arguments(self, inputs, generation_config, kwargs)
        if arguments is not None:
            return _generate(self, arguments)
        if kwargs.get("seed") is not None:
            raise ValueError(
                f"seed={kwargs['seed']} with what transformers' loop alone follows: call "
                "torch.manual_seed instead"
            )
        return super().generate(inputs, generation_config, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,  # [B, T]
        next_sequence_length: int | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,  # [B, T, C], whose name transformers looks for
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As transformers'; where a dynamic RoPE changes, the whole text is read again.

        PEFT looks for a cache by its older name: for one that it has put around the model's, and
        for virtual tokens, where it puts its own in place of this and leaves positions to the
        model, which begin behind them.
        """
        restart = self.native.cache_restart
        restarts = restart is not None and input_ids.shape[1] >= restart
        if cache is not None and restarts and cache.get_seq_length() < restart:
            cache, next_sequence_length = TigonCache(), None
        kwargs = {name: value for name, value in kwargs.items() if name not in TOKENIZERS}
        inputs = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, cache, inputs_embeds=inputs_embeds, **kwargs
        )
        virtual = "prepare_inputs_for_generation" in vars(self)
        if virtual or not isinstance(cache, TigonCache | None):
            inputs["past_key_values"] = inputs.pop("cache", None)
        if virtual:
            del inputs["position_ids"]
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: it pages the caches of transformers' attention."""
        raise NotImplementedError(
            "transformers' continuous batching (generate_batch) needs its own attention: call "
            "generate, or serve the model with tigon serve"
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Gives transformers' loop a growing cache of Tigon's, unless the call has one."""
        implementation = generation_config.cache_implementation
        if implementation not in GROWING:
            raise ValueError(
                f"cache_implementation={implementation!r} with what transformers' loop alone "
                "follows: leave it out"
            )
        if model_kwargs.get("cache") is not None:
            model_kwargs["cache"] = take_over(model_kwargs["cache"], self.native)
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = TigonCache()


def own_arguments(
    model: Any,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The arguments of the native generate for a call; None if transformers' loop has to run."""
    call = {name: kwargs[name] for name in CALL if kwargs.get(name) is not None}
    tensors = {name: kwargs[name] for name in TENSORS if kwargs.get(name) is not None}
    tensors |= {} if inputs is None else {"input_ids": inputs}
    if not _are_prompts(tensors) or _is_hooked(model):
        return None
    others = {k: v for k, v in kwargs.items() if k not in (*CALL, *TENSORS, *IGNORED)}
    config, rest = model._prepare_generation_config(generation_config, **others)
    has_others = any(value is not None and value is not False for value in rest.values())
    if has_others or not _is_followed(config) or not _is_assisted(model, call, tensors):
        return None
    ids, ends = tensors["input_ids"], _read_ends(config, model.native.config.vocab_size)
    ends_rows = call.get("stopping_criteria") or config.stop_strings
    if ends is None or (len(ids) > 1 and ends_rows and not any(ends.values())):
        return None
    pad = ends["pad_token_id"]
    marks_padding = "attention_mask" not in tensors and pad not in (None, *ends["eos_token_id"])
    if marks_padding and (ids[:, -1] == pad).any():
        return None
    values = {name: getattr(config, name) for name in SAME} | ends
    if not config.do_sample:
        values = {name: value for name, value in values.items() if name not in SAMPLING}
    sources = kwargs, vars(generation_config or GenerationConfig()), vars(model.generation_config)
    lengths = _read_lengths(model, config, sources, ids)
    return dict.fromkeys(UNSUPPORTED) | values | lengths | call | tensors


def _are_prompts(tensors: Mapping[str, Any]) -> bool:
    """Whether these are ids [B, T] with a mask of padding on the left, if with any."""
    ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return False
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.shape == ids.shape and bool(mask[:, -1].all())


def _is_hooked(model: Any) -> bool:
    """Whether somebody's code has to run in each forward pass, or prepares its inputs."""
    own = type(model)
    for name in ("forward", "prepare_inputs_for_generation"):
        if getattr(getattr(model, name), "__func__", None) is not getattr(own, name):
            return True
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _is_followed(config: GenerationConfig) -> bool:
    """Whether all settings that are not neutral are ones that the own loop follows."""
    defaults = config._get_default_generation_params()
    others = {k: v for k, v in config.to_dict().items() if k not in FOLLOWED and k[0] != "_"}
    return all(
        value is None or value is False or value in ([], {}, defaults.get(name))
        for name, value in others.items()
    )


def _read_ends(config: GenerationConfig, vocab: int) -> dict[str, Any] | None:
    """The eos tokens that can be generated, and the pad token; None for one that no model has."""
    tokens = config.eos_token_id, config.pad_token_id
    values: list[Any] = [x.tolist() if isinstance(x, Tensor) else x for x in tokens]
    eos, pad = values
    if pad is not None and not 0 <= pad < vocab:
        return None
    eos = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    return {"eos_token_id": [i for i in eos if 0 <= i < vocab], "pad_token_id": pad}


def _is_assisted(model: Any, call: dict[str, Any], tensors: Mapping[str, Any]) -> bool:
    """Replaces a draft by its native model; returns whether Tigon's loop can run the call."""
    draft = call.get("assistant_model")
    if draft is None:
        return True
    if not isinstance(draft, TigonGeneration) or _is_hooked(draft):
        return False
    cache = tensors.get("cache")
    call["assistant_model"] = draft.native
    if model.native.dynamic_rope is not None or draft.native.dynamic_rope is not None:
        return False
    return cache is None or isinstance(cache.native, StaticCache)


def _read_lengths(
    model: Any, config: GenerationConfig, sources: tuple[Mapping[str, Any], ...], ids: Tensor
) -> dict[str, Any]:
    """The limits of a text in tokens, as transformers computes and checks them."""

    def is_default(name: str) -> bool:
        return all(source.get(name) is None for source in sources)

    new = config.min_new_tokens
    longest = is_default("max_length")
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=longest,
        has_default_min_length=is_default("min_length"),
        model_input_name="input_ids",
        input_ids_length=ids.shape[1],
        inputs_tensor=ids,
    )
    model._validate_generated_length(config, ids.shape[1], longest)
    least = max(config.min_length - ids.shape[1], 0) if new is None else new
    return {"max_length": config.max_length, "min_new_tokens": least}


def _generate(model: Any, arguments: dict[str, Any]) -> Any:
    """Returns what the native generate does, as transformers' output if it is more than tokens."""
    ids, cache = arguments["input_ids"], arguments.pop("cache", None)
    past = None if cache is None else take_over(cache, model.native)
    native = None if past is None else past.native
    out = model.native.generate(**arguments, past_key_values=native)
    if not isinstance(out, GenerationOutput):
        return out.to(ids.device)
    fields: dict[str, Any] = dict(out) | {"sequences": out.sequences.to(ids.device)}
    states = fields.pop("past_key_values", None)
    if states is not None:
        new = TigonCache(states).hand_to(model.native)
        fields["cache"] = past if states is native else new
    return GenerateDecoderOnlyOutput(**fields)
