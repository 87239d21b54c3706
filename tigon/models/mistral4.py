"""Mistral Small 4: DeepSeek-V3 with YaRN, queries scaled by their position, and a softmax router.

Checked against transformers' modeling_mistral4; also the text model of Mistral 3 checkpoints whose
text_config names it.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError
from tigon.models.deepseek_v3 import LatentBlock, LatentConfig
from tigon.models.ministral3 import YARN, ScaledQueriesConfig
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(LatentConfig, ScaledQueriesConfig):
    """The config of Mistral Small 4: latents, experts, Llama 4's scaling of queries."""

    model_type = "mistral4"
    architecture = "Mistral4ForCausalLM"
    default_rope = YARN | {
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
    }
    partial_rotary = True
    ignored = LatentConfig.ignored | {"partial_rotary_factor"}  # qk_rope_head_dim decides
    sigmoid_router = False
    neutral = {}

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    max_position_embeddings: int = 1048576
    pad_token_id: int | None = 11
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    n_routed_experts: int = 128
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0
    kv_lora_rank: int = 256
    q_lora_rank: int | None = 1024
    qk_nope_head_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        share = {"partial_rotary_factor": self.qk_rope_head_dim / self.head_dim}
        rope = share | self.rope_parameters
        if int(self.head_dim * rope["partial_rotary_factor"]) != self.qk_rope_head_dim:
            raise ConfigError(
                f"partial_rotary_factor={rope['partial_rotary_factor']} of head_dim="
                f"{self.head_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        object.__setattr__(self, "rope_parameters", rope)

    @property
    def _rope_head_dim(self) -> int:
        """The head dim that transformers takes partial_rotary_factor of."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Mistral4(CausalLM):
    """Mistral Small 4: `LatentBlock`s; checkpoints stack all experts of a layer."""

    config_class = Mistral4Config
    block_class = LatentBlock
    checkpoint_names = CheckpointNames(experts={})
