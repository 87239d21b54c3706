"""Checkpoints with experts in MXFP4, and what their weights are by definition."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def draw(name: str, experts: int, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Random codes and scales, of numbers that a weight may be."""
    generator = torch.Generator().manual_seed(0)
    shape = experts, outputs, inputs // 32
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def number(code: int) -> float:
    """A sign, two bits of the exponent and one of the mantissa; without exponent, half or none."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def meant(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """[E, K, O] in float64."""
    blocks, scales = tensors[f"{name}_blocks"].long(), tensors[f"{name}_scales"].double()
    numbers = torch.tensor([number(code) for code in range(16)], dtype=torch.float64)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # the low ones first
    return (numbers[codes] * 2.0 ** (scales - 127)[..., None]).flatten(-2).mT


def to_mxfp4(directory: Path) -> dict[str, Tensor]:
    """Replaces the experts' matrices of a checkpoint in place; what it now means, in bf16."""
    path, content, expected = directory / "model.safetensors", {}, {}
    for name, tensor in load_file(path).items():
        expected[name] = content[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = content.pop(name).shape
            packed = draw(name, experts, outputs, inputs)
            content |= packed
            expected[name] = meant(name, packed).bfloat16()
    save_file({k: v.contiguous() for k, v in content.items()}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return expected
