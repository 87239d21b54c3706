"""Which parameters an optimizer trains, and with which settings."""

from typing import Any

from torch import nn

from tigon.train.config import Config


def parameter_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Weight decay on matrices only, not on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
