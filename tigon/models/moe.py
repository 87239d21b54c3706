"""Mixtures of experts: the shared part of their configs, and their auxiliary loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tigon.kernels.mlp.grouped_mlp import ExpertActivation
from tigon.layers import SparseMoE
from tigon.models.config import ConfigError, ModelConfig
from tigon.utils.json import quote

ROUTING_METRICS = ("aux_loss", "expert_load")  # metrics made of router statistics, not of logits


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ModelConfig):
    """The config of a family with experts in place of the MLP, in all layers or in some."""

    # Keys of the number of experts: the family's first, then others that transformers accepts
    experts_keys: ClassVar[tuple[str, ...]] = ("num_experts",)

    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        k, experts = self.num_experts_per_tok, self.experts
        if experts and not 1 <= k <= experts:
            raise ConfigError(f"num_experts_per_tok={k} is not in [1, {experts}], the experts")

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """As ModelConfig's, with the number of experts under any of `experts_keys`; ConfigError if
        it has several that differ."""
        counts = {key: source[key] for key in cls.experts_keys if key in source}
        if not counts:
            return super().from_dict(source)
        number, *duplicates = counts.values()
        if any(other != number for other in duplicates):
            listed = " and ".join(f"{key}={quote(value)}" for key, value in counts.items())
            raise ConfigError(f"{listed} are names of the same number; give one of them")
        rest = {key: value for key, value in source.items() if key not in cls.experts_keys}
        return super().from_dict(rest | {cls.experts_keys[0]: number})

    def to_dict(self) -> dict[str, Any]:
        """As ModelConfig's, with the number of experts under all names in `experts_keys`."""
        # Both names: some versions of transformers and other readers know only one of them
        return super().to_dict() | dict.fromkeys(self.experts_keys, self.experts)

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return getattr(self, self.experts_keys[0])


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertsConfig):
    """The config of a family whose loss may include aux_loss."""

    output_router_logits: bool = False  # whether aux_loss is added to the loss
    router_aux_loss_coef: float = 0.001


def sparse_moe(
    c: ExpertsConfig, intermediate: int, act: ExpertActivation | None = None, **options: Any
) -> SparseMoE:
    """Makes a SparseMoE with the config's sizes and activation, experts of size `intermediate`;
    raises ConfigError if there are none."""
    if not c.experts:
        raise ConfigError(f"{c.experts_keys[0]}=0, but {c.architecture} has layers of experts")
    sizes = c.hidden_size, intermediate, c.experts, c.num_experts_per_tok
    return SparseMoE(*sizes, act or c.mlp_activation, **options)


def aux_loss_coef(c: ModelConfig) -> float | None:
    """The coefficient of aux_loss in the loss; None if the loss does not include it."""
    if not isinstance(c, MoEConfig) or not c.output_router_logits:
        return None
    return c.router_aux_loss_coef
