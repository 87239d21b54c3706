"""Runs that train an adapter: their settings, and comparisons of two of them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SETTINGS: dict[str, Any] = {
    "steps": 4, "save_every": 2, "keep_last": 0, "lr": 1e-2, "lora.rank": 4, "lora.alpha": 8,
    "lora.merge": "true", "export": "true",
}  # fmt: skip
EXPORTS = ("adapter/adapter_model.safetensors", "hf/model.safetensors")


def step(workspace: Any, run: str, number: int) -> Path:
    return workspace.root / run / "checkpoints" / f"step-{number:08d}"


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


def assert_same_curve(
    workspace: Any, run: str, other: str, rel: float = 1e-5, keys=("loss", "grad_norm")
) -> None:
    """The last rows of `other`, as many as `run` has; of rel=0 bit for bit."""
    for key in keys:
        found, expected = (workspace.metrics(name, key) for name in (run, other))
        assert found, key
        assert found == pytest.approx(expected[-len(found) :], rel=rel, abs=0), key


def assert_same_run(workspace: Any, run: str, other: str, files=EXPORTS) -> None:
    """Sums over ranks are added in another order."""
    assert_same_curve(workspace, run, other)
    for name in files:
        assert_close(*(load_file(workspace.root / r / name) for r in (run, other)))
