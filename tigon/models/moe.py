"""Mixtures of experts: what all their configs say, and the balance of their experts in the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from tigon.layers import Balance, SparseMoE, balance
from tigon.models.config import Config, ConfigError, activation
from tigon.utils.json import quote

ROUTING_METRICS = ("aux_loss", "expert_load")  # of a forward; the head's are made of logits


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """A family with experts in place of the MLP, in all layers or in some."""

    # Names of the number of experts: the family's own, and others that transformers takes for it
    experts_keys: ClassVar[tuple[str, ...]] = ("num_experts",)

    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # transformers' name: whether aux_loss joins the loss
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        k, experts = self.num_experts_per_tok, self.experts
        if experts and not 1 <= k <= experts:
            raise ConfigError(f"num_experts_per_tok={k} is not in [1, {experts}], the experts")

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        given = {key: source[key] for key in cls.experts_keys if key in source}
        if not given:
            return super().from_dict(source)
        number, *others = given.values()
        if any(other != number for other in others):
            listed = " and ".join(f"{key}={quote(value)}" for key, value in given.items())
            raise ConfigError(f"{listed} are names of the same number; give one of them")
        rest = {key: value for key, value in source.items() if key not in cls.experts_keys}
        return super().from_dict(rest | {cls.experts_keys[0]: number})

    def to_dict(self) -> dict[str, Any]:
        # Of two names, one version of transformers or another reader knows one alone
        return super().to_dict() | dict.fromkeys(self.experts_keys, self.experts)

    @property
    def experts(self) -> int:
        return getattr(self, self.experts_keys[0])


def sparse_moe(c: MoEConfig, intermediate: int, **options: Any) -> SparseMoE:
    """Experts of that size with the config's numbers; `options` as SparseMoE has them."""
    sizes = c.hidden_size, intermediate, c.experts, c.num_experts_per_tok
    return SparseMoE(*sizes, activation(c.hidden_act), **options)


def balance_of(c: Config, tallies: Sequence[Tensor]) -> Balance | None:
    """From the tally of every layer with experts; None: the model has none."""
    if not isinstance(c, MoEConfig) or not tallies:
        return None
    return balance(tallies, c.num_experts_per_tok)


def aux_loss_coef(c: Config) -> float | None:
    """The weight of the experts' balance in the loss; None: it is no part of it."""
    if not isinstance(c, MoEConfig) or not c.output_router_logits:
        return None
    return c.router_aux_loss_coef
