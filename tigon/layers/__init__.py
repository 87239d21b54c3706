"""nn.Modules with numbers as arguments; only model files read a config."""

from tigon.distributed.context_attention import ContextShard
from tigon.layers.attention import Attention
from tigon.layers.context import BlockInputs
from tigon.layers.embedding import Embedding, LowRankEmbedding
from tigon.layers.kv_cache import Cache, KVCache, LayerState, StaticCache
from tigon.layers.latent_attention import LatentAttention, LatentSizes
from tigon.layers.linear import FusedLinear, GatedLinear, Linear
from tigon.layers.lm_head import LMHead
from tigon.layers.lora import (
    Adapters,
    LayerAdapter,
    LoRAPart,
    LowRank,
    LowRankExperts,
    SavedModules,
)
from tigon.layers.mlp import GatedMLP
from tigon.layers.moe import Balance, Experts, MoEOutput, SparseMoE, balance, count_routing
from tigon.layers.norm import AddRMSNorm, RMSNorm, UnitRMSNorm
from tigon.layers.quantized import FP8Weight, NF4Weight, QuantizedWeight
from tigon.layers.rope import NoRotary, RotaryEmbedding, Rotation, make_rotary, yarn_magnitude
from tigon.layers.router import GroupRouter

__all__ = [
    "Adapters",
    "AddRMSNorm",
    "Attention",
    "Balance",
    "BlockInputs",
    "Cache",
    "ContextShard",
    "Embedding",
    "Experts",
    "FP8Weight",
    "FusedLinear",
    "GatedLinear",
    "GatedMLP",
    "GroupRouter",
    "KVCache",
    "LMHead",
    "LatentAttention",
    "LatentSizes",
    "LayerAdapter",
    "LayerState",
    "Linear",
    "LoRAPart",
    "LowRank",
    "LowRankEmbedding",
    "LowRankExperts",
    "MoEOutput",
    "NF4Weight",
    "NoRotary",
    "QuantizedWeight",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "SavedModules",
    "SparseMoE",
    "StaticCache",
    "UnitRMSNorm",
    "balance",
    "count_routing",
    "make_rotary",
    "yarn_magnitude",
]
