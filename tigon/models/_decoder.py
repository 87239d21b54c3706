"""The stack of blocks between embedding and head.

# B batch, T tokens, C model dim
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.kernels.attention import AttentionMask
from tigon.layers import AddRMSNorm, Cache, Embedding, NoRotary, RotaryEmbedding, Routed, tally
from tigon.models._config import Config


class Decoder(nn.Module):
    """Embedding, blocks and final norm; parameters carry Hugging Face's names."""

    def __init__(self, config: Config, block: type[nn.Module]):
        super().__init__()
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            padding_idx=config.pad_token_id,
            scale=config.embedding_scale,
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(block(config, i) for i in layers)
        self.norm = AddRMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            offset=config.norm_offset,
            cast=config.norm_cast,
        )
        self.input_scale, self.rounded_angles = config.input_scale, config.rounded_angles
        names = list(config.ropes)
        self.rotary_embs = nn.ModuleList(
            RotaryEmbedding(config.rotary_dim, rope, config.max_position_embeddings)
            if rope
            else NoRotary(config.rotary_dim)
            for rope in config.ropes.values()
        )
        self.rope_of_layer = [names.index(config.rope(i)) for i in layers]

    def forward(
        self,
        x: Tensor,  # [B, T, C]
        position_ids: Tensor,  # [B or 1, T]
        mask: AttentionMask,
        cache: Cache | None,
        recompute: bool,
        tallied: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The normed stream, and with `tallied` how each layer of experts routed its tokens."""
        if self.input_scale != 1.0:
            x = x * self.input_scale
        dtype = x.dtype if self.rounded_angles else torch.float32
        ropes = [rope(position_ids, dtype) for rope in self.rotary_embs]
        residual = None
        tallies: list[Tensor] = []
        key_mask = mask.key_mask if tallied else None
        real = None if key_mask is None else key_mask[:, mask.past :].flatten()
        for block, rope in zip(self.layers, self.rope_of_layer, strict=True):
            rotation = ropes[rope]
            # A recomputed block would append to the cache again
            if recompute and cache is None and torch.is_grad_enabled():
                x, residual = checkpoint(
                    block, x, residual, rotation, mask, cache, use_reentrant=False
                )
            else:
                x, residual = block(x, residual, rotation, mask, cache)
            if isinstance(x, Routed):
                if tallied:
                    tallies.append(tally(x, real))
                x = x.x
        return self.norm(x, residual)[0], tallies
