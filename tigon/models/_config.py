"""config.json to a dataclass and back, for both generations of its keys."""

import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from tigon.kernels._norm import Cast
from tigon.kernels.gated_act import Activation
from tigon.layers.rope import ROPE_TYPES

# Keys of config.json that change no number here; anything else unknown is reported once.
SILENT = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "architectures",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    # read together as rope_parameters, or as dtype
    "rope_scaling",
    "rope_theta",
    "original_max_position_embeddings",
    "torch_dtype",
}

DROPOUT = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop")

# Keys that change numbers in some architecture, and the values that mean "not here".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_multiplier": (None,),
    "attention_out_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "layer_types": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "router_jitter_noise": (None, 0, 0.0),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
    "use_sliding_window": (None, False),
}

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "factor"),
}
ROPE_HINTS: dict[str, Any] = {
    "attention_factor": float | None,
    "beta_fast": float | None,
    "beta_slow": float | None,
    "factor": float | None,
    "finetuned": Any,
    "high_freq_factor": float,
    "long_factor": list[float],
    "low_freq_factor": float,
    "mscale": float | None,
    "mscale_all_dim": float | None,
    "original_max_position_embeddings": int | None,
    "rope_theta": float,
    "rope_type": str,
    "short_factor": list[float],
    "truncate": bool,
    "type": str | None,
}


