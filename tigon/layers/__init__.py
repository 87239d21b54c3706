"""nn.Modules over plain numbers; only model files see a config."""

from tigon.distributed.context_attention import Shard
from tigon.layers.attention import Attention
from tigon.layers.context import Context
from tigon.layers.embedding import Embedding, LowRankEmbedding
from tigon.layers.kv_cache import Cache, KVCache, MakeStates, Quantize, State, StaticCache
from tigon.layers.linear import FusedLinear, GatedLinear, Linear
from tigon.layers.lm_head import LMHead
from tigon.layers.lora import Adapters, Copies, LayerAdapter, LoRAPart, LowRank, LowRankExperts
from tigon.layers.mlp import GatedMLP
from tigon.layers.moe import Balance, Experts, Routed, SparseMoE, balance, tally
from tigon.layers.norm import AddRMSNorm, RMSNorm
from tigon.layers.quantized import Fp8Weight, Nf4Weight, QuantisedWeight
from tigon.layers.rope import NoRotary, RotaryEmbedding, Rotation

__all__ = [
    "Adapters",
    "AddRMSNorm",
    "Attention",
    "Balance",
    "Cache",
    "Context",
    "Copies",
    "Embedding",
    "Experts",
    "Fp8Weight",
    "FusedLinear",
    "GatedLinear",
    "GatedMLP",
    "KVCache",
    "LMHead",
    "LayerAdapter",
    "Linear",
    "LoRAPart",
    "LowRank",
    "LowRankEmbedding",
    "LowRankExperts",
    "MakeStates",
    "Nf4Weight",
    "NoRotary",
    "QuantisedWeight",
    "Quantize",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "Routed",
    "Shard",
    "SparseMoE",
    "State",
    "StaticCache",
    "balance",
    "tally",
]
