"""The residual blocks of the zoo; a family's own says what its mixer and its MLP are.

# B batch, T tokens, C model dim
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.kernels._norm import Cast
from tigon.kernels.gated_act import Activation
from tigon.layers import (
    AddRMSNorm,
    Attention,
    Context,
    GatedMLP,
    RMSNorm,
    Rotation,
    Routed,
    SparseMoE,
    State,
    tally,
)
from tigon.layers.linear import observed
from tigon.layers.stream import Stream as Divided
from tigon.layers.stream import Summands
from tigon.models._config import SLIDING, Config, WindowedConfig, activation
from tigon.models._watched import has_hooks, summing

# The branch that is yet to be added to the stream, the stream, and the routing statistics
Branch = Tensor | Summands
Stream = tuple[Branch, Tensor, Tensor | None]


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

    def feed(self, x: Tensor, ctx: Context) -> tuple[Branch, Tensor | None]:
        """The MLP's branch, and its tally."""
        if ctx.stream is not None and isinstance(self.mlp, SparseMoE) and self.mlp.divided:
            return self._dispatch(self.mlp, x, ctx, ctx.stream)
        x = ctx.gathered(x, alone=isinstance(self.mlp, GatedMLP))
        if ctx.stream is not None and has_hooks(self.mlp):
            with summing(self.mlp, ctx):
                y = self.mlp(x, *ctx.drawn)
            total = y.x if isinstance(y, Routed) else y
        else:
            y = self.mlp(x, *ctx.drawn)
            total = ctx.summed(y.x if isinstance(y, Routed) else y)
        if not (isinstance(y, Routed) and ctx.routing):
            return total, None
        counts = tally(y, ctx.real)
        return total, counts if ctx.stream is None else ctx.stream.alike(counts)

    def _dispatch(
        self, mlp: SparseMoE, x: Tensor, ctx: Context, stream: Divided
    ) -> tuple[Tensor, Tensor | None]:
        """Where ranks that share the stream have whole experts, too: each sends its own tokens.

        In a step of generation, of a token a row, the ranks with all of the experts send none.
        """
        shard = mlp.experts.shard
        if stream.whole and stream.shape[1] == 1 and shard and shard.ranks == stream.ranks:
            y = mlp(x, alike=True)
            return y.x, tally(y, ctx.real) if ctx.routing else None
        y = mlp(stream.own(x), *map(stream.part, ctx.drawn))
        if not ctx.routing:
            return stream.joined(y.x), None
        real = None if ctx.real is None else stream.part(ctx.real)
        return stream.joined(y.x), stream.sum(tally(y, real))

    def make_state(self, rows: int, capacity: int | None, **options: Any) -> State:
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
        self, x: Branch, residual: Tensor | None, rotation: Rotation, state: Any, ctx: Context
    ) -> Stream:
        normed, residual = self.input_layernorm(x, residual)
        branch = self.mixer(normed, rotation, state, ctx)
        normed, residual = self.post_attention_layernorm(self._scaled(branch), residual)
        branch, routing = self.feed(normed, ctx)
        return _unview(self._scaled(branch)), residual, routing

    def _scaled(self, branch: Branch) -> Branch:
        if self.branch_scale == 1:
            return branch
        return self.branch_scale * (branch.total if isinstance(branch, Summands) else branch)


# As they are here: others may take their place, in the classes too
_OWN = PreNormBlock.forward, Block.feed, PreNormBlock._scaled, Block.mixer
_OF_BLOCKS = "forward", "feed", "_scaled", "mixer"
_ATTENTION, _NORM = Attention.forward, AddRMSNorm.forward


def sums_branches(norm: nn.Module) -> bool:
    """Whether it takes Summands, and nobody else sees them."""
    return type(norm).forward is _NORM and not observed(norm)


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
    if any(map(observed, (block, mixer, block.mlp))):
        return False
    return sums_branches(block.input_layernorm) and sums_branches(block.post_attention_layernorm)


def _unview(x: Branch) -> Branch:
    """Itself, no view to autograd, as a product with a bias is: FSDP2 warns of views among what a
    block returns."""
    if isinstance(x, Summands):
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
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: Context
    ) -> Stream:
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
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: Context
    ) -> Stream:
        stream = x if residual is None else residual + x
        x = self.mixer(stream, rotation, state, ctx)
        stream = stream + self.post_attention_layernorm(x)
        y, routing = self.feed(stream, ctx)
        return self.post_feedforward_layernorm(y), stream, routing
