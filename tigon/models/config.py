"""config.json as a dataclass, read and written for transformers 4 and 5."""

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch

from tigon.kernels.mlp.gated_act import Activation
from tigon.models.quantization_config import unsupported_error
from tigon.models.rope_config import FULL, RANGES, SLIDING, check_values, read_rope, write_rope
from tigon.utils.config import ConfigError, check_type, field_types, read_settings, suggest
from tigon.utils.json import quote

# Keys of config.json that change no number here; a warning lists other unknown keys
_SILENT = """
    _name_or_path _attn_implementation _attn_implementation_autoset architectures
    attn_implementation auto_map chunk_size_feed_forward finetuning_task gradient_checkpointing
    is_decoder is_encoder_decoder output_attentions output_hidden_states prefix pretraining_tp
    problem_type return_dict task_specific_params tf_legacy_loss tokenizer_class torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    cls_token_id decoder_start_token_id mask_token_id sep_token_id unk_token_id
    id2label label2id num_labels
    rope_scaling rope_theta original_max_position_embeddings torch_dtype
"""  # the last line is read as rope_parameters and dtype
SILENT = set(_SILENT.split())

# hidden_act of config.json -> the name of a kernel
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
DROPOUT = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop")

# Keys that change numbers in some architecture, and the values with which they change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {"no_rope_layers": (None, []), "pruned_heads": (None, {})}
for _value, _keys in (
    (None, "attention_multiplier attn_logit_softcapping clip_qkv cross_attention_hidden_size"),
    (None, "final_logit_softcapping layer_types query_pre_attn_scalar sliding_window"),
    (False, "add_cross_attention attention_bias attention_out_bias mlp_bias qk_layernorm"),
    (False, "rope_interleaved tie_encoder_decoder use_bidirectional_attention use_mrope"),
    (False, "use_qk_norm use_sliding_window"),
    (True, "is_causal"),
    (0, "num_experts num_local_experts router_jitter_noise"),
    (1, "embedding_multiplier logit_scale logits_scaling partial_rotary_factor"),
    (1, "residual_multiplier"),
):
    NEUTRAL |= dict.fromkeys(_keys.split(), (None, _value))


