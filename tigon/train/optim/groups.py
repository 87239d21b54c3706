"""Which parameters an optimizer trains, and with which settings."""

from collections.abc import Collection
from typing import Any

from tigon.models import CausalLM
from tigon.train.config import Config


def freeze(model: CausalLM, config: Config) -> None:
    """Parameters of groups with `freeze` get neither gradients nor optimizer states."""


def parameter_groups(
    model: CausalLM, config: Config, apart: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Parameters to train, by their settings: weight_decay on matrices only, not on norms and
    biases; lr_scale multiplies the schedule's learning rate.

    Parameters named in `apart` have groups of their own, with apart=True.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decay = config.weight_decay if p.dim() > 1 else 0.0
            found.setdefault((name in apart, 1.0, decay), []).append(p)
    return [
        {"params": parameters, "apart": own, "lr_scale": scale, "weight_decay": decay}
        for (own, scale, decay), parameters in found.items()
    ]
