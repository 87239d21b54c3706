"""Writes GGUF files as llama.cpp's convert_hf_to_gguf.py does, as far as the tests need it."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Halves of every head's rows to neighbours."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """The converter's own lines, in its precision."""
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    found = []
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        if wavelength < old / high:
            found.append(1)
        elif wavelength > old / low:
            found.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32)


def gguf_tensors(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors as llama.cpp has them: names by the package's own table."""
    arch = ARCHITECTURES[config["model_type"]]
    (known,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.float()
        if arch == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == "qwen2moe" and name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        parts = name.split(".experts.")
        if len(parts) == 2:
            stack = f"{parts[0]}.experts.{parts[1].split('.', 1)[1]}"
            experts.setdefault(stack, []).append(tensor)
            continue
        found[table.get_name(name, (".weight", ".bias")) or name] = tensor
    for name, of_all in experts.items():
        found[table.get_name(name, (".weight",)) or name] = torch.stack(of_all)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(rope, config["head_dim"])
    return found


def metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    c, arch = config, ARCHITECTURES[config["model_type"]]
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if arch == "llama":
        writer.add_rope_dimension_count(c["head_dim"])
        writer.add_vocab_size(c["vocab_size"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := c.get("num_local_experts") or c.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
    if size := c.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := c.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(c["sliding_window"])
        if c.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(c["final_logit_softcapping"])
        if c.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    for name in "bos", "eos", "pad":
        if (token := c.get(f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)


def write_gguf(
    source: Path, target: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **more: Any
) -> dict[str, Tensor]:
    """A checkpoint of transformers as a GGUF file, its matrices of the type; what it now holds.

    `more` adds metadata: key -> value of the writer's `add_{type}`, as "uint32:llama.x".
    """
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    metadata(writer, config)
    for key, value in more.items():
        form, _, name = key.partition(":")
        getattr(writer, f"add_{form}")(name, value)
    held = {}
    for name, tensor in gguf_tensors(config, tensors).items():
        own = kind if tensor.dim() > 1 and "gate_inp" not in name else GGMLQuantizationType.F32
        data = quantized(tensor.numpy(), own)
        writer.add_tensor(name, data, raw_dtype=own)
        held[name] = torch.from_numpy(quants.dequantize(data, own).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """In blocks of the type; where the package only reads it, random blocks with small scales."""
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        length, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // length, size)
        blocks = np.random.default_rng(0).integers(0, 128, shape, dtype=np.uint8)
        for at in SCALES[kind.name]:
            blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), dtype=np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)


# Where blocks have their fp16 scales
SCALES = {"Q3_K": (108,), "Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
