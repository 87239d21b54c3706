"""The residual blocks that families subclass, and the decoder: embedding, blocks, final norm.

# B batch, T tokens, C model dim, E experts
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.mlp.gated_act import Activation
from tigon.kernels.norm.rms_norm import Cast
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
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    SoftmaxAttention,
    SparseMoE,
    make_rotary,
    rotated_dims,
)
from tigon.layers.activation_offload import ActivationOffload
from tigon.layers.context import SharedKV
from tigon.layers.kv_state import StateSpec
from tigon.layers.norm import add_normed
from tigon.models.config import SLIDING, ModelConfig, WindowedConfig
from tigon.utils.random import as_int64, mix

# Branch, residual stream, router statistics; and keys and values, where later blocks read them
BlockOutput = (
    tuple[Tensor, Tensor | None, Tensor | None]
    | tuple[Tensor, Tensor | None, Tensor | None, SharedKV]
)
# What backward recomputes: all blocks, every n-th or those of these indices; or parts of experts
Recompute = bool | int | Collection[int] | Literal["experts"]


class TransformerBlock(nn.Module):
    """A block: (x, residual, rotation, state, ctx) -> (x, residual, router_stats).

    x [B, T, C] is a branch that the next norm adds to the stream `residual` [B, T, C], which is
    None before the first block; what a block returns is the MLP's branch, not yet added. `state` is
    the mixer's cache, or None. `router_stats` [2, E] are the counts of a layer with experts if
    `ctx.routing` is set, else None. A block whose keys and values later blocks read returns these
    as well, and those get them as `ctx.shared_kv`.

    A mixer is a module (x, rotation, state, ctx) -> [B, T, C] with a `make_state`; an MLP is one
    x -> [B, T, C] or a `SparseMoE`. With dropout the MLP also takes `ctx.dropout_keys`.
    """

    norm_offset: ClassVar[float] = 0.0  # norms multiply by offset + weight
    norm_cast: ClassVar[Cast] = "before_weight"  # where norms round to the model's dtype
    qk_norm: ClassVar[bool] = False  # attention norms queries and keys, with rms_norm_eps
    rounded_angles: ClassVar[bool] = True  # cos and sin are in the model's dtype, else in fp32
    attention_class: ClassVar[type[Attention]] = Attention
    attention_options: ClassVar[Mapping[str, Any]] = {}  # of all the family's attention layers
    mlp: nn.Module
    mixer_name = "self_attn"  # in checkpoints
    # The layer whose keys and values attention reads, and whose state it uses; None: its own
    kv_source: int | None = None
    rope_index: int  # of the decoder's tables, the one of the layer

    def make_mixer(self, c: Any, layer: int) -> nn.Module:
        """Makes the layer's attention, or another module that mixes tokens."""
        return self.make_attention(c, layer)

    def add_mixer(self, c: ModelConfig, layer: int) -> None:
        mixer = self.make_mixer(c, layer)  # may set mixer_name
        self.add_module(self.mixer_name, mixer)

    @property
    def mixer(self) -> Any:
        """The submodule `mixer_name`: the block's attention, or what it has in place of it."""
        return getattr(self, self.mixer_name)

    def make_mlp(self, c: Any, layer: int) -> nn.Module:
        """Makes the layer's MLP or experts."""
        return gated_mlp(c, bias=getattr(c, "mlp_bias", False))

    def make_attention(self, c: ModelConfig, layer: int, **options: Any) -> Attention:
        """Makes attention with the config's sizes, the family's norms and options, and by default
        the layer's window, and the config's scale of scores, softcap and `attention_bias`, if any,
        also as the output's bias unless there is an `attention_out_bias`."""
        head_dim, kv_heads = c.attention_sizes(layer)
        options = {**self.attention_options, **options}
        options.setdefault("window", layer_window(c, layer))
        options.setdefault("bias", getattr(c, "attention_bias", False))
        options.setdefault("out_bias", getattr(c, "attention_out_bias", options["bias"]))
        options.setdefault("qk_norm_eps", c.rms_norm_eps if self.qk_norm else None)
        scalar = getattr(c, "query_pre_attn_scalar", None)
        multiplier = getattr(c, "attention_multiplier", None)
        options.setdefault("scale", multiplier if scalar is None else scalar**-0.5)
        options.setdefault("softcap", getattr(c, "attn_logit_softcapping", None))
        options |= {"offset": self.norm_offset, "cast": self.norm_cast}
        sizes = c.hidden_size, c.num_attention_heads, kv_heads, head_dim
        return self.attention_class(*sizes, **options)

    def make_norm(self, c: ModelConfig) -> RMSNorm:
        """Makes an RMSNorm over hidden_size with the family's offset and cast."""
        return RMSNorm(c.hidden_size, c.rms_norm_eps, offset=self.norm_offset, cast=self.norm_cast)

    def make_add_norm(self, c: ModelConfig) -> AddRMSNorm:
        """Makes a norm as `make_norm` does that first adds a branch to the residual stream."""
        return AddRMSNorm(
            c.hidden_size, c.rms_norm_eps, offset=self.norm_offset, cast=self.norm_cast
        )

    def mlp_forward(self, x: Tensor, ctx: BlockInputs) -> tuple[Tensor, Tensor | None]:
        """Returns the MLP's output [B, T, C] and, with `ctx.routing`, router counts, else None."""
        y = self.mlp(x, *ctx.dropout_args)
        if not isinstance(y, MoEOutput):
            return y, None
        mlp = cast(SparseMoE, self.mlp)
        return y.x, mlp.count_routing(y, ctx.real) if ctx.routing else None


