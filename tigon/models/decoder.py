"""The residual blocks of the zoo; a family's own says what its mixer and its MLP are.

# B batch, T tokens, C model dim
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.distributed.collectives import Ranks
from tigon.distributed.sequence_parallel import PartialSum, SequenceParallelRegion
from tigon.distributed.sequence_parallel import SequenceParallelRegion as Divided
from tigon.kernels.attention.api import AttentionMask
from tigon.kernels.mlp.gated_act import Activation
from tigon.kernels.norm.common import Cast
from tigon.layers import (
    AddRMSNorm,
    Attention,
    BlockInputs,
    Cache,
    ContextShard,
    Embedding,
    GatedMLP,
    LayerState,
    MoEOutput,
    NoRotary,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    SparseMoE,
    count_routing,
)
from tigon.layers.activation_offload import ActivationOffload
from tigon.layers.kv_cache import KVState
from tigon.layers.linear import is_hooked
from tigon.models.config import SLIDING, Config, WindowedConfig, activation
from tigon.models.watched import has_hooks, summing, warn_of_parts
from tigon.utils.random import as_int64, mix

# The branch that is yet to be added to the stream, the stream, and the routing statistics
Branch = Tensor | PartialSum
BlockOutput = tuple[Branch, Tensor, Tensor | None]


class Block(nn.Module):
    """(x, residual, rotation, state, ctx) -> (x, residual, routing), which subclasses compute.

    x [B, T, C] is the branch that the next norm adds to the stream `residual` [B, T, C], None at
    its start. `state` is what the mixer remembers, None without a cache. `routing` [2, E] is the
    tally of a layer with experts where `ctx.routing` asks for it, else None.

    A mixer is a module (x, rotation, state, ctx) -> [B, T, C] with a `make_state`, an MLP one
    x -> [B, T, C], or Routed. In passes with dropout the MLP also takes `ctx.dropout_keys`.
    """

    norm_offset: ClassVar[float] = 0.0  # norms multiply by offset + weight
    norm_cast: ClassVar[Cast] = "before_weight"  # when they round
    mlp: nn.Module
    mixer_name = "self_attn"  # in checkpoints

    def make_mixer(self, c: Any, layer: int) -> nn.Module:
        return self.make_attention(c)

    def add_mixer(self, c: Config, layer: int) -> None:
        mixer = self.make_mixer(c, layer)  # may set the name
        self.add_module(self.mixer_name, mixer)

    @property
    def mixer(self) -> Any:
        return getattr(self, self.mixer_name)

    def make_mlp(self, c: Any, layer: int) -> nn.Module:
        return gated_mlp(c)

    def rope_of(self, c: Any, layer: int) -> tuple[int, Mapping[str, Any]]:
        """Head dim and RoPE parameters, {} if nothing is rotated."""
        return c.head_dim, c.rope_parameters

    def make_attention(
        self, c: Config, *, bias: bool = False, out_bias: bool | None = None, **options: Any
    ) -> Attention:
        """Attention with the config's sizes and this family's norms; `out_bias` is as `bias`."""
        sizes = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        options |= {"bias": bias, "out_bias": bias if out_bias is None else out_bias}
        return Attention(*sizes, offset=self.norm_offset, cast=self.norm_cast, **options)

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps, offset=self.norm_offset, cast=self.norm_cast)

    def make_add_norm(self, c: Config) -> AddRMSNorm:
        options: dict[str, Any] = {"offset": self.norm_offset, "cast": self.norm_cast}
        return AddRMSNorm(c.hidden_size, c.rms_norm_eps, **options)

    def feed(self, x: Tensor, ctx: BlockInputs) -> tuple[Branch, Tensor | None]:
        """The MLP's branch, and its tally."""
        if ctx.stream is not None and isinstance(self.mlp, SparseMoE) and self.mlp.divided:
            return self._dispatch(self.mlp, x, ctx, ctx.stream)
        x = ctx.gather_from_region(x, single_reader=isinstance(self.mlp, GatedMLP))
        if ctx.stream is not None and has_hooks(self.mlp):
            with summing(self.mlp, ctx):
                y = self.mlp(x, *ctx.dropout_args)
            total = y.x if isinstance(y, MoEOutput) else y
        else:
            y = self.mlp(x, *ctx.dropout_args)
            total = ctx.reduce_to_region(y.x if isinstance(y, MoEOutput) else y)
        if not (isinstance(y, MoEOutput) and ctx.routing):
            return total, None
        counts = count_routing(y, ctx.real)
        return total, counts if ctx.stream is None else ctx.stream.scale_replicated_grad(counts)

    def _dispatch(
        self, mlp: SparseMoE, x: Tensor, ctx: BlockInputs, stream: Divided
    ) -> tuple[Tensor, Tensor | None]:
        """Where ranks that share the stream have whole experts, too: each sends its own tokens.

        In a step of generation, of a token a row, the ranks with all of the experts send none.
        """
        shard = mlp.experts.shard
        if stream.replicated and stream.shape[1] == 1 and shard and shard.ranks == stream.ranks:
            y = mlp(x, alike=True)
            return y.x, count_routing(y, ctx.real) if ctx.routing else None
        y = mlp(stream.local_tokens(x), *map(stream.slice_tokens, ctx.dropout_args))
        if not ctx.routing:
            return stream.gather_tokens(y.x), None
        real = None if ctx.real is None else stream.slice_tokens(ctx.real)
        return stream.gather_tokens(y.x), stream.sum(count_routing(y, real))

    def make_state(self, rows: int, capacity: int | None, **options: Any) -> LayerState:
        """The mixer's; see MakeStates."""
        return self.mixer.make_state(rows, capacity, **options)