class ConfigError(ValueError):
    """A config.json that Tigon cannot follow exactly; says which key and value."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The part of config.json that every family shares; defaults are transformers' own.

    A family's config subclasses this with its defaults and its own keys.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    default_theta: ClassVar[float] = 10000.0
    # Norms multiply by offset + weight; the cast says when they round
    norm_offset: ClassVar[float] = 0.0
    norm_cast: ClassVar[Cast] = "before_weight"
    partial_rotary: ClassVar[bool] = False  # may rotate a part of each head
    interleaved: ClassVar[bool] = False  # rotates neighbours, not the two halves of a head
    rounded_angles: ClassVar[bool] = True  # cos and sin are in the model's dtype, not in fp32
    rope_extras: ClassVar[Mapping[str, Any]] = {}  # this family's own keys of rope_parameters
    flat_qk_norm: ClassVar[bool] = False  # qk_norm is over all heads together
    # Keys that may have any value here: they change nothing, or a family reads them itself
    ignored: ClassVar[frozenset[str]] = frozenset()
    # This family's own additions to NEUTRAL
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
    source: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """Read config.json's content; raises on a key that may change a number and is not known."""
        quantization = source.get("quantization_config")
        if quantization is not None:
            known = isinstance(quantization, dict) and "quant_method" in quantization
            method = quantization["quant_method"] if known else quantization
            raise ConfigError(
                f"quantization_config ({method}): Tigon reads unquantised checkpoints; "
                "use the original one or dequantise it first"
            )
        hints = typing.get_type_hints(cls)
        names = {f.name for f in fields(cls)} - {"source"}
        kind = source.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ConfigError(f"model_type {kind!r} is not {cls.model_type!r}")
        values = {k: v for k, v in source.items() if k in names}
        for key in ("num_key_value_heads", "head_dim"):
            if key in values and values[key] is None:
                values[key] = 0
        if values.get("rope_parameters") is None:
            values.pop("rope_parameters", None)
        values["dtype"] = source.get("dtype") or source.get("torch_dtype")
        _check_types(values, hints)
        required = [
            f.name
            for f in fields(cls)
            if f.default is f.default_factory and f.name not in values  # both MISSING
        ]
        if required:
            raise ConfigError(f"the config lacks {', '.join(required)}")
        unknown, neutral = {}, NEUTRAL | dict(cls.neutral)
        for key, value in source.items():
            if key in names or key in SILENT or key in DROPOUT or key in cls.ignored:
                continue
            if key in ("model_type", "quantization_config"):
                continue
            if key not in neutral:
                unknown[key] = value
            elif value not in neutral[key]:
                raise ConfigError(
                    f"{key}={value!r} changes what the model computes, and {cls.__name__} "
                    f"(model_type {kind!r}) does not know it"
                )
        if unknown:
            warnings.warn(f"config keys not understood and ignored: {unknown}", stacklevel=3)
        dropout = ", ".join(f"{key}={source[key]}" for key in DROPOUT if source.get(key))
        if dropout:
            warnings.warn(f"{dropout} is not applied: Tigon trains without dropout", stacklevel=3)
        longest = values.get("max_position_embeddings", cls.max_position_embeddings)
        values["rope_parameters"] = cls._read_rope(source, longest)
        return cls(**values, source=dict(source))

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        return read_rope(
            source, cls.default_theta, longest, partial=cls.partial_rotary, extras=cls.rope_extras
        )

    # What blocks are built from, where a family's own keys do not say it

    @property
    def act(self) -> Activation:
        return activation(self.hidden_act)

    @property
    def qkv_bias(self) -> bool:
        return False

    @property
    def out_bias(self) -> bool:
        return False

    @property
    def mlp_bias(self) -> bool:
        return False

    @property
    def qk_norm(self) -> bool:
        return False

    @property
    def attention_scale(self) -> float | None:
        """Of the scores; None is 1 / sqrt(head_dim)."""
        return None

    @property
    def attention_softcap(self) -> float | None:
        return None

    @property
    def logits_softcap(self) -> float | None:
        return None

    @property
    def logits_scale(self) -> float:
        return 1.0

    @property
    def embedding_scale(self) -> float:
        """Of the embeddings of token ids, rounded to the model's dtype."""
        return 1.0

    @property
    def input_scale(self) -> float:
        """Of what enters the first block, `inputs_embeds` too; not rounded."""
        return 1.0

    @property
    def branch_scale(self) -> float:
        """Of what attention and the MLP add to the stream, in blocks with a norm before each."""
        return 1.0

    @property
    def causal(self) -> bool:
        return True

    @property
    def balanced(self) -> bool:
        """Whether a loss that balances the load of experts joins the loss."""
        return False

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, its own among them; None: all before."""
        return None

    @property
    def cache_restart(self) -> int | None:
        """Tokens from whose number on all keys are rotated otherwise, so that a cache is stale."""
        return None

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        """The rotary embeddings of the model, by name; {} does not rotate."""
        return {"": self.rope_parameters}

    def rope(self, layer: int) -> str:
        """The name of the one that this layer uses."""
        return ""

    def __post_init__(self) -> None:
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
        if not self.rope_parameters:
            rope = self._read_rope({}, self.max_position_embeddings)
            object.__setattr__(self, "rope_parameters", rope)

    def to_dict(self) -> dict[str, Any]:
        """config.json for transformers 4 and 5: RoPE and dtype under both names."""
        # auto_map names code that is not exported
        out = {k: v for k, v in self.source.items() if not k.startswith("_") and k != "auto_map"}
        out |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}
        if out.get("layer_types", ()) is None:  # to some readers the key alone says something
            del out["layer_types"]
        return out | {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "torch_dtype": self.dtype,
            **self._rope_keys(),
        }

    def _rope_keys(self) -> dict[str, Any]:
        rope = dict(self.rope_parameters)
        out = {
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            # The whole dictionary: where a reader takes rope_scaling, it takes nothing else
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
        }
        if "partial_rotary_factor" in rope:
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope["rope_type"] == "longrope":  # transformers 4 looks for it here
            out["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        return out


SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(Config):
    """A family some of whose layers see `sliding_window` tokens only.

    `layer_types` says which; without it, the family's rule does.
    """

    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.layer_types
        if types is None:
            return
        if len(types) != self.num_hidden_layers or not set(types) <= {SLIDING, FULL}:
            raise ConfigError(
                f"layer_types={types} is not {SLIDING!r} or {FULL!r} for each of "
                f"{self.num_hidden_layers} layers"
            )

    def slides(self, layer: int) -> bool:
        """The family's rule."""
        return True

    def layer_type(self, layer: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[layer]
        return SLIDING if self.slides(layer) else FULL

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_type(layer) == SLIDING else None


@dataclass(frozen=True, kw_only=True)
class TwoRopesConfig(WindowedConfig):
    """A family whose sliding layers have a RoPE of their own.

    `rope_parameters` holds both; `rope_theta` and `rope_scaling` are of the full layers alone.
    """

    @classmethod
    def _local_theta(cls, source: Mapping[str, Any]) -> float:
        """Of the sliding layers, where `rope_parameters` does not say it."""
        return cls.default_theta

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        given = source.get("rope_parameters") or {}
        full, sliding = (given.get(name) or {} for name in (FULL, SLIDING))
        if not given.keys() <= {FULL, SLIDING}:
            raise ConfigError(f"rope_parameters={given} is not given per {FULL!r} and {SLIDING!r}")
        full = full | (source.get("rope_scaling") or {})
        theta, local = source.get("rope_theta", cls.default_theta), cls._local_theta(source)
        return {
            FULL: read_rope({"rope_parameters": full}, theta, longest),
            SLIDING: read_rope({"rope_parameters": sliding}, local, longest),
        }

    def _rope_keys(self) -> dict[str, Any]:
        full = self.rope_parameters[FULL]
        return {
            "rope_parameters": self.rope_parameters,
            "rope_theta": full["rope_theta"],
            "rope_scaling": full if full["rope_type"] != "default" else None,
        }

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        return self.rope_parameters

    def rope(self, layer: int) -> str:
        return self.layer_type(layer)


def read_rope(
    source: Mapping[str, Any],
    default_theta: float,
    longest: int,
    *,
    partial: bool = False,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One `rope_parameters` from either generation of keys, complete for its type."""
    # transformers lets a non-null rope_scaling replace rope_parameters
    key = "rope_scaling" if source.get("rope_scaling") else "rope_parameters"
    given = source.get(key) or {}
    _check_types({key: given}, {key: dict})
    rope = {"rope_theta": source.get("rope_theta", default_theta), **given}
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"unknown rope_type {kind!r}; there are {', '.join(ROPE_TYPES)}")
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = source.get(
            "original_max_position_embeddings"
        ) or rope.get("original_max_position_embeddings", longest)
    hints = ROPE_HINTS | dict(extras or {})
    _check_types(rope, hints)
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    missing = [k for k in ROPE_KEYS[kind] if rope.get(k) is None]
    if missing:
        raise ConfigError(f"rope_type {kind!r} needs {', '.join(missing)}; the config has {rope}")
    factor = rope.pop("partial_rotary_factor", None)
    unknown = {k: v for k, v in rope.items() if k not in hints}
    if unknown:
        raise ConfigError(f"rope_type {kind!r} does not know {unknown}")
    if factor is None and partial:
        factor = source.get("partial_rotary_factor")
    if factor is None or (factor == 1 and not partial):
        return rope
    if not partial:
        raise ConfigError(f"partial_rotary_factor={factor} is not known to this model type")
    if not _fits(factor, float) or not 0 < factor <= 1:
        raise ConfigError(f"partial_rotary_factor={factor!r} is not in (0, 1]")
    return rope | {"partial_rotary_factor": factor}


def _check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in hints and not _fits(value, hints[key]):
            raise ConfigError(f"{key}={value!r} is not {_spell(hints[key])}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if hint is Any:
        return True
    if hint is type(None):
        return value is None
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(v, item) for v in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(hidden_act: str) -> Activation:
    """The kernel's name of config.json's `hidden_act`."""
    if hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[hidden_act]