@dataclass(frozen=True)
class ConfigOrigin:
    """The checkpoint that a config was read from, with the keys that `to_dict` keeps."""

    config: Mapping[str, Any] = field(default_factory=dict)  # config.json's content
    wrapper: Mapping[str, Any] = field(default_factory=dict)  # the config around a text_config
    stacked_experts: bool = False  # whether one tensor holds all experts of a layer
    name: str = ""  # the directory or the hub repository
    revision: str = ""  # of the hub repository; "" is main


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The part of config.json that every family shares, with transformers' defaults.

    A family's config subclasses this with its defaults and additional keys.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    # transformers' sequence classifier; "": named like `architecture`; None: there is none
    classifier_name: ClassVar[str | None] = ""
    # model_type of the multimodal config that exports have, where transformers has no text class
    wrapper_type: ClassVar[str] = ""
    layer_kinds: ClassVar[tuple[str, ...]] = ()  # what `layer_types` may say of a layer
    default_theta: ClassVar[float] = 10000.0
    partial_rotary: ClassVar[bool] = False  # whether partial_rotary_factor is supported
    rotary_share: ClassVar[float | None] = None  # partial_rotary_factor of a source without one
    overflows_float16: ClassVar[bool] = False  # published models have activations above 65504
    rope_extras: ClassVar[Mapping[str, Any]] = {}  # additional keys of rope_parameters
    default_rope: ClassVar[Mapping[str, Any]] = {}  # rope_parameters of a source without any
    # Keys that may have any value: they change nothing, or the family reads them separately
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Additions to NEUTRAL
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0 is transformers' null: as many as query heads
    head_dim: int = 0  # 0 is transformers' null: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    # Number of scores of a sequence classifier; 0: a language model
    labels: int = 0
    source: ConfigOrigin = field(default_factory=ConfigOrigin, repr=False, compare=False)

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """Reads the content of config.json.

        Raises ConfigError for a key that changes what the model computes and that the family does
        not support; warns of other unknown keys, and of dropout, which is not applied.
        """
        cls._check_keys(source)
        names = field_types(cls).keys() - {"source", "labels"}
        values = {k: v for k, v in source.items() if k in names}
        for key in ("num_key_value_heads", "head_dim"):
            if key in values and values[key] is None:
                values[key] = 0
        if values.get("rope_parameters") is None:
            values.pop("rope_parameters", None)
        values["dtype"] = source.get("dtype") or source.get("torch_dtype")
        values = read_settings(cls, values)
        required = [f.name for f in fields(cls) if f.default is f.default_factory]  # both MISSING
        if missing := [name for name in required if name not in values]:
            raise ConfigError(f"the config lacks {', '.join(missing)}")
        dropout = ", ".join(f"{key}={quote(source[key])}" for key in DROPOUT if source.get(key))
        if dropout:
            warnings.warn(f"{dropout} is not applied: Tigon trains without dropout", stacklevel=3)
        longest = values.get("max_position_embeddings", cls.max_position_embeddings)
        values["rope_parameters"] = cls._read_rope(source, longest)
        return cls(**values, labels=_num_labels(source), source=ConfigOrigin(dict(source)))

    @classmethod
    def classifier(cls) -> str | None:
        """The name of transformers' sequence classifier of this family; None if there is none."""
        if cls.classifier_name != "":
            return cls.classifier_name
        return cls.architecture.replace("ForCausalLM", "ForSequenceClassification")

    @classmethod
    def _check_keys(cls, source: Mapping[str, Any]) -> None:
        """Raises ConfigError for another model type, quantization_config, and keys that change what
        the model computes and are not supported; warns of other unknown keys."""
        if source.get("quantization_config") is not None:
            raise unsupported_error(source["quantization_config"])
        model_type = source.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ConfigError(f"model_type {quote(model_type)} is not {cls.model_type!r}")
        names = field_types(cls).keys() - {"labels"}
        silent = {*SILENT, *DROPOUT, *cls.ignored, "model_type", "quantization_config"}
        if cls.partial_rotary:  # read with the RoPE
            silent.add("partial_rotary_factor")
        unknown, neutral = {}, NEUTRAL | dict(cls.neutral)
        for key, value in source.items():
            if key in names or key in silent:
                continue
            if key not in neutral:
                unknown[key] = value
            elif value not in neutral[key]:
                raise ConfigError(
                    f"{key}={quote(value)} changes what the model computes, and {cls.__name__} "
                    f"(model_type {model_type!r}) does not know it"
                )
        if unknown:
            # A file may have a million keys, or long ones
            first_keys = [key[:100] for key in itertools.islice(unknown, 20)]
            hints = (suggest(key, names, 0.8) for key in first_keys)
            message = f"config keys not understood and ignored: {quote(unknown, 1000)}"
            warnings.warn("; ".join([message, *filter(None, hints)]), stacklevel=4)

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Reads `rope_parameters`; `longest` is max_position_embeddings."""
        if not source.get("rope_scaling") and source.get("rope_parameters") is None:
            source = {**source, "rope_parameters": cls.default_rope}
        if cls.rotary_share is not None:
            source = {"partial_rotary_factor": cls.rotary_share, **source}
        return read_rope(
            source, cls.default_theta, longest, partial=cls.partial_rotary, extras=cls.rope_extras
        )

    def __post_init__(self) -> None:
        check_values({f.name: getattr(self, f.name) for f in fields(self)}, RANGES)
        kinds = getattr(self, "layer_types", None)
        check_layer_kinds("layer_types", kinds, self.num_hidden_layers, *self.layer_kinds)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if not kv_heads:
            object.__setattr__(self, "num_key_value_heads", heads)
        elif heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        if not self.head_dim:
            if self.hidden_size % heads:
                raise ConfigError(
                    f"hidden_size={self.hidden_size} is not a multiple of "
                    f"num_attention_heads={heads}, and head_dim is not given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
            check_values({"head_dim": self.head_dim}, RANGES)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd: values are rotated in pairs")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(
                f"pad_token_id={self.pad_token_id} is outside the vocabulary: "
                f"vocab_size={self.vocab_size}"
            )
        if not self.rope_parameters:
            rope = self._read_rope({}, self.max_position_embeddings)
            object.__setattr__(self, "rope_parameters", rope)

    @property
    def mlp_activation(self) -> Activation:
        """The MLPs' activation: `hidden_activation` if the config has it, else `hidden_act`."""
        name = getattr(self, "hidden_activation", self.hidden_act)
        if name not in ACTIVATIONS:
            raise ConfigError(f"hidden_act={quote(name)} is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def rotates(self, layer: int) -> bool:
        """Whether the layer has RoPE: here every layer has, and families have other rules."""
        return True

    def attention_sizes(self, layer: int) -> tuple[int, int]:
        """The layer's head dim and number of kv heads."""
        return self.head_dim, self.num_key_value_heads

    def layer_rope(self, layer: int) -> tuple[int, Mapping[str, Any]]:
        """The layer's head dim and RoPE parameters; without RoPE {} or `NoRotary` options."""
        return self.head_dim, self.rope_parameters if self.rotates(layer) else {}

    @property
    def get_text_config(self) -> Any:
        """Raises an error that says how to wrap the model: TRL calls this method of configs. It is
        an AttributeError, since PEFT and Accelerate look for the method with `hasattr`."""
        raise AttributeError(
            f"{type(self).__name__} is of a native model; for TRL wrap the model: "
            "tigon.integrations.transformers.as_transformers(model)"
        )

    @property
    def transformers_class(self) -> str:
        """The class in config.json's architectures, a classifier's with labels."""
        return (self.classifier() if self.labels else None) or self.architecture

    def to_dict(self) -> dict[str, Any]:
        """Makes config.json's content for transformers 4 and 5: RoPE and dtype under both names,
        and unknown keys of the source as they were."""
        # auto_map names code that is not exported
        original = self.source.config
        out = {k: v for k, v in original.items() if not k.startswith("_") and k != "auto_map"}
        names = [f.name for f in fields(self) if f.name not in ("source", "labels")]
        out |= {name: getattr(self, name) for name in names}
        if out.get("layer_types", ()) is None:  # some readers test only whether the key exists
            del out["layer_types"]
        if self.labels:
            labels = {str(i): f"LABEL_{i}" for i in range(self.labels)}
            if _num_labels(original) != self.labels or "id2label" not in original:
                out["id2label"], out["label2id"] = labels, {v: int(k) for k, v in labels.items()}
            out["num_labels"] = self.labels
        return out | {
            "model_type": self.model_type,
            "architectures": [self.transformers_class],
            "torch_dtype": self.dtype,
            **self._rope_keys(),
        }

    def to_file(self) -> dict[str, Any]:
        """Makes config.json's content: `to_dict`, or the multimodal config around it if the family
        has a `wrapper_type`, with the source's parts for other modalities."""
        text = self.to_dict()
        if not self.wrapper_type:
            return text
        same = ("dtype", "torch_dtype", "tie_word_embeddings")
        outer = {"architectures": text.pop("architectures"), **{key: text[key] for key in same}}
        outer |= {"model_type": self.wrapper_type, "text_config": text}
        return {k: v for k, v in self.source.wrapper.items() if not k.startswith("_")} | outer

    def _rope_keys(self) -> dict[str, Any]:
        """The keys of `to_dict` that describe RoPE."""
        return write_rope(dict(self.rope_parameters))


@dataclass(frozen=True, kw_only=True)
class NoRopeConfig(ModelConfig):
    """The config of a family in which each no_rope_layer_interval-th layer has no RoPE, unless
    no_rope_layers has a flag for each layer: 1 where it does rotate, in spite of the name."""

    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, flags = self.num_hidden_layers, self.no_rope_layers
        if flags and len(flags) < layers:
            raise ConfigError(f"no_rope_layers={quote(flags)} is not 0 or 1 for {layers} layers")

    def rotates(self, layer: int) -> bool:
        """Whether the layer has RoPE: by no_rope_layers, or else by the interval."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0


def check_layer_thetas(thetas: list[float] | None, layers: int) -> None:
    """Raises ConfigError unless `layer_rope_theta` is None or has a theta, or 0, for each layer."""
    if thetas is not None and (len(thetas) != layers or min(thetas) < 0):
        numbers = f"a number from 0 on for each of {layers} layers"
        raise ConfigError(f"layer_rope_theta={quote(thetas)} is not {numbers}")


def check_layer_kinds(name: str, kinds: list[str] | None, layers: int, *known: str) -> None:
    """Raises ConfigError unless `kinds`, the key `name`, is None or a known kind for each layer."""
    if kinds is not None and (len(kinds) != layers or not set(kinds) <= {*known}):
        names = " or ".join(map(repr, known))
        raise ConfigError(f"{name}={quote(kinds)} is not {names} for each of {layers} layers")


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(ModelConfig):
    """The config of a family with sliding-window layers, by `layer_types` or else `slides`."""

    layer_kinds = SLIDING, FULL
    full_every: ClassVar[int] = 0  # every n-th layer is full if `layer_types` is None; 0: none

    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def slides(self, layer: int) -> bool:
        """Whether the layer slides if `layer_types` is None: all do but each `full_every`-th."""
        return not self.full_every or (layer + 1) % self.full_every != 0

    def layer_type(self, layer: int) -> str:
        """The layer's kind, "sliding_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return SLIDING if self.slides(layer) else FULL


@dataclass(frozen=True, kw_only=True)
class TwoRopesConfig(WindowedConfig):
    """The config of a family whose sliding layers have another RoPE than the full ones, both in
    `rope_parameters`."""

    @classmethod
    def _local_theta(cls, source: Mapping[str, Any]) -> float:
        """rope_theta of the sliding layers if `rope_parameters` lacks it; here `default_theta`."""
        return cls.default_theta

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Reads the RoPEs of full and of sliding layers, by kind of layer; rope_theta and
        rope_scaling apply to full ones."""
        ropes = check_type("rope_parameters", source.get("rope_parameters") or {}, dict)
        scaling = check_type("rope_scaling", source.get("rope_scaling") or {}, dict)
        if not ropes.keys() <= {FULL, SLIDING}:
            raise ConfigError(
                f"rope_parameters={quote(ropes)} is not given per {FULL!r} and {SLIDING!r}"
            )
        full, sliding = (
            check_type(f"rope_parameters.{name}", ropes.get(name) or {}, dict)
            for name in (FULL, SLIDING)
        )
        theta, local_theta = source.get("rope_theta", cls.default_theta), cls._local_theta(source)
        return {
            FULL: read_rope({"rope_parameters": full | scaling}, theta, longest),
            SLIDING: read_rope({"rope_parameters": sliding}, local_theta, longest),
        }

    def layer_rope(self, layer: int) -> tuple[int, Mapping[str, Any]]:
        """The layer's head dim, and the RoPE parameters of its kind, sliding or full."""
        return self.attention_sizes(layer)[0], self.rope_parameters[self.layer_type(layer)]

    def _rope_keys(self) -> dict[str, Any]:
        """The keys of `to_dict` that describe both RoPEs: both in rope_parameters, and the full
        layers' under transformers 4's names."""
        ropes = self.rope_parameters
        return write_rope(ropes[FULL]) | {"rope_parameters": dict(ropes)}


def vocabulary_keys(c: ModelConfig) -> list[str]:
    """The names of the config's sizes that count all tokens: of one embedding, or of two."""
    second = "vocab_size_per_layer_input"
    return ["vocab_size"] + [second] * (getattr(c, second, None) == c.vocab_size)


def eos_ids(c: ModelConfig, generation_config: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text by generation_config.json, or else by config.json."""
    ids = generation_config.get("eos_token_id", c.eos_token_id)
    return [ids] if isinstance(ids, int) else list(ids or ())


def _num_labels(source: Mapping[str, Any]) -> int:
    """The number of scores of a sequence classifier's config.json; 0 for a language model."""
    names = source.get("architectures")
    classes = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if not any(name.endswith("ForSequenceClassification") for name in classes):
        return 0
    labels = source.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else source.get("num_labels", 2)
    if type(count) is not int or count < 1:
        raise ConfigError(f"num_labels={quote(count)} is not a positive integer")
    return count


def torch_dtype(name: Any) -> torch.dtype:
    """The torch dtype of a name in config.json; ConfigError if no model is computed in it."""
    short_name = name.removeprefix("torch.") if isinstance(name, str) else name
    if short_name not in DTYPES:
        raise ConfigError(f"unsupported dtype {quote(name)}: use {', '.join(DTYPES)}")
    return getattr(torch, short_name)


def parse_dtype(dtype: Any) -> torch.dtype:
    """Converts a caller's dtype or its name to a torch.dtype; TypeError if no model is in it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype must be a floating one ({', '.join(DTYPES)}), not {dtype!r}")
    return getattr(torch, name)
