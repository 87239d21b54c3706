"""RoPE as GGUF files describe it, in config.json's terms."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tigon.models.rope_config import FULL, SLIDING
from tigon.utils.config import ConfigError
from tigon.utils.json import escape, quote
from tigon.weights import GGUF, Checkpoint, DecodedTensor, GGMLTensor, TensorInfo
from tigon.weights.gguf import TORCH_DTYPES, GGUFTensorInfo
from tigon.weights.read import Reader

FREQS = "rope_freqs.weight"
# What all of Llama 3.1 to 3.3 have; the file has only what follows from it
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROUNDING = 1e-6  # relative, of an fp32 number after a power and some products


def read_gguf_rope(file: GGUF, keys: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling of config.json; takes their keys from `keys`."""
    theta = keys.pop("rope.freq_base", 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ConfigError(f"rope.freq_base={quote(theta)} is not a positive number")
    scaling = _scaling(keys)
    if FREQS in file.tensors:
        if scaling is not None:
            raise ConfigError(
                f"the file has both rope.scaling and {FREQS}, which exclude each other"
            )
        scaling = _of_divisors(_divisors(file, config["head_dim"]), theta, config)
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _scaling(keys: dict[str, Any]) -> dict[str, Any] | None:
    linear = keys.pop("rope.scale_linear", None)  # of the first files
    kind = keys.pop("rope.scaling.type", "none" if linear is None else "linear")
    factor = keys.pop("rope.scaling.factor", linear)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):  # 0: not given
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope.scaling.type={quote(kind)} is not none, linear or yarn")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"),
            ("attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if f"rope.scaling.{key}" in keys:
                found[name] = keys.pop(f"rope.scaling.{key}")
    return found


def _divisors(file: GGUF, head_dim: int) -> Tensor:
    """What the frequencies are divided by, [head_dim / 2]."""
    stored = file.tensors[FREQS]
    if stored.kind not in TORCH_DTYPES or stored.shape != (head_dim // 2,):
        raise ConfigError(
            f"tensor {FREQS!r} is {list(stored.shape)}, not a plain one of {head_dim // 2} numbers"
        )
    size = TORCH_DTYPES[stored.kind].itemsize
    tensor = GGMLTensor(FREQS, stored.shape, file.path, stored.offset, stored.kind, size)
    with Reader() as reader:
        divisors = tensor.rows(reader, 0, head_dim // 2)
    if not (divisors.isfinite() & (divisors > 0)).all():
        raise ConfigError(f"tensor {FREQS!r} has numbers that are not positive")
    return divisors


def _of_divisors(divisors: Tensor, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling if it gives these divisors, or one that has them as they are."""
    factor = round(divisors.max().item(), 4)
    expected = _llama3_divisors(factor, theta, config["head_dim"])
    if torch.allclose(divisors, expected, rtol=ROUNDING, atol=0):
        return LLAMA3 | {"factor": factor}
    numbers = [float(str(number)) for number in divisors.numpy()]  # the shortest in fp32
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_divisors(factor: float, theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    waves = 2 * math.pi * theta**exponents  # tokens in a turn
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / waves
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


# GGUF files as checkpoints: what llama.cpp's conversion has renamed, turned and left out, undone.
#
# Its metadata give config.json, its tensors get Hugging Face's names. Checked against llama.cpp's
# convert_hf_to_gguf.py and llama-model.cpp, where what no key says is in the code.

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **DENSE, "ffn_norm": "post_attention_layernorm"}
MIXTRAL = {
    **LLAMA,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GEMMA2 = {
    **ATTENTION,
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MOST_TENSORS = 1 << 17  # where every expert has its own; ten times as many as the largest models'
IN_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")

# Metadata key, after the architecture -> config.json's
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = {**EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
SHARED = {**QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
CAP, WINDOW = {"final_logit_softcapping": "final_logit_softcapping"}, "attention.sliding_window"
# These say nothing of the model's numbers, or what the tensors say too
IGNORED = {"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"}


@dataclass(frozen=True)
class Family:
    """What llama.cpp calls an architecture, in our terms."""

    model_type: str
    blocks: Mapping[str, str]  # names of a block's tensors
    keys: Mapping[str, str] = field(default_factory=dict)  # needed, as SIZES
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # of config.json; in llama.cpp's code
    bias: str = ""  # config.json's key for biases of queries, keys and values, if any may be there
    turned: bool = False  # rows of queries and keys, see GGMLTensor.head
    plus: float = 0.0  # what is added to the weights of norms
    # Scores are divided by the root of hidden_size / heads where there are so many layers
    scaled_by_width: int = 0


FAMILIES = {
    "llama": Family("llama", LLAMA, bias="attention_bias", turned=True),
    "qwen2": Family("qwen2", LLAMA),
    "qwen2moe": Family(
        "qwen2_moe", QWEN_MOE, SHARED, fixed={"norm_topk_prob": False}, bias="qkv_bias"
    ),
    "qwen3": Family("qwen3", LLAMA, bias="attention_bias"),
    "qwen3moe": Family(
        "qwen3_moe", QWEN_MOE, QWEN_EXPERTS, fixed={"norm_topk_prob": True}, bias="attention_bias"
    ),
    "gemma": Family("gemma", LLAMA, plus=1.0),
    "gemma2": Family(
        "gemma2",
        GEMMA2,
        optional={
            **CAP,
            "attn_logit_softcapping": "attn_logit_softcapping",
            WINDOW: "sliding_window",
        },
        plus=1.0,
        scaled_by_width=46,
    ),
    "gemma3": Family(
        "gemma3_text",
        GEMMA2,
        {WINDOW: "sliding_window"},
        optional={**CAP, "rope.freq_base_swa": "rope_local_base_freq"},
        plus=1.0,
        scaled_by_width=62,
    ),
}
# Mixtral is "llama" with experts, and so is Mistral without
MIXTURE = Family("mixtral", MIXTRAL, EXPERTS | {"expert_count": "num_local_experts"}, turned=True)


class GGUFModel:
    """A GGUF file: config.json's content, and the tensors under Hugging Face's names."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        metadata = file.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                f"split.count={quote(metadata['split.count'])}: a file in parts is not read; join "
                "them with llama.cpp's llama-gguf-split --merge"
            )
        if metadata.get("general.type", "model") != "model":
            raise ConfigError(f"general.type={quote(metadata['general.type'])} is not a model")
        self.architecture = metadata.get("general.architecture")
        family = FAMILIES.get(self.architecture) if isinstance(self.architecture, str) else None
        if family is None:
            raise ConfigError(
                f"general.architecture={quote(self.architecture)} is not read; what is: "
                f"{', '.join(FAMILIES)}; use the model's safetensors repository"
            )
        # All keys of the model; those that are understood are taken out
        prefix = f"{self.architecture}."
        keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        self.family = (
            MIXTURE if family.model_type == "llama" and keys.get("expert_count") else family
        )
        self.config = self._read_config(keys)

    def checkpoint(self, name: str) -> Checkpoint:
        """The tensors; `name` is what errors call the file."""
        found: dict[str, TensorInfo | DecodedTensor] = {}
        for file_name, stored in self.file.tensors.items():
            if file_name != "rope_freqs.weight":  # is in the config
                found |= self._tensors(file_name, stored)
                if len(found) > MOST_TENSORS:
                    raise ValueError(f"{name} has more than {MOST_TENSORS} tensors and experts")
        return Checkpoint(name, found)

    def _read_config(self, keys: dict[str, Any]) -> dict[str, Any]:
        family, tensors = self.family, self.file.tensors
        config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
        for key, name in {**SIZES, **family.keys}.items():
            config[name] = self._size(keys, key)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        config["num_key_value_heads"] = self._size(keys, "attention.head_count_kv", heads)
        config["head_dim"] = self._size(keys, "attention.key_length", hidden // heads)
        for key in "attention.value_length", "rope.dimension_count":
            if (size := self._size(keys, key, config["head_dim"])) != config["head_dim"]:
                raise ConfigError(
                    f"{self.architecture}.{key}={size} is not the size of a head, "
                    f"{config['head_dim']}, as Tigon's {family.model_type} has it"
                )
        epsilon = "attention.layer_norm_rms_epsilon"
        if epsilon not in keys:
            raise ConfigError(f"the metadata lack {self.architecture}.{epsilon}")
        config["rms_norm_eps"] = keys.pop(epsilon)
        config |= {name: keys.pop(key) for key, name in family.optional.items() if key in keys}
        config |= read_gguf_rope(self.file, keys, config)
        if family.scaled_by_width:
            by_width = config["num_hidden_layers"] == family.scaled_by_width
            config["query_pre_attn_scalar"] = hidden // heads if by_width else config["head_dim"]
        if family.model_type == "gemma3_text":
            config |= self._pattern(keys)
        if not keys.pop("attention.causal", True):
            raise ConfigError(f"{self.architecture}.attention.causal is false: no causal model")
        if keys.get("expert_count") == 0:  # llama, not mixtral
            keys.pop("expert_count"), keys.pop("expert_used_count", None)
        if unknown := sorted(keys.keys() - IGNORED):
            named = ", ".join(
                f"{self.architecture}.{escape(key, 100)}={quote(keys[key])}" for key in unknown[:5]
            )
            raise ConfigError(f"metadata that may change what the model computes: {named}")

        if (embedding := tensors.get("token_embd.weight")) is None:
            raise ConfigError("the file has no tensor token_embd.weight")
        config["vocab_size"] = embedding.shape[0]
        config["tie_word_embeddings"] = "output.weight" not in tensors
        if family.bias:
            config[family.bias] = "blk.0.attn_q.bias" in tensors
        if family.model_type == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        return config | self._tokens() | {"dtype": str(self._dtype()).removeprefix("torch.")}

    def _pattern(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Which layers slide, where newer files say it; by default five of six."""
        values = keys.pop("attention.sliding_window_pattern", 6)
        if isinstance(values, list):
            return {"layer_types": [SLIDING if slides else FULL for slides in values]}
        return {"sliding_window_pattern": values}

    def _size(self, keys: dict[str, Any], key: str, default: int | None = None) -> int:
        """Takes a size from the keys; some files have one for each layer."""
        value = keys.pop(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None:
            raise ConfigError(f"the metadata lack {self.architecture}.{key}")
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.architecture}.{key}={quote(value)} is not a size of at least 1, the "
                "same in all layers"
            )
        return value

    def _tokens(self) -> dict[str, Any]:
        values = self.file.metadata
        ids = {
            f"{name}_token_id": values.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        turn = values.get("tokenizer.ggml.eot_token_id")  # ends a chat's answer
        if turn is not None and turn != ids["eos_token_id"]:
            eos = ids["eos_token_id"]
            ids["eos_token_id"] = [turn] if eos is None else [eos, turn]
        return ids

    def _dtype(self) -> torch.dtype:
        """Of the matrices; bf16 where they are quantised. Norms are fp32 in any file."""
        kinds = {t.kind for t in self.file.tensors.values() if len(t.shape) > 1}
        for dtype in torch.bfloat16, torch.float16:
            if dtype in {TORCH_DTYPES.get(kind, torch.bfloat16) for kind in kinds}:
                return dtype
        return torch.float32

    def _tensors(
        self, file_name: str, stored: GGUFTensorInfo
    ) -> dict[str, TensorInfo | DecodedTensor]:
        """The tensor under its name, or a stack of experts as a tensor for each."""
        top, _, kind = file_name.partition(".")
        block = IN_BLOCK.fullmatch(file_name)
        if top in TOP and kind in ("weight", "bias"):
            name = f"{TOP[top]}.{kind}"
        elif block is not None and block[2] in self.family.blocks:
            name = f"model.layers.{int(block[1])}.{self.family.blocks[block[2]]}.{block[3]}"
        else:
            return {
                file_name: self._tensor(file_name, file_name, stored)
            }  # for the loader to call unexpected
        if "{}" not in name:
            return {name: self._tensor(file_name, name, stored)}
        experts = self.config.get("num_local_experts") or self.config.get("num_experts")
        if len(stored.shape) != 3 or stored.shape[0] != experts:
            raise ValueError(
                f"{escape(self.file.path)}: tensor {quote(file_name)} is {list(stored.shape)}, no "
                "stack "
                f"of matrices of {experts} experts"
            )
        size = stored.nbytes // experts
        return {
            name.format(i): self._tensor(
                file_name,
                name.format(i),
                GGUFTensorInfo(stored.kind, stored.shape[1:], stored.offset + i * size, size),
            )
            for i in range(experts)
        }

    def _tensor(
        self, file_name: str, name: str, stored: GGUFTensorInfo
    ) -> TensorInfo | DecodedTensor:
        kind, shape, path = stored.kind, stored.shape, self.file.path
        head = self.config["head_dim"] if self.family.turned else 0
        head = head if ".attn_q." in file_name or ".attn_k." in file_name else 0
        if head and (head % 2 or shape[0] % head):
            raise ValueError(
                f"{escape(path)}: tensor {quote(file_name)} is {list(shape)}, no heads of "
                f"{head} rows"
            )
        if len(shape) == 1 and kind not in TORCH_DTYPES:
            raise ValueError(
                f"{escape(path)}: tensor {quote(file_name)} is {list(shape)} in blocks, as only "
                "matrices are"
            )
        plus = self.family.plus if file_name.endswith("norm.weight") else 0.0
        if ".ffn_gate_inp_shexp." in file_name and len(shape) == 1:
            shape = (1, *shape)
        if kind in TORCH_DTYPES and not head and not plus:
            return TensorInfo(TORCH_DTYPES[kind], shape, path, stored.offset)
        row_bytes = stored.nbytes // max(1, shape[0])
        return GGMLTensor(name, shape, path, stored.offset, kind, row_bytes, head, plus)
