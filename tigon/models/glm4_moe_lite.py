"""GLM-4.7-Flash: DeepSeek-V3's blocks with another list of layers with experts.

Checked against transformers' modeling_glm4_moe_lite.
"""

from dataclasses import dataclass
from typing import Any

from tigon.models.causal_lm import CausalLM
from tigon.models.config import check_layer_kinds
from tigon.models.deepseek_v3 import LatentBlock, LatentConfig
from tigon.models.pretrained.names import CheckpointNames

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(LatentConfig):
    """The config of GLM-4.7-Flash: mlp_layer_types lists layers with experts."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    classifier_name = None

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    n_routed_experts: int = 64
    moe_intermediate_size: int = 1536
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.8
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1  # in published configs; mlp_layer_types decides
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    mlp_layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        types, layers = self.mlp_layer_types, self.num_hidden_layers
        if types is None:
            types = [DENSE] + [SPARSE] * (layers - 1)
            object.__setattr__(self, "mlp_layer_types", types)
        check_layer_kinds("mlp_layer_types", types, layers, DENSE, SPARSE)

    def to_dict(self) -> dict[str, Any]:
        """As ModelConfig's, with the number of dense first layers, for vLLM and SGLang."""
        types = self.mlp_layer_types or []
        first = types.index(SPARSE) if SPARSE in types else len(types)
        return super().to_dict() | {"first_k_dense_replace": first}

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.mlp_layer_types is not None and self.mlp_layer_types[layer] == SPARSE


class Glm4MoeLite(CausalLM):
    """GLM-4.7-Flash: a decoder of DeepSeek-V3's `LatentBlock`s."""

    config_class = Glm4MoeLiteConfig
    block_class = LatentBlock
    checkpoint_names = CheckpointNames(extra_layers=True)
