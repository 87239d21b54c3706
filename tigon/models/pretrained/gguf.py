"""Reads GGUF files as checkpoints, undoing what llama.cpp's conversion renames, permutes and omits.

Metadata become config.json's keys, and tensors get Hugging Face's names. Checked against
llama.cpp's convert_hf_to_gguf.py and llama-model.cpp: what no key says is in the code.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tigon.layers.rope import scale_llama3
from tigon.models.rope_config import FULL, SLIDING
from tigon.utils.config import ConfigError
from tigon.utils.json import escape, quote
from tigon.weights import GGUF, Checkpoint, DecodedTensor, GGMLTensor, TensorInfo
from tigon.weights.gguf import TORCH_DTYPES, GGUFTensorInfo
from tigon.weights.read import Reader

FREQS = "rope_freqs.weight"
# The same in Llama 3.1 to 3.3; a file only has the divisors that follow from it
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROUNDING = 1e-6  # relative error of divisors that were computed in fp32


def read_gguf_rope(file: GGUF, keys: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Pops RoPE's metadata from `keys`; returns config.json's rope_theta and rope_scaling."""
    theta = keys.pop("rope.freq_base", 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ConfigError(f"rope.freq_base={quote(theta)} is not a positive number")
    scaling = _pop_scaling(keys)
    if FREQS in file.tensors:
        if scaling is not None:
            raise ConfigError(f"rope.scaling and {FREQS} exclude each other, and both are there")
        scaling = _fit_scaling(_read_divisors(file, config["head_dim"]), theta, config)
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _pop_scaling(keys: dict[str, Any]) -> dict[str, Any] | None:
    """Pops the metadata about the scaling of RoPE; returns config.json's rope_scaling."""
    linear = keys.pop("rope.scale_linear", None)  # in the oldest files
    kind = keys.pop("rope.scaling.type", "none" if linear is None else "linear")
    factor = keys.pop("rope.scaling.factor", linear)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):  # 0: not set
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope.scaling.type={quote(kind)} is not none, linear or yarn")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"),
            ("attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if f"rope.scaling.{key}" in keys:
                scaling[name] = keys.pop(f"rope.scaling.{key}")
    return scaling


def _read_divisors(file: GGUF, head_dim: int) -> Tensor:
    """Reads the numbers [head_dim / 2] that RoPE's frequencies are divided by."""
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


def _fit_scaling(divisors: Tensor, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    """Finds the rope_scaling with these divisors: Llama 3's if its formula fits, else LongRoPE's
    with the divisors as both lists of factors."""
    factor = round(divisors.max().item(), 4)
    llama3 = LLAMA3 | {"factor": factor}
    expected = llama3_divisors(llama3 | {"rope_theta": theta}, config["head_dim"])
    if torch.allclose(divisors, expected, rtol=ROUNDING, atol=0):
        return llama3
    numbers = [float(str(number)) for number in divisors.numpy()]  # fp32's shortest decimals
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Computes the numbers [head_dim / 2] by which Llama 3's scaling divides RoPE's frequencies."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    inv_freq = 1 / rope["rope_theta"] ** exponents
    return (inv_freq / scale_llama3(inv_freq, rope)).float()


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
MAX_TENSORS = 1 << 17  # with one for each expert; ten times as many as the largest models have
IN_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")

# Metadata key without the architecture -> config.json's key
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
# Keys that do not change what the model computes, or that repeat what the tensors show
IGNORED = {"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"}


@dataclass(frozen=True)
class Architecture:
    """How to read files of one of llama.cpp's architectures, named by general.architecture."""

    model_type: str
    blocks: Mapping[str, str]  # llama.cpp's name of a tensor in a block -> Hugging Face's
    keys: Mapping[str, str] = field(default_factory=dict)  # required metadata, as in SIZES
    optional: Mapping[str, str] = field(default_factory=dict)  # optional metadata
    fixed: Mapping[str, Any] = field(default_factory=dict)  # config.json's keys without metadata
    bias: str = ""  # config.json's key for biases of queries, keys and values; "" if it has none
    permuted: bool = False  # whether rows of queries and keys are permuted, see GGMLTensor.head
    norm_offset: float = 0.0  # the number that the conversion adds to weights of norms
    # The number of layers with which scores are scaled by (hidden_size / heads)**-0.5
    scaled_by_width: int = 0
    full_every: int = 0  # every n-th layer has no sliding window, the others do; 0: none has
    # Whether the head is the embedding, or always has a weight of its own; None: either
    tied: bool | None = None
    biased: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")  # tensors that may have a bias
    square: bool = False  # whether it wants heads that have hidden_size dims together


BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
ARCHITECTURES = {
    "llama": Architecture("llama", LLAMA, bias="attention_bias", permuted=True, biased=BIASED),
    "qwen2": Architecture("qwen2", LLAMA, square=True),
    "qwen2moe": Architecture(
        "qwen2_moe",
        QWEN_MOE,
        SHARED,
        fixed={"norm_topk_prob": False},
        bias="qkv_bias",
        square=True,
        tied=False,
    ),
    "qwen3": Architecture("qwen3", LLAMA, bias="attention_bias"),
    "qwen3moe": Architecture(
        "qwen3_moe", QWEN_MOE, QWEN_EXPERTS, fixed={"norm_topk_prob": True}, bias="attention_bias"
    ),
    "gemma": Architecture("gemma", LLAMA, norm_offset=1.0, tied=True),
    "gemma2": Architecture(
        "gemma2",
        GEMMA2,
        optional={
            **CAP,
            "attn_logit_softcapping": "attn_logit_softcapping",
            WINDOW: "sliding_window",
        },
        norm_offset=1.0,
        scaled_by_width=46,
        full_every=2,
        tied=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        GEMMA2,
        {WINDOW: "sliding_window"},
        optional={**CAP, "rope.freq_base_swa": "rope_local_base_freq"},
        norm_offset=1.0,
        scaled_by_width=62,
        full_every=6,
    ),
}
# Files call Mixtral "llama" with experts, and Mistral "llama"
MIXTRAL_ARCHITECTURE = Architecture(
    "mixtral", MIXTRAL, EXPERTS | {"expert_count": "num_local_experts"}, permuted=True
)


class GGUFModel:
    """A GGUF file's `config`, as in config.json, and `checkpoint`, with Hugging Face's names."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        metadata = file.metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                f"split.count={quote(metadata['split.count'])}: a file in parts is not read; join "
                "them with llama-gguf-split --merge"
            )
        if metadata.get("general.type", "model") != "model":
            raise ConfigError(f"general.type={quote(metadata['general.type'])} is not a model")
        self.name = metadata.get("general.architecture")
        if not isinstance(self.name, str) or self.name not in ARCHITECTURES:
            raise ConfigError(
                f"general.architecture={quote(self.name)} is not read, only "
                f"{', '.join(ARCHITECTURES)}: use the model's safetensors repository"
            )
        self.architecture = ARCHITECTURES[self.name]
        prefix = f"{self.name}."
        keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        if self.name == "llama" and keys.get("expert_count"):
            self.architecture = MIXTRAL_ARCHITECTURE
        self.config = self._pop_config(keys)

    def checkpoint(self, name: str) -> Checkpoint:
        """Describes the tensors under Hugging Face's names; errors call the file `name`."""
        tensors: dict[str, TensorInfo | DecodedTensor] = {}
        for file_name, stored in self.file.tensors.items():
            if file_name != FREQS:  # the config has it
                tensors |= self._map_tensor(file_name, stored)
                if len(tensors) > MAX_TENSORS:
                    raise ValueError(f"{name} has more than {MAX_TENSORS} tensors and experts")
        return Checkpoint(name, tensors)

    def _pop_config(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Pops all metadata of the architecture; returns config.json's content. Raises ConfigError
        for keys that are left over."""
        family, tensors = self.architecture, self.file.tensors
        config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
        for key, name in {**SIZES, **family.keys}.items():
            config[name] = self._pop_size(keys, key)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        config["num_key_value_heads"] = self._pop_size(keys, "attention.head_count_kv", heads)
        config["head_dim"] = self._pop_size(keys, "attention.key_length", hidden // heads)
        for key in "attention.value_length", "rope.dimension_count":
            if (size := self._pop_size(keys, key, config["head_dim"])) != config["head_dim"]:
                raise ConfigError(
                    f"{self.name}.{key}={size} must be the size of a head, {config['head_dim']}"
                )
        config["rms_norm_eps"] = self._pop(keys, "attention.layer_norm_rms_epsilon")
        config |= {name: keys.pop(key) for key, name in family.optional.items() if key in keys}
        config |= read_gguf_rope(self.file, keys, config)
        if family.scaled_by_width:
            by_width = config["num_hidden_layers"] == family.scaled_by_width
            config["query_pre_attn_scalar"] = hidden // heads if by_width else config["head_dim"]
        if family.model_type == "gemma3_text":
            pattern = keys.pop("attention.sliding_window_pattern", family.full_every)
            if isinstance(pattern, list):  # a boolean for each layer
                config["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
            else:
                config["sliding_window_pattern"] = pattern
        if not keys.pop("attention.causal", True):
            raise ConfigError(f"{self.name}.attention.causal is false: no causal model")
        if keys.get("expert_count") == 0:  # llama, not mixtral
            keys.pop("expert_count"), keys.pop("expert_used_count", None)
        if unknown := sorted(keys.keys() - IGNORED):
            settings = ", ".join(
                f"{self.name}.{escape(key, 100)}={quote(keys[key])}" for key in unknown[:5]
            )
            raise ConfigError(f"metadata that may change what the model computes: {settings}")

        if (embedding := tensors.get("token_embd.weight")) is None:
            raise ConfigError("the file has no tensor token_embd.weight")
        config["vocab_size"] = embedding.shape[0]
        config["tie_word_embeddings"] = "output.weight" not in tensors
        if family.bias:
            config[family.bias] = "blk.0.attn_q.bias" in tensors
        if family.model_type == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors

        # Matrices' dtype, bfloat16 if they are quantized; norms are fp32 in any file
        kinds = {t.kind for t in tensors.values() if len(t.shape) > 1}
        dtypes = {TORCH_DTYPES.get(kind, torch.bfloat16) for kind in kinds}
        halves = (dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes)
        config["dtype"] = str(next(halves, torch.float32)).removeprefix("torch.")
        return config | self._token_ids()

    def _pop(self, keys: dict[str, Any], key: str, default: Any = None) -> Any:
        """Pops a metadata value; raises ConfigError if there is neither it nor a default."""
        if (value := keys.pop(key, default)) is None:
            raise ConfigError(f"the metadata lack {self.name}.{key}")
        return value

    def _pop_size(self, keys: dict[str, Any], key: str, default: int | None = None) -> int:
        """Pops a size of at least 1, which may be a list with one equal size for each layer; raises
        ConfigError for anything else."""
        value = self._pop(keys, key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.name}.{key}={quote(value)} is not a size of at least 1, equal in all layers"
            )
        return value

    def _token_ids(self) -> dict[str, Any]:
        """Reads config.json's ids of special tokens; eos_token_id is a list if the metadata have
        other ends of a turn or a message."""
        values = self.file.metadata
        ids = {
            f"{name}_token_id": values.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        ends = [ids["eos_token_id"]]
        ends += [values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
        ends = list(dict.fromkeys(end for end in ends if end is not None))
        if len(ends) > 1 or ids["eos_token_id"] is None:
            ids["eos_token_id"] = ends or None
        return ids

    def _map_tensor(
        self, file_name: str, stored: GGUFTensorInfo
    ) -> dict[str, TensorInfo | DecodedTensor]:
        """Maps a tensor of the file to Hugging Face's: one, or one for each expert of a stack."""
        top, _, kind = file_name.partition(".")
        block = IN_BLOCK.fullmatch(file_name)
        if top in TOP and kind in ("weight", "bias"):
            name = f"{TOP[top]}.{kind}"
        elif block is not None and block[2] in self.architecture.blocks:
            name = f"model.layers.{int(block[1])}.{self.architecture.blocks[block[2]]}.{block[3]}"
        else:
            name = file_name  # which the loader reports as unexpected
        if "{}" not in name or name == file_name:
            return {name: self._make_tensor(file_name, name, stored)}
        experts = self.config.get("num_local_experts") or self.config.get("num_experts")
        if len(stored.shape) != 3 or stored.shape[0] != experts:
            raise ValueError(
                f"{escape(self.file.path)}: tensor {quote(file_name)} is {list(stored.shape)}, no "
                f"stack of matrices of {experts} experts"
            )
        size = stored.nbytes // experts
        matrices = (
            GGUFTensorInfo(stored.kind, stored.shape[1:], stored.offset + i * size, size)
            for i in range(experts)
        )
        return {
            name.format(i): self._make_tensor(file_name, name.format(i), matrix)
            for i, matrix in enumerate(matrices)
        }

    def _make_tensor(
        self, file_name: str, name: str, stored: GGUFTensorInfo
    ) -> TensorInfo | DecodedTensor:
        """Describes a tensor to the loader, decoded unless the file holds it in a torch dtype."""
        kind, shape, path = stored.kind, stored.shape, self.file.path
        permuted = self.architecture.permuted and re.search(r"\.attn_[qk]\.", file_name)
        head = self.config["head_dim"] if permuted else 0
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
        offset = self.architecture.norm_offset if file_name.endswith("norm.weight") else 0.0
        if ".ffn_gate_inp_shexp." in file_name and len(shape) == 1:
            shape = (1, *shape)
        if kind in TORCH_DTYPES and not head and not offset:
            return TensorInfo(TORCH_DTYPES[kind], shape, path, stored.offset)
        row_bytes = stored.nbytes // max(1, shape[0])
        return GGMLTensor(name, shape, path, stored.offset, kind, row_bytes, head, offset)
