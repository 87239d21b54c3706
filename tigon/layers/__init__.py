"""nn.Modules over plain numbers; only model files see a config."""

from tigon.layers.attention import Attention
from tigon.layers.cache import Cache, KVCache
from tigon.layers.context import Context
from tigon.layers.embedding import Embedding
from tigon.layers.head import LMHead
from tigon.layers.linear import FusedLinear, GatedLinear, Linear
from tigon.layers.lora import Adapters, Copies, LoRAPart, LowRank
from tigon.layers.mlp import GatedMLP
from tigon.layers.moe import Balance, Routed, SparseMoE, balance, tally
from tigon.layers.norm import AddRMSNorm, RMSNorm
from tigon.layers.quantised import Fp8Weight, Nf4Weight, QuantisedWeight
from tigon.layers.rope import NoRotary, RotaryEmbedding, Rotation
from tigon.layers.state import MakeStates, Quantize, State
from tigon.layers.static_cache import StaticCache

__all__ = [
    "Adapters",
    "AddRMSNorm",
    "Attention",
    "Balance",
    "Cache",
    "Context",
    "Copies",
    "Embedding",
    "Fp8Weight",
    "FusedLinear",
    "GatedLinear",
    "GatedMLP",
    "KVCache",
    "LMHead",
    "Linear",
    "LoRAPart",
    "LowRank",
    "MakeStates",
    "Nf4Weight",
    "NoRotary",
    "QuantisedWeight",
    "Quantize",
    "RMSNorm",
    "RotaryEmbedding",
    "Rotation",
    "Routed",
    "SparseMoE",
    "State",
    "StaticCache",
    "balance",
    "tally",
]
