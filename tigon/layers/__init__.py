"""nn.Modules with numbers as arguments; only model files read a config."""

from tigon.distributed.context_attention import ContextShard
from tigon.layers.attention import Attention, SoftmaxAttention
from tigon.layers.context import BlockInputs
from tigon.layers.embedding import Embedding, LowRankEmbedding
from tigon.layers.float32 import Float32Module
from tigon.layers.gated_delta_net import GatedDeltaNet
from tigon.layers.kv_cache import Cache, KVCache, StaticCache
from tigon.layers.kv_state import LayerState, StateSpec
from tigon.layers.latent_attention import LatentAttention, LatentSizes
from tigon.layers.linear import FusedLinear, GatedLinear, Linear, RowOrder
from tigon.layers.lm_head import LMHead
from tigon.layers.lora import Adapters, LayerAdapter, LoRAPart, LowRank, LowRankExperts
from tigon.layers.mlp import GatedMLP
from tigon.layers.moe import Balance, Experts, MoEOutput, SparseMoE, balance, count_routing
from tigon.layers.norm import AddRMSNorm, RMSNorm
from tigon.layers.quantized import FP8Weight, NF4Weight, QuantizedWeight
from tigon.layers.rope import RotaryEmbedding, Rotation, make_rotary, rotated_dims, yarn_magnitude
from tigon.layers.router import GroupRouter, ScaledRouter, TopKRouter
from tigon.layers.short_conv import ShortConv

__all__ = [
    "Adapters", "AddRMSNorm", "Attention", "Balance", "BlockInputs", "Cache", "ContextShard",
    "Embedding", "Experts", "FP8Weight", "Float32Module", "FusedLinear", "GatedDeltaNet",
    "GatedLinear", "GatedMLP", "GroupRouter", "KVCache", "LMHead", "LatentAttention", "LatentSizes",
    "LayerAdapter", "LayerState", "Linear", "LoRAPart", "LowRank", "LowRankEmbedding",
    "LowRankExperts", "MoEOutput", "NF4Weight", "QuantizedWeight", "RMSNorm", "RotaryEmbedding",
    "Rotation", "RowOrder", "ScaledRouter", "ShortConv", "SoftmaxAttention",
    "SparseMoE", "StateSpec", "StaticCache", "TopKRouter", "balance", "count_routing",
    "make_rotary", "rotated_dims", "yarn_magnitude",
]  # fmt: skip
