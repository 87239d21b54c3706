"""The modules of tensor parallelism, which `shard_model` puts in place of those of one process.

Projections into attention and MLP gather their input, those out of them sum their output over the
ranks, so that hooks and all other modules see whole values. In prompts and in training these are
the values of the rank's own tokens (`SequenceParallelRegion`).

# B batch, T tokens, N = B T, n tokens of a rank, C model dim, E experts
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.distributed.all_reduce import all_reduce_small_norm
from tigon.distributed.collectives import (
    Ranks,
    all_reduce,
    reduce_from_group,
    scale_replicated_grad,
)
from tigon.distributed.expert_dispatch import TokenRoute
from tigon.distributed.sequence_parallel import SequenceParallelRegion
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases
from tigon.layers import (
    AddRMSNorm,
    Experts,
    FusedLinear,
    GatedLinear,
    LatentAttention,
    Linear,
    MoEOutput,
    RMSNorm,
    SparseMoE,
    count_routing,
)
from tigon.models.decoder import BlockOutput, Decoder

# The region of the pass under way, and an empty tensor [B, T, 0] of its shape: numbers would be
# constants to torch.compile, which would compile each block for each length
_region: tuple[SequenceParallelRegion, Tensor] | None = None


class NormedSum(NamedTuple):
    """A sum over ranks that was normed in the same kernel."""

    place: int  # of the norm
    residual: Tensor
    total: Tensor  # of the ranks
    version: int  # of `total`
    output: tuple[Tensor, Tensor]  # of the norm


class TensorPass:
    """The pass of a decoder under way, which all its modules share.

    Outside of passes every rank has all tokens, and there are no gradients.

    In decoding, the norm behind a sum over ranks is computed in the sum's kernel (`reduce`), ahead
    of its call. The norm takes that result if its inputs are the ones that it was computed from.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.norms: list[AddRMSNorm] = []  # those that add and norm sums, in order
        self._pending: tuple[int, Tensor] | None = None  # the next norm's place, and its residual
        self._ahead: NormedSum | None = None

    @property
    def region(self) -> SequenceParallelRegion:
        """How ranks share the tokens of the pass; outside of one, each has all."""
        if _region is None:
            return SequenceParallelRegion(self.ranks, (0, 0), replicated=True)
        region, tokens = _region
        if not torch.compiler.is_compiling():
            return region
        shape = tokens.shape[0], tokens.shape[1]
        return SequenceParallelRegion(self.ranks, shape, region.replicated, region.saves_gathered)

    @contextmanager
    def running(self, region: SequenceParallelRegion) -> Iterator[None]:
        """In this context the blocks compute the tokens of the region."""
        global _region
        before, _region = _region, (region, torch.empty(*region.shape, 0, device="cpu"))
        try:
            yield
        finally:
            _region, self._pending, self._ahead = before, None, None

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks of a branch [B, T, C], for the residual stream.

        It has the region's tokens, [1, n, C] or all. If `expect_sum` was called, the same kernel
        computes the norm, where one kernel can.
        """
        pending, self._pending = self._pending, None
        total = None if pending is None else self._reduce_and_norm(x, *pending)
        return self.region.reduce_to_region(x) if total is None else total

    def _reduce_and_norm(self, x: Tensor, place: int, residual: Tensor) -> Tensor | None:
        """`reduce`, with the norm at `place` in its kernel; None if one kernel cannot."""
        norm = self.norms[place]
        if isinstance(norm.weight, DTensor):  # FSDP gathers it when the norm is called
            return None
        outputs = all_reduce_small_norm(
            x, residual, norm.weight, norm.eps, self.ranks, offset=norm.offset, cast=norm.cast
        )
        if outputs is None:
            return None
        total, y, stream = outputs
        self._ahead = NormedSum(place, residual, total, total._version, (y, stream))
        return total

    def take_norm(
        self, place: int, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Returns the norm's output if it was computed ahead from these tensors, else None."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.place, ahead.version) != (place, ahead.total._version):
            return None
        return ahead.output if ahead.total is x and ahead.residual is residual else None

    def expect_sum(self, place: int, residual: Tensor) -> None:
        """Prepares the norm at `place` for the next sum over ranks, in decoding without
        gradients."""
        if self.region.replicated and place < len(self.norms) and not torch.is_grad_enabled():
            self._pending = place, residual


class ColumnParallelLinear(FusedLinear):
    """This rank's outputs of a product; the input is gathered."""

    tensor: TensorPass

    def gather_input(self, x: Tensor) -> Tensor:
        """Gathers all tokens of the region; backward sums their gradients over the ranks."""
        return self.tensor.region.gather_from_region(x, single_reader=True)


class ColumnParallelGatedLinear(ColumnParallelLinear, GatedLinear):
    """This rank's units of an MLP; the input is gathered."""


class RowParallelLinear(Linear):
    """A product over this rank's shard of the input, summed over ranks by `TensorPass.reduce`."""

    tensor: TensorPass

    @property
    def local_bias(self) -> Tensor | None:
        """The bias divided by the number of ranks, which sum it; None without a bias."""
        return None if self.bias is None else self.bias / self.tensor.ranks.size

    def reduce_output(self, y: Tensor) -> Tensor:
        """Sums the ranks' outputs: this rank's tokens of the region, or all in decoding."""
        return self.tensor.reduce(y)


class ReplicatedLinear(Linear):
    """A whole layer, of this rank's tokens; the keys of an adapter's dropout are of all tokens."""

    tensor: TensorPass

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns the product of the region's tokens, with their keys."""
        region = self.tensor.region
        if dropout_keys is not None and not region.replicated:
            local = region.slice_tokens(dropout_keys)
            dropout_keys = F.pad(local, (0, x.shape[1] - local.shape[1]))
        return super().forward(x, dropout_keys)