def gated_mlp(c: Config, act: Activation | None = None, *, bias: bool = False) -> GatedMLP:
    """A gated MLP with the config's sizes, and its activation if `act` is no other."""
    act = activation(c.hidden_act) if act is None else act
    return GatedMLP(c.hidden_size, c.intermediate_size, act, bias=bias)


def window_of(c: WindowedConfig, layer: int) -> int | None:
    """How many tokens a query of this layer sees, its own among them; None: all before."""
    return c.sliding_window if c.layer_type(layer) == SLIDING else None


class PreNormBlock(Block):
    """Each norm adds the branch before it to the stream."""

    branch_scale = 1.0  # of what the branches add

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = self.make_add_norm(c)
        self.add_mixer(c, layer)
        self.post_attention_layernorm = self.make_add_norm(c)
        self.mlp = self.make_mlp(c, layer)

    def forward(
        self, x: Branch, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        normed, residual = self.input_layernorm(x, residual)
        branch = self.mixer(normed, rotation, state, ctx)
        normed, residual = self.post_attention_layernorm(self._scaled(branch), residual)
        branch, routing = self.feed(normed, ctx)
        return _unview(self._scaled(branch)), residual, routing

    def _scaled(self, branch: Branch) -> Branch:
        if self.branch_scale == 1:
            return branch
        return self.branch_scale * (branch.total if isinstance(branch, PartialSum) else branch)


# As they are here: others may take their place, in the classes too
_OWN = PreNormBlock.forward, Block.feed, PreNormBlock._scaled, Block.mixer
_OF_BLOCKS = "forward", "feed", "_scaled", "mixer"
_ATTENTION, _NORM = Attention.forward, AddRMSNorm.forward


def sums_branches(norm: nn.Module) -> bool:
    """Whether it takes Summands, and nobody else sees them."""
    return type(norm).forward is _NORM and not is_hooked(norm)


def defers_sums(block: nn.Module) -> bool:
    """Whether its branches may be Summands, which its own norms and the next block's sum: they come
    from its modules as they are, and nobody else sees them."""
    if not isinstance(block, PreNormBlock):  # a wrapper may be around one
        return False
    if tuple(getattr(type(block), name) for name in _OF_BLOCKS) != _OWN:
        return False
    mixer = block.mixer
    if type(mixer).forward is not _ATTENTION or not block.__dict__.keys().isdisjoint(_OF_BLOCKS):
        return False
    if any(map(is_hooked, (block, mixer, block.mlp))):
        return False
    return sums_branches(block.input_layernorm) and sums_branches(block.post_attention_layernorm)


def _unview(x: Branch) -> Branch:
    """Itself, no view to autograd, as a product with a bias is: FSDP2 warns of views among what a
    block returns."""
    if isinstance(x, PartialSum):
        return x
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    return torch.ops.aten._unsafe_view(x, x.shape)


class SandwichBlock(Block):
    """As PreNormBlock, but each branch is normed once more before it joins the stream."""

    # Before and after the mixer, before and after the MLP
    NORMS = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.add_mixer(c, layer)
        self.mlp = self.make_mlp(c, layer)
        norms = self.make_add_norm(c), self.make_norm(c), self.make_add_norm(c), self.make_norm(c)
        for name, norm in zip(self.NORMS, norms, strict=True):
            self.add_module(name, norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        pre_mixer, post_mixer, pre_mlp, post_mlp = (getattr(self, n) for n in self.NORMS)
        x, residual = pre_mixer(x, residual)
        x = self.mixer(x, rotation, state, ctx)
        x, residual = pre_mlp(x, residual, post_mixer)
        y, routing = self.feed(x, ctx)
        return post_mlp(y), residual, routing


class PostNormBlock(Block):
    """Branches read the stream as it is, and are normed before they join it."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.add_mixer(c, layer)
        self.post_attention_layernorm = self.make_norm(c)
        self.mlp = self.make_mlp(c, layer)
        self.post_feedforward_layernorm = self.make_norm(c)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        stream = x if residual is None else residual + x
        x = self.mixer(stream, rotation, state, ctx)
        stream = stream + self.post_attention_layernorm(x)
        y, routing = self.feed(stream, ctx)
        return self.post_feedforward_layernorm(y), stream, routing


# The stack of blocks between embedding and head.
#
# B batch, T tokens, C model dim


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
        self.layout = tuple(state.layout for state in one)
        # Whether sequences may go on from tokens of another one: attention alone sees them there
        self.shares_prefixes = all(isinstance(state, KVState) for state in one)

    @property
    def turning_rope(self) -> RotaryEmbedding | None:
        """The one whose table turns with the shortest text; None: no table ever does."""
        if self._turning is None:
            return None
        return cast(RotaryEmbedding, self.rotary_embs[self._turning])

    def make_states(self, rows: int, capacity: int | None, **options: Any) -> list[LayerState]:
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
        shard: ContextShard | None = None,
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
            stream = SequenceParallelRegion(
                self.tensor, (x.shape[0], x.shape[1]), whole, defers_sum=defers
            )
            x = stream.begin(x, partial=summands)
        append = None if cache is None else cache.append
        ctx = BlockInputs(position_ids, mask, routing, append, shard=shard, stream=stream)
        layers = self.layers
        states: Sequence[LayerState | None] = [None] * len(layers)
        if cache is not None:
            states = cache.open(self.make_states, x, mask)
        # A recomputed block would append to the cache again
        learns = cache is None and torch.is_grad_enabled()
        recomputed = recomputed_blocks(recompute, len(layers)) if learns else ()
        offloading = None
        if offload and learns:
            offloading = ActivationOffload(x.device, [t for r in ropes for t in r if t is not None])
        contexts = [ctx] * len(layers)
        if dropout_keys is not None:  # each block has its own: a number in it would compile it anew
            keys = [dropout_keys + as_int64(mix(i)) for i in range(len(layers))]
            contexts = [replace(ctx, dropout_keys=of_block) for of_block in keys]
        # Of a recomputed block what is gathered is there when its backward begins, as of the head
        keeps = None if stream is None else replace(stream, saves_gathered=True)
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
        return x if keeps is None else keeps.gather_from_region(x, single_reader=True), tallies