def gated_mlp(c: ModelConfig, act: Activation | None = None, *, bias: bool = False) -> GatedMLP:
    """Makes a gated MLP with the config's sizes, and its activation unless `act` is given."""
    return GatedMLP(c.hidden_size, c.intermediate_size, act or c.mlp_activation, bias=bias)


def layer_window(c: Any, layer: int) -> int | None:
    """The layer's sliding window in tokens, the query's own included; None: full attention."""
    full = isinstance(c, WindowedConfig) and c.layer_type(layer) != SLIDING
    unused = full or not getattr(c, "use_sliding_window", True)
    return None if unused else getattr(c, "sliding_window", None)


class PreNormBlock(TransformerBlock):
    """Llama's block: norm, attention, norm, MLP. Each norm first adds the branch before it."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.branch_scale = getattr(c, "residual_multiplier", 1.0)
        self.input_layernorm = self.make_add_norm(c)
        self.add_mixer(c, layer)
        self.post_attention_layernorm = self.make_add_norm(c)
        self.mlp = self.make_mlp(c, layer)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        normed, residual = self.input_layernorm(x, residual)
        branch = self.mixer(normed, rotation, state, ctx)
        normed, residual = self.post_attention_layernorm(self._scaled(branch), residual)
        branch, routing = self.mlp_forward(normed, ctx)
        return _unview(self._scaled(branch)), residual, routing

    def _scaled(self, branch: Tensor) -> Tensor:
        """The branch times the config's `residual_multiplier`, if it has one."""
        return branch if self.branch_scale == 1 else self.branch_scale * branch


def _unview(x: Tensor) -> Tensor:
    """Returns x as no view to autograd, since FSDP2 warns of views in a block's output."""
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    return torch.ops.aten._unsafe_view(x, x.shape)


class SandwichBlock(TransformerBlock):
    """Gemma 2's block: as PreNormBlock, with a second norm after the mixer and after the MLP."""

    # Before and after the mixer, before and after the MLP
    NORMS = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, c: ModelConfig, layer: int):
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
        y, routing = self.mlp_forward(x, ctx)
        return post_mlp(y), residual, routing


class PostNormBlock(TransformerBlock):
    """OLMo 2's block: branches read the stream without a norm, and their outputs are normed."""

    def __init__(self, c: ModelConfig, layer: int):
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
        stream = add_normed(x, stream, self.post_attention_layernorm)
        y, routing = self.mlp_forward(stream, ctx)
        return self.post_feedforward_layernorm(y), stream, routing


# The decoder


def recomputed_blocks(setting: Recompute, layers: int) -> Collection[int]:
    """The indices of blocks that backward recomputes: n or True (1) is every n-th from the first, 0
    or False none, as is "experts", and a collection is returned as it is."""
    if setting == "experts":
        return ()
    if not isinstance(setting, int):
        return setting
    return range(0, layers, setting) if setting else ()


