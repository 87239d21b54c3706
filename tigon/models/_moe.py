"""What the configs of all mixtures of experts say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tigon.models._config import Config, ConfigError

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
            listed = " and ".join(f"{key}={value}" for key, value in given.items())
            raise ConfigError(f"{listed} are names of the same number; give one of them")
        rest = {key: value for key, value in source.items() if key not in cls.experts_keys}
        return super().from_dict(rest | {cls.experts_keys[0]: number})

    def to_dict(self) -> dict[str, Any]:
        # Of two names, one version of transformers or another reader knows one alone
        return super().to_dict() | dict.fromkeys(self.experts_keys, self.experts)

    @property
    def balanced(self) -> bool:
        return self.output_router_logits

    @property
    def experts(self) -> int:
        return getattr(self, self.experts_keys[0])

    @property
    def expert_size(self) -> int:
        """Intermediate size of each."""
        raise NotImplementedError

    @property
    def shared_size(self) -> int:
        """Intermediate size of an expert that takes every token; 0: there is none."""
        return 0

    @property
    def normalize(self) -> bool:
        """Whether the weights of a token's experts sum to 1."""
        return True

    @property
    def exact_weights(self) -> bool:
        """Whether they stay in fp32."""
        return False

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return True
