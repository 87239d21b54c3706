"""gpt-oss: experts with biases and a clamped SwiGLU, attention with sinks and windows.

Paper: arXiv 2508.10925; checked against transformers' modeling_gpt_oss.
"""

from dataclasses import dataclass

from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.layers import SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.config import WindowedConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.moe import MoEConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig, WindowedConfig):
    """The config of gpt-oss: windows in every other layer, biases, and constants of its SwiGLU."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    full_every = 2
    default_theta = 150000.0
    default_rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    experts_keys = ("num_local_experts", "num_experts")
    ignored = frozenset({"experts_per_token", "initial_context_length"})  # older names

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


class GptOssBlock(PreNormBlock):
    """A `PreNormBlock` with sinks in attention, and with experts in place of the MLP."""

    norm_cast = "after_weight"
    attention_options = {"sinks": True}

    def make_mlp(self, c: GptOssConfig, layer: int) -> SparseMoE:
        act = ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit)
        # The softmax over the chosen experts is that over all, normalized to sum to 1
        options = {"normalize": True, "bias": True, "transposed": True}
        return sparse_moe(c, c.intermediate_size, act, **options)


class GptOss(CausalLM):
    """gpt-oss: `GptOssBlock`s, with the router's name in its checkpoints."""

    config_class = GptOssConfig
    block_class = GptOssBlock
    checkpoint_names = CheckpointNames(
        experts={},
        renamed={"mlp.gate.weight": "mlp.router.weight", "mlp.gate.bias": "mlp.router.bias"},
    )
