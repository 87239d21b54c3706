"""Checkpoints in block-scaled fp8, and what their weights are by definition."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
DYNAMIC = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
Block = tuple[int, int] | None


def quantize(
    weight: Tensor, block: Block, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The weight [..., N, K] in fp8 and a scale for each block, or for each matrix."""
    n, k = block or weight.shape[-2:]
    rows, columns = weight.shape[-2:]
    grid = (*weight.shape[:-2], -(-rows // n), -(-columns // k))
    scales = torch.empty(grid)
    codes = torch.empty(weight.shape, dtype=E4M3)
    for i in range(grid[-2]):
        for j in range(grid[-1]):
            inside = (..., slice(i * n, (i + 1) * n), slice(j * k, (j + 1) * k))
            values = weight[inside].float()
            scale = (values.abs().amax((-2, -1), keepdim=True) / 448).to(dtype).float()
            scales[..., i, j] = scale[..., 0, 0]
            codes[inside] = (values / scale).to(E4M3)
    return codes, scales.to(dtype) if block else scales.to(dtype)[..., 0, 0]


def dequantized(codes: Tensor, scales: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Element by element what the format says: number times scale in fp32, rounded once."""
    n, k = block or codes.shape[-2:]
    rows, columns = (
        torch.arange(size) // b for size, b in zip(codes.shape[-2:], (n, k), strict=True)
    )
    scales = scales if block else scales[..., None, None]
    return (codes.float() * scales.float()[..., rows[:, None], columns]).to(dtype)


def to_fp8(
    directory: Path, block: Block, settings: dict[str, Any], scale: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Quantizes the matrices of the blocks of a checkpoint in place; what it now means, in bf16."""
    meant: dict[str, Tensor] = {}
    path, content = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if name.endswith("e_score_correction_bias"):  # in fp32 in published ones
            tensor = tensor.float()
        meant[name] = content[name] = tensor
        if tensor.dim() < 2 or "layers" not in name or "gate.weight" in name:
            continue
        content[name], scales = quantize(tensor, block, scale)
        content[f"{name}_scale_inv"] = scales
        meant[name] = dequantized(content[name], scales, block, torch.bfloat16)
        if settings.get("activation_scheme") == "static":
            content[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.37)
    save_file({k: v.contiguous() for k, v in content.items()}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    given = settings if block is None else settings | {"weight_block_size": list(block)}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    return meant
