"""torch's varlen_attn, FlashAttention-2 for packed rows, as an attention of transformers.

transformers has no other way to that kernel without the package flash-attn.

# H query heads, K key heads, T tokens of all sequences, D of a head
"""

from typing import Any

from torch import Tensor, nn

VARLEN = "torch_varlen"


def register_varlen() -> None:
    """Makes it an attn_implementation by the name VARLEN."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen)


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    *, cu_seq_lens_q: Tensor, max_length_q: int, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]"""
    from torch.nn.attention.varlen import varlen_attn

    more: Any = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    bounds = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    out: Any = varlen_attn(*flat, *bounds, window_size=(-1, 0), **more)
    return out[None], None
