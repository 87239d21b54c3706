"""Runs that train an adapter: their settings and their tensors."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SETTINGS: dict[str, Any] = {
    "steps": 4, "save_every": 2, "keep_last": 0, "lr": 1e-2, "lora.rank": 4, "lora.alpha": 8,
    "lora.merge": "true", "export": "true",
}  # fmt: skip


def tensors(directory: Path, kind: str = "weights") -> dict[str, torch.Tensor]:
    """All that a checkpoint has of a kind, of one rank."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob(f"{kind}-*.safetensors")):
        found |= load_file(path)
    return found


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol=1e-4, atol=1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=told)
