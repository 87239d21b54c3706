"""OLMoE: Llama with QK-norm across all heads and many small experts in place of each MLP.

Paper: arXiv 2409.02060; checked against transformers' modeling_olmoe.
"""

from dataclasses import dataclass

from tigon.layers import Attention, SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.decoder import PreNormBlock
from tigon.models.moe import MoEConfig, sparse_moe


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    """The config of OLMoE, with an optional bound of queries, keys and values (`clip_qkv`)."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    classifier_name = None
    experts_keys = ("num_experts", "num_local_experts")

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01


class OlmoeBlock(PreNormBlock):
    """A `PreNormBlock` with norms of whole queries and keys, across heads, and with experts."""

    qk_norm = True

    def make_mixer(self, c: OlmoeConfig, layer: int) -> Attention:
        return self.make_attention(c, layer, flat_qk_norm=True, clip=c.clip_qkv)

    def make_mlp(self, c: OlmoeConfig, layer: int) -> SparseMoE:
        return sparse_moe(c, c.intermediate_size, normalize=c.norm_topk_prob)


class Olmoe(CausalLM):
    """OLMoE: a decoder of `OlmoeBlock`s."""

    config_class = OlmoeConfig
    block_class = OlmoeBlock