class TensorParallelLatentAttention(LatentAttention):
    """Latent attention with some heads on each rank, which gathers the latents of all tokens."""

    tensor: TensorPass

    def compress(self, x: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """As in the base, of all tokens."""
        parts, region = super().compress(x, *keys), self.tensor.region
        return tuple(region.gather_from_region(part, single_reader=False) for part in parts)


class TensorParallelMoE(SparseMoE):
    """Experts of which each rank has a shard: the input is gathered, and the output summed."""

    tensor: TensorPass

    def forward(self, x: Tensor, *dropout_args: Tensor) -> MoEOutput:
        """As in the base for the region's tokens x; routing is of all tokens, on every rank."""
        x = self.tensor.region.gather_from_region(x, single_reader=False)
        y = super().forward(x, *dropout_args)
        probs = scale_replicated_grad(y.probs, self.tensor.ranks)
        return y._replace(x=self.tensor.reduce(y.x), probs=probs)


class TensorParallelExperts(Experts):
    """This rank's units of all experts, whose outputs the ranks sum."""

    tensor: TensorPass

    @property
    def biases(self) -> ExpertBiases | None:
        """This rank's biases of gate and up, and its part of the bias of down."""
        biases = super().biases
        if biases is None:
            return None
        return biases._replace(down=biases.down / self.tensor.ranks.size)


class DispatchedExperts(Experts):
    """This rank's whole experts. If all ranks have the tokens, their results are summed."""

    tensor: TensorPass

    @property
    def has_all_tokens(self) -> bool:
        """Whether all ranks that share the experts have these tokens, without gradients."""
        region = self.tensor.region
        decoding = region.replicated and region.shape[1] == 1
        return decoding and self.shard is not None and self.shard.ranks == region.ranks

    def route(self, experts: Tensor) -> TokenRoute | None:
        return None if self.has_all_tokens else super().route(experts)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, route: TokenRoute | None = None
    ) -> Tensor:
        if self.shard is not None and self.has_all_tokens:
            return self.shard.run_replicated(self._run_local, x, experts, weights)
        return super().forward(x, experts, weights, route)


class DispatchedMoE(SparseMoE):
    """Whole experts on ranks: each dispatches its own tokens, but in decoding computes all."""

    tensor: TensorPass
    experts: DispatchedExperts

    def forward(self, x: Tensor, *dropout_args: Tensor) -> MoEOutput:
        """As in the base for the region's tokens x; routes this rank's alone, in decoding all."""
        region = self.tensor.region
        if self.experts.has_all_tokens:
            return super().forward(x)
        y = super().forward(region.local_tokens(x), *map(region.slice_tokens, dropout_args))
        return y._replace(x=region.gather_tokens(y.x))

    def count_routing(self, routed: MoEOutput, real: Tensor | None) -> Tensor:
        """Returns the counts and sums over the tokens of all ranks, on every rank."""
        region = self.tensor.region
        if self.experts.has_all_tokens:
            return count_routing(routed, real)
        real = None if real is None else region.slice_tokens(real)
        return reduce_from_group(count_routing(routed, real), region.ranks)


class TensorParallelNorm(AddRMSNorm):
    """AddRMSNorm, which takes its result if computed with the sum over ranks before it."""

    tensor: TensorPass
    place: int  # in `TensorPass.norms`

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None, post: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or post is not None:
            return super().forward(x, residual, post)
        output = self.tensor.take_norm(self.place, x, residual)
        if output is None:
            output = super().forward(x, residual)
        self.tensor.expect_sum(self.place + 1, output[1])
        return output


class FlatParallelNorm(RMSNorm):
    """A norm over a dimension that ranks share; `elements`: of all of them together."""

    ranks: Ranks
    elements: int

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """`rms_norm_ref` with the mean of squares over the ranks."""
        h = x.float()
        squares = all_reduce(h.square().sum(-1, keepdim=True), self.ranks)
        h = h * torch.rsqrt(squares / self.elements + self.eps)
        if self.cast == "before_weight":
            return (self.offset + self.weight if self.offset else self.weight) * h.to(x.dtype)
        return (h * (self.offset + self.weight.float())).to(x.dtype)


class TensorParallelDecoder(Decoder):
    """A decoder whose blocks have a rank's own tokens; input and output are all [B, T, C]."""

    tensor: TensorPass

    def forward(
        self, x: Tensor, position_ids: Tensor, mask: Any, cache: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, list[Tensor]]:
        decoding = cache is not None and not torch.is_grad_enabled()
        region = SequenceParallelRegion(self.tensor.ranks, (x.shape[0], x.shape[1]), decoding)
        with self.tensor.running(region):
            local = region.scatter(x)
            hidden, counts = super().forward(local, position_ids, mask, cache, *args, **kwargs)
        # The head needs the gathered tokens as soon as backward begins
        region = replace(region, saves_gathered=True)
        return region.gather_from_region(hidden, single_reader=True), counts

    def recompute(self, block: Callable[..., BlockOutput], *inputs: Any) -> BlockOutput:
        """As a decoder's, in a region where gathered tokens are saved, not gathered again."""
        # What the block gathers has just been gathered
        region = replace(self.tensor.region, saves_gathered=True)

        def run(*inputs: Any) -> BlockOutput:
            with self.tensor.running(region):
                return block(*inputs)

        return super().recompute(run, *inputs)
