"""Checkpoints of one file."""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tigon.weights import BlockScales, Checkpoint, Repository


def save(
    directory: Path, tensors: dict[str, Tensor], scales: BlockScales | None = None
) -> Checkpoint:
    """Writes a checkpoint, and opens it."""
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint.open(Repository(directory), scales)
