"""GLM-4-0414: four norms per block as in Gemma 2, and interleaved RoPE on half of each head.

Paper: arXiv 2406.12793; checked against transformers' modeling_glm4.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import SandwichBlock
from tigon.models.pretrained.names import QKV, CheckpointNames


@dataclass(frozen=True, kw_only=True)
class Glm4Config(ModelConfig):
    """The config of GLM-4-0414, with biases of q, k, v and RoPE on part of each head."""

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    partial_rotary = True
    rotary_share = 0.5

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    pad_token_id: int | None = 151329
    attention_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eos_token_id is None:  # null means these, too
            object.__setattr__(self, "eos_token_id", [151329, 151336, 151338])


class Glm4Block(SandwichBlock):
    """A `SandwichBlock` with GLM's names of norms, and interleaved RoPE."""

    NORMS = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    attention_options = {"out_bias": False, "interleaved": True}


class Glm4(CausalLM):
    """GLM-4-0414; its checkpoints store gate and up packed, and q, k and v separately."""

    config_class = Glm4Config
    block_class = Glm4Block
    checkpoint_names = CheckpointNames(packed=QKV)  # gate_up_proj is stored packed
