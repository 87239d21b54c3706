"""Mixtral: Mistral with eight experts in place of each MLP, two of them active per token.

Paper: arXiv 2401.04088; checked against transformers' modeling_mixtral.
"""

from dataclasses import dataclass

from tigon.layers import SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.decoder import PreNormBlock
from tigon.models.moe import MoEConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig):
    """The config of Mixtral: `MoEConfig` with num_local_experts and an optional sliding window."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    default_theta = 1e6
    experts_keys = ("num_local_experts", "num_experts")

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = None
    num_local_experts: int = 8


class MixtralBlock(PreNormBlock):
    """A `PreNormBlock` with experts whose routing weights sum to 1."""

    def make_mlp(self, c: MixtralConfig, layer: int) -> SparseMoE:
        return sparse_moe(c, c.intermediate_size, normalize=True, exact_weights=True)


class Mixtral(CausalLM):
    """Mixtral: `MixtralBlock`s, with the names of experts in its checkpoints (w1, w3, w2)."""

    config_class = MixtralConfig
    block_class = MixtralBlock
    checkpoint_names = CheckpointNames(
        experts={
            "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
            "mlp.experts.gate_up_proj": (
                "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight",
            ),
            "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
        }
    )