class Decoder(nn.Module):
    """Embedding, blocks and final norm; parameters carry Hugging Face's names.

    `embedding_scale`, rounded to the model's dtype, multiplies the embeddings of token ids, and
    `embedding_eps` norms them. `input_scale` multiplies the input of the first block, also if it is
    `inputs_embeds`. The last norm multiplies by `norm_offset` + weight; None is the offset of the
    block's norms.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: type[TransformerBlock],
        *,
        embedding_scale: float = 1.0,
        embedding_eps: float | None = None,
        input_scale: float = 1.0,
        norm_offset: float | None = None,
    ):
        super().__init__()
        c = config
        self.input_scale, self.rounded_angles = input_scale, block.rounded_angles
        self.embed_tokens = Embedding(
            c.vocab_size,
            c.hidden_size,
            # A sequence classifier may use any token as padding, even one that it has to learn
            padding_idx=None if c.labels else c.pad_token_id,
            scale=embedding_scale,
            norm_eps=embedding_eps,
        )
        blocks = [block(c, i) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        offset = block.norm_offset if norm_offset is None else norm_offset
        self.norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=offset, cast=block.norm_cast)
        # Layers with equal RoPE parameters share a table
        ropes = [c.layer_rope(i) for i in range(len(blocks))]
        unique = [rope for i, rope in enumerate(ropes) if rope not in ropes[:i]]
        for layer, rope in zip(blocks, ropes, strict=True):
            layer.rope_index = unique.index(rope)
        length = c.max_position_embeddings
        self.rotary_embs = nn.ModuleList(
            make_rotary(rotated_dims(dim, rope), rope, length) for dim, rope in unique
        )
        self.set_state_kinds()

    @property
    def needs_ids(self) -> bool:
        """Whether blocks need the token ids, so that inputs_embeds alone are not enough."""
        return False

    @property
    def embeddings(self) -> list[Embedding]:
        """The modules with parameters that `embed` calls."""
        return [self.embed_tokens]

    @property
    def first_modules(self) -> list[nn.Module]:
        """The modules with parameters that `begin` calls."""
        return []

    @property
    def last_modules(self) -> list[nn.Module]:
        """The modules with parameters that `end` calls."""
        return [self.norm]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [B, T]: returns what `forward` takes."""
        return self.embed_tokens(input_ids)

    def begin(self, x: Tensor, *dropout_args: Tensor) -> tuple[Tensor, Sequence[Tensor] | None]:
        """The first block's input, and what each block gets as `layer_input`, if it gets any."""
        return (x if self.input_scale == 1.0 else x * self.input_scale), None

    def end(self, x: Tensor, residual: Tensor | None, *dropout_args: Tensor) -> Tensor:
        """The last hidden states [B, T, C], from what the last block returns."""
        return self.norm(x, residual)[0]

    @property
    def blocks(self) -> Sequence[TransformerBlock]:
        """The layers as `forward` calls them."""
        return cast(Sequence[TransformerBlock], self.layers)

    def set_state_kinds(self) -> None:
        """Sets `state_kinds`; call it after changing layers in place."""
        states = self.make_states(StateSpec(1, 1, torch.float32, "meta"))
        self._states = [*map(id, self.layers)], tuple(state.layout for state in states)

    @property
    def dynamic_rope(self) -> RotaryEmbedding | None:
        """The RoPE whose frequencies change at the shortest length of a text; None: none do."""
        ropes = [rope for rope in self.rotary_embs if isinstance(rope, RotaryEmbedding)]
        dynamic = [rope for rope in ropes if rope.original_length < math.inf]
        return min(dynamic, key=lambda rope: rope.original_length, default=None)

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The kinds of the states in a cache."""
        if self._states[0] != [*map(id, self.layers)]:  # some were removed or replaced
            self.set_state_kinds()
        return self._states[1]

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences may share a prefix, which only attention can read from another one."""
        mixers = [block.mixer for block in self.blocks]
        return all(isinstance(m, SoftmaxAttention) and not getattr(m, "chunked", 0) for m in mixers)

    @property
    def state_indices(self) -> list[int]:
        """For each layer, the index of its state in a cache."""
        sources = [i if b.kv_source is None else b.kv_source for i, b in enumerate(self.blocks)]
        indices = {source: i for i, source in enumerate(sorted({*sources}))}
        return [indices[source] for source in sources]

    def make_states(self, spec: StateSpec) -> list[LayerState]:
        """Makes an empty state for each layer that does not read another's."""
        return [block.mixer.make_state(spec) for block in self.blocks if block.kv_source is None]

    def forward(
        self,
        x: Tensor,  # [B, T, C], as from `embed`
        position_ids: Tensor,  # [B or 1, T]
        mask: AttentionMask,
        cache: Cache | None,
        recompute: Recompute,
        routing: bool = False,
        offload: bool = False,
        dropout_keys: Tensor | None = None,
        shard: ContextShard | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The last hidden states [B, T, C], and with `routing` the counts of each layer's experts.

        `recompute`: blocks to recompute in backward, as by `recomputed_blocks`. `offload`: saved
        activations wait in host memory. `dropout_keys`: int64 [B, T], seeds of an adapter's
        dropout; None: no dropout. `shard`: x has the tokens of one context-parallel rank, and the
        mask is that of whole rows.
        """
        dropout_args = () if dropout_keys is None else (dropout_keys,)
        x, layer_inputs = self.begin(x, *dropout_args)
        dtype = x.dtype if self.rounded_angles else torch.float32
        row_positions = None if shard is None else shard.positions
        ropes = [rope(position_ids, dtype, row_positions) for rope in self.rotary_embs]
        append = None if cache is None else cache.append
        ctx = BlockInputs(position_ids, mask, routing, append, shard=shard)
        blocks = self.blocks
        states = None if cache is None else cache.open(self.make_states, x, mask)
        # A recomputed block would append to the cache again
        training = cache is None and torch.is_grad_enabled()
        recomputed = recomputed_blocks(recompute, len(blocks)) if training else ()
        offloading = None
        if offload and training:
            offloading = ActivationOffload(x.device, [t for r in ropes for t in r if t is not None])
        residual, router_stats = None, []
        shared: dict[int, SharedKV] = {}  # Dynamo does not trace dict[...]()
        state_indices = () if states is None else self.state_indices
        for i, block in enumerate(blocks):
            rope = ropes[block.rope_index]
            state = None if states is None else states[state_indices[i]]
            source = block.kv_source
            shared_kv = None if source is None else shared[source]
            block_ctx = self._block_inputs(ctx, i, dropout_keys, layer_inputs, shared_kv)
            # Not the last block: backward begins with it, and would fetch its activations at once
            with offloading.of(block) if offloading and i + 1 < len(blocks) else nullcontext():
                if i in recomputed:
                    if residual is not None:  # save one tensor for the block, not two
                        x, residual = residual + x, None
                    x, residual, counts, *kv = self.recompute(
                        block, x, residual, rope, state, block_ctx
                    )
                else:
                    x, residual, counts, *kv = block(x, residual, rope, state, block_ctx)
            if kv:
                (shared[i],) = kv
            if counts is not None:
                router_stats.append(counts)
        if offloading is not None:
            offloading.end()
        if cache is not None:
            cache.end(mask)
        return self.end(x, residual, *dropout_args), router_stats

    def _block_inputs(
        self,
        ctx: BlockInputs,
        layer: int,
        dropout_keys: Tensor | None,
        layer_inputs: Sequence[Tensor] | None,
        shared_kv: SharedKV | None,
    ) -> BlockInputs:
        """The inputs of one block: `ctx` with what belongs to its layer."""
        changes: dict[str, Any] = {}
        if dropout_keys is not None:  # a tensor: a layer number would recompile each block
            changes["dropout_keys"] = dropout_keys + as_int64(mix(layer))
        if layer_inputs is not None:
            changes["layer_input"] = layer_inputs[layer]
        if shared_kv is not None:
            changes["shared_kv"] = shared_kv
        return replace(ctx, **changes) if changes else ctx

    def recompute(self, block: Callable[..., BlockOutput], *inputs: Any) -> BlockOutput:
        """Calls a block that backward computes again."""
        # Blocks draw no random numbers, whose state CUDA graphs could not restore
        output = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return cast(BlockOutput, output)
