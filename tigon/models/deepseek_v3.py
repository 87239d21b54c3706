"""DeepSeek-V3 and R1: attention over latents, and many small experts chosen by groups.

Paper: arXiv 2412.19437; checked against transformers' modeling_deepseek_v3. Heads that predict
further tokens (multi-token prediction) are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tigon.layers import (
    GatedMLP,
    GroupRouter,
    LatentAttention,
    LatentSizes,
    SparseMoE,
    yarn_magnitude,
)
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError
from tigon.models.decoder import PreNormBlock, gated_mlp
from tigon.models.moe import ExpertsConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames

# How published configs describe what every model of these types is, and the training of the router
ROUTER_KEYS: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": (None, 1),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}
TRAINING_KEYS = {"aux_loss_alpha", "ep_size", "output_router_logits", "qk_head_dim", "seq_aux"}
TRAINING_KEYS |= {"num_mtp_layers", "num_nextn_predict_layers"}


@dataclass(frozen=True, kw_only=True)
class GroupMoEConfig(ExpertsConfig):
    """The config of mixtures whose experts are chosen by groups: layers from first_k_dense_replace
    on have experts, and shared ones without a gate."""

    experts_keys = ("n_routed_experts",)
    ignored = frozenset(TRAINING_KEYS)
    neutral = ROUTER_KEYS
    sigmoid_router: ClassVar[bool] = True  # as of GroupRouter

    n_routed_experts: int = 256
    n_shared_experts: int = 1
    moe_intermediate_size: int = 2048
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 3

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer >= self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class LatentConfig(GroupMoEConfig):
    """The config of latent attention and experts chosen by groups."""

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self._rope_head_dim)  # as transformers does
        super().__post_init__()
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads != kv_heads:
            raise ConfigError(
                f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}: latents give "
                "every head its own keys"
            )

    def layer_rope(self, layer: int) -> tuple[int, Mapping[str, Any]]:
        rope = {k: v for k, v in self.rope_parameters.items() if k != "partial_rotary_factor"}
        return self.qk_rope_head_dim, rope

    @property
    def _rope_head_dim(self) -> int:
        """The head dim that transformers takes partial_rotary_factor of."""
        return self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LatentConfig):
    """The config of DeepSeek-V3."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def to_dict(self) -> dict[str, Any]:
        """As ModelConfig's, with the keys of the router, which transformers does not write: without
        them vLLM takes softmax, and drops the correction of scores."""
        return super().to_dict() | {key: value for key, (_, value) in ROUTER_KEYS.items()}


class GroupMoEBlock(PreNormBlock):
    """A `PreNormBlock` with experts chosen by groups, and shared ones, or with an MLP."""

    def make_mlp(self, c: GroupMoEConfig, layer: int) -> GatedMLP | SparseMoE:
        if not c.sparse(layer):
            return gated_mlp(c)
        router = GroupRouter(
            c.hidden_size,
            c.n_routed_experts,
            c.num_experts_per_tok,
            sigmoid=c.sigmoid_router,
            groups=c.n_group,
            top_groups=c.topk_group,
            normalize=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        size = c.moe_intermediate_size
        shared = size * c.n_shared_experts
        return sparse_moe(c, size, shared_experts=shared, router=router)


class LatentBlock(GroupMoEBlock):
    """A `GroupMoEBlock` with attention over latents."""

    def make_mixer(self, c: LatentConfig, layer: int) -> LatentAttention:
        """Makes attention over latents; mscale_all_dim scales it by YaRN's magnitude squared."""
        plain, rotated, rope = c.qk_nope_head_dim, c.qk_rope_head_dim, c.rope_parameters
        sizes = LatentSizes(c.q_lora_rank, c.kv_lora_rank, plain, rotated, c.v_head_dim)
        scale, mscale = (plain + rotated) ** -0.5, rope.get("mscale_all_dim")
        if mscale and rope["rope_type"] != "default":
            scale *= yarn_magnitude(rope.get("factor", 1.0), mscale) ** 2
        return LatentAttention(
            c.hidden_size,
            c.num_attention_heads,
            sizes,
            scale=scale,
            bias=c.attention_bias,
            interleaved=c.rope_interleave,
        )


class DeepseekV3(CausalLM):
    """DeepSeek-V3, R1 and Moonlight; layers of multi-token prediction past the last are skipped."""

    config_class = DeepseekV3Config
    block_class = LatentBlock
    checkpoint_names = CheckpointNames(extra_layers=True)
