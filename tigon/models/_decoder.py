"""The stack of blocks between embedding and head.

# B batch, T tokens, C model dim
"""

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.kernels.attention import AttentionMask
from tigon.layers import (
    AddRMSNorm,
    Cache,
    Context,
    Embedding,
    NoRotary,
    RotaryEmbedding,
    Shard,
    State,
)
from tigon.layers.collectives import Ranks
from tigon.layers.offload import Offload
from tigon.layers.state import KVState
from tigon.layers.stream import Stream
from tigon.models._blocks import Block, defers_sums, sums_branches
from tigon.models._config import Config
from tigon.models._watched import has_hooks, warn_of_parts
from tigon.utils.random import as_int64, mix


def recomputed_blocks(setting: int | Collection[int], layers: int) -> Collection[int]:
    """The indices of blocks that are computed again; n: every n-th, 0 or False: none."""
    if not isinstance(setting, int):
        return setting
    return range(0, layers, setting) if setting else ()


class Decoder(nn.Module):
    """Embedding, blocks and final norm; parameters carry Hugging Face's names.

    `embedding_scale` multiplies the embeddings of token ids and is rounded to the model's dtype;
    `input_scale`, what enters the first block, `inputs_embeds` too. With `rounded_angles`, cos and
    sin are in the model's dtype, not in fp32.
    """

    def __init__(
        self,
        config: Config,
        block: type[Block],
        *,
        embedding_scale: float = 1.0,
        input_scale: float = 1.0,
        rounded_angles: bool = True,
    ):
        super().__init__()
        c = config
        self.input_scale, self.rounded_angles = input_scale, rounded_angles
        self.tensor: Ranks | None = None  # those that divide each block, if there are several
        self.embed_tokens = Embedding(
            c.vocab_size,
            c.hidden_size,
            # A model of scores may have any token as padding, even one that it is to learn
            padding_idx=None if c.labels else c.pad_token_id,
            scale=embedding_scale,
        )
        blocks = [block(c, i) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = AddRMSNorm(
            c.hidden_size, c.rms_norm_eps, offset=block.norm_offset, cast=block.norm_cast
        )
        # Layers that rotate alike share a table
        ropes = [layer.rope_of(c, i) for i, layer in enumerate(blocks)]
        shared = [rope for i, rope in enumerate(ropes) if rope not in ropes[:i]]
        self.rope_of_layer = [shared.index(rope) for rope in ropes]
        self.rotary_embs = nn.ModuleList()
        for dim, rope in shared:
            dim = int(dim * rope.get("partial_rotary_factor", 1.0))
            longest = c.max_position_embeddings
            self.rotary_embs.append(RotaryEmbedding(dim, rope, longest) if rope else NoRotary(dim))
        turns = [getattr(rope, "turn", math.inf) for rope in self.rotary_embs]
        first = min(turns, default=math.inf)
        self._turning = None if first == math.inf else turns.index(first)
        self.set_holds()

    def set_holds(self) -> None:
        """What a cache of this model has to hold, layer by layer."""
        one = self.make_states(1, 1, chunk=1, dtype=torch.float32, device="meta")
        self.holds = tuple(state.holds for state in one)
        # Whether sequences may go on from tokens of another one: attention alone sees them there
        self.shares_prefixes = all(isinstance(state, KVState) for state in one)

    @property
    def turning_rope(self) -> RotaryEmbedding | None:
        """The one whose table turns with the shortest text; None: no table ever does."""
        if self._turning is None:
            return None
        return cast(RotaryEmbedding, self.rotary_embs[self._turning])

    def make_states(self, rows: int, capacity: int | None, **options: Any) -> list[State]:
        """An empty state for each layer; see MakeStates."""
        return [cast(Block, layer).make_state(rows, capacity, **options) for layer in self.layers]

    def embed(self, ids: Tensor) -> tuple[Tensor, bool]:
        """[B, T] -> [B, T, C], and whether that is to be added up over ranks, as `summands`. Hooks
        of the embedding see the sum."""
        table = self.embed_tokens
        if self.tensor is None or has_hooks(table):
            return table(ids), False
        if type(table).forward is not Embedding.forward or "forward" in table.__dict__:
            return table(ids), False  # what is in place of ours
        return table(ids, summands=True), True

    def forward(
        self,
        x: Tensor,  # [B, T, C]
        position_ids: Tensor,  # [B or 1, T]
        mask: AttentionMask,
        cache: Cache | None,
        recompute: int | Collection[int],
        routing: bool = False,
        offload: bool = False,
        dropout_keys: Tensor | None = None,
        shard: Shard | None = None,
        summands: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The normed stream, and with `routing` how each layer of experts routed its tokens.

        `recompute`: the indices of blocks that are computed again in backward; n: every n-th; 0:
        none. `offload`: what backward needs waits in host memory. `dropout_keys`: int64 [B, T], of
        which an adapter's dropout is drawn; None: there is none. `shard`: T are the tokens of one
        of several ranks, and the mask is of whole rows. `summands`: x is to be added up over ranks
        that share the layers.
        """
        if self.input_scale != 1.0:
            x = x * self.input_scale
        dtype = x.dtype if self.rounded_angles else torch.float32
        of = None if shard is None else shard.positions
        ropes = [rope(position_ids, dtype, of) for rope in self.rotary_embs]
        stream = None
        if self.tensor is not None:
            if not torch.compiler.is_compiling():
                warn_of_parts(self.layers, self.tensor.size)
            whole = cache is not None and not torch.is_grad_enabled()
            defers = whole and sums_branches(self.norm) and all(map(defers_sums, self.layers))
            stream = Stream(self.tensor, (x.shape[0], x.shape[1]), whole, defers=defers)
            x = stream.begin(x, summands=summands)
        append = None if cache is None else cache.append
        ctx = Context(position_ids, mask, routing, append, shard=shard, stream=stream)
        layers = self.layers
        states: Sequence[State | None] = [None] * len(layers)
        if cache is not None:
            states = cache.open(self.make_states, x, mask)
        # A recomputed block would append to the cache again
        learns = cache is None and torch.is_grad_enabled()
        recomputed = recomputed_blocks(recompute, len(layers)) if learns else ()
        offloading = None
        if offload and learns:
            offloading = Offload(x.device, [t for r in ropes for t in r if t is not None])
        contexts = [ctx] * len(layers)
        if dropout_keys is not None:  # each block has its own: a number in it would compile it anew
            keys = [dropout_keys + as_int64(mix(i)) for i in range(len(layers))]
            contexts = [replace(ctx, dropout_keys=of_block) for of_block in keys]
        # Of a recomputed block what is gathered is there when its backward begins, as of the head
        keeps = None if stream is None else replace(stream, keeps=True)
        contexts = [
            replace(of_block, stream=keeps) if i in recomputed and keeps else of_block
            for i, of_block in enumerate(contexts)
        ]
        residual, tallies = None, []
        for i, (block, rope, state, ctx) in enumerate(
            zip(layers, self.rope_of_layer, states, contexts, strict=True)
        ):
            # Backward begins with the last block: it would fetch at once
            with offloading.of(block) if offloading and i + 1 < len(layers) else nullcontext():
                if i in recomputed:
                    if residual is not None:  # one tensor is kept for the block, not two
                        x, residual = residual + x, None
                    x, residual, counts = checkpoint(
                        *(block, x, residual, ropes[rope], state, ctx),
                        use_reentrant=False,
                        preserve_rng_state=False,  # no block draws any; a CUDA graph has none
                    )
                else:
                    x, residual, counts = block(x, residual, ropes[rope], state, ctx)
            if counts is not None:
                tallies.append(counts)
        if offloading is not None:
            offloading.end()
        if cache is not None:
            cache.end(mask)
        x = self.norm(x, residual)[0]
        return x if keeps is None else keeps.gathered(x, alone=True), tallies
