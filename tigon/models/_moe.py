"""What the configs of all mixtures of experts say."""

from dataclasses import dataclass

from tigon.models._config import Config, ConfigError

ROUTING_METRICS = ("aux_loss", "expert_load")  # of a forward; the head's are made of logits


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """A family with experts in place of the MLP, in all layers or in some."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # transformers' name: whether aux_loss joins the loss
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        k, experts = self.num_experts_per_tok, self.experts
        if experts and not 1 <= k <= experts:
            raise ConfigError(f"num_experts_per_tok={k} is not in [1, {experts}], the experts")

    @property
    def balanced(self) -> bool:
        return self.output_router_logits

    @property
    def experts(self) -> int:
        raise NotImplementedError

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
