"""A mixture of experts in place of an MLP, and statistics of its router.

# B batch, T tokens, N = B T, E experts, k of them per token, C model dim, I size of an expert,
# L layers with experts
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.distributed.expert_dispatch import ExpertShard, TokenRoute
from tigon.kernels.mlp.gated_act import Activation
from tigon.kernels.mlp.grouped_mlp import ExpertActivation, unchecked_grouped_mlp
from tigon.kernels.mlp.grouped_mlp_passes import ExpertBiases
from tigon.layers.linear import Linear
from tigon.layers.lora import Adapters
from tigon.layers.mlp import GatedMLP
from tigon.layers.norm import RMSNorm
from tigon.layers.router import Router, TopKRouter


class MoEOutput(NamedTuple):  # a tuple, so that FSDP and checkpointing find the tensors in it
    """The output of a mixture of experts, with the router's probabilities and choices."""

    x: Tensor  # [B, T, C]
    probs: Tensor  # [N, E] fp32, of the router
    experts: Tensor  # [N, k] int64, those chosen


def count_routing(routed: MoEOutput, real: Tensor | None) -> Tensor:
    """Returns [2, E]: each expert's count of choices and sum of probabilities, over the real
    tokens.

    `real` [B, T] is 0 on padding; None if there is none. It is small, so that a layer's
    probabilities need not be kept, and the same in every run: nothing is added by atomics.
    """
    chosen = torch.zeros_like(routed.probs).scatter(1, routed.experts, 1.0)
    # Multiplied in any case: a rank without padding must not compute a block again, and exchange
    # rows with the others, at another point of backward than they do
    counts = torch.ones_like(chosen[:, :1]) if real is None else real.reshape(-1, 1)
    return torch.stack([(t * counts).sum(0) for t in (chosen, routed.probs)])


class Experts(nn.Module):
    """The MLPs of all experts: one parameter for gate and up, one for down, perhaps with biases.

    `transposed` matrices are [E, C, 2I] and [E, I, C] instead of [E, 2I, C] and [E, C, I].
    """

    zero_init = ("gate_up_proj_bias", "down_proj_bias")

    def __init__(
        self,
        dim: int,
        intermediate: int,
        experts: int,
        act: ExpertActivation,
        *,
        bias: bool = False,
        transposed: bool = False,
    ):
        super().__init__()
        shapes = (2 * intermediate, dim), (dim, intermediate)
        up, down = (shape[::-1] if transposed else shape for shape in shapes)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, *up))
        self.down_proj = nn.Parameter(torch.empty(experts, *down))
        self.gate_up_proj_bias = self.down_proj_bias = None
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * intermediate))
            self.down_proj_bias = nn.Parameter(torch.empty(experts, dim))
        self.act, self.transposed = act, transposed
        self.adaptable = True  # whether adapters may be added
        self.recompute_gate_up = False  # in backward, in place of keeping it
        self.lora: Adapters | None = None  # one of which may be added to the matrices
        self.shard: ExpertShard | None = None  # None: this rank has all experts

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Returns the numbers of outputs and inputs of an expert's matrix, as this rank has it."""
        rows, columns = self.get_parameter(name).shape[1:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def biases(self) -> ExpertBiases | None:
        """The biases, or None; each rank that sums the output adds its part of down's."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        return ExpertBiases(self.gate_up_proj_bias, self.down_proj_bias)

    def route(self, experts: Tensor) -> TokenRoute | None:
        """Starts to tell the ranks which tokens they get; None if this rank has all experts.

        Call it early, so that the device has work while the host waits in `forward`.
        """
        return None if self.shard is None else self.shard.route(experts)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, route: TokenRoute | None = None
    ) -> Tensor:
        """x [N, C], experts and weights [N, k] -> [N, C]; the experts are not checked."""
        if self.shard is not None:
            route = self.shard.route(experts) if route is None else route
            return self.shard.run(self._run_local, route, x, experts, weights)
        return self._run_local(x, experts, weights)

    def _run_local(
        self, x: Tensor, experts: Tensor, weights: Tensor, slots: int | None = None
    ) -> Tensor:
        """Returns [N, C], the weighted sums over this rank's experts with the active adapter.

        `slots`: how many of the `experts` this rank has, if the host knows it.
        """
        matrices = self.gate_up_proj, self.down_proj
        adapter = None if self.lora is None else self.lora.active()
        low = None
        if adapter is not None:
            low = adapter.lora_factors(*matrices, transposed=self.transposed)
        given = x, *matrices, experts, weights, self.act, slots, low
        return unchecked_grouped_mlp(
            *given,
            biases=self.biases,
            transposed=self.transposed,
            recompute_gate_up=self.recompute_gate_up,
        )


class SparseMoE(nn.Module):
    """[B, T, C] -> MoEOutput: the weighted sum of each token's top `per_token` experts; none drops.

    The weights are probabilities over all experts, made to sum to 1 with `normalize`, and rounded
    to the model's dtype unless `exact_weights`. With `shared`, its size, one more expert takes
    every token, weighted by a gate; `shared_experts` is the size of those that take every token
    without one. A `router` replaces that choice of experts and weights, and its options; a `norm`
    is that of the experts' input alone. With `scales_input`, the weights are sigmoids of the best
    logits, and multiply what experts read. `bias` is that of the router and of all experts, whose
    matrices may be `transposed`. `dropout_args`: keys [B, T] of an adapter's dropout, if any.
    """

    def __init__(
        self,
        dim: int,
        intermediate: int,
        experts: int,
        per_token: int,
        act: ExpertActivation,
        *,
        normalize: bool = True,
        exact_weights: bool = False,
        shared: int = 0,
        shared_experts: int = 0,
        router: Router | None = None,
        norm: RMSNorm | None = None,
        scales_input: bool = False,
        bias: bool = False,
        transposed: bool = False,
    ):
        super().__init__()
        self.per_token, self.scales_input, self.norm = per_token, scales_input, norm
        self.gate: Router = router or TopKRouter(
            *(dim, experts, per_token),
            normalize=normalize,
            exact_weights=exact_weights,
            sigmoid=scales_input,
            bias=bias,
        )
        form = {"bias": bias, "transposed": transposed}
        self.experts = Experts(dim, intermediate, experts, act, **form)
        self.experts.adaptable = not scales_input  # PEFT reads these matrices as transposes
        gated = cast(Activation, act)  # of shared experts
        self.shared_expert = GatedMLP(dim, shared, gated) if shared else None
        self.shared_expert_gate = Linear(dim, 1, bias=False) if shared else None
        self.shared_experts = GatedMLP(dim, shared_experts, gated) if shared_experts else None

    @property
    def divided(self) -> bool:
        """Whether each rank has some whole experts, and all have the rest."""
        return self.experts.shard is not None

    def forward(self, x: Tensor, *dropout_args: Tensor) -> MoEOutput:
        rows = x.flatten(0, -2)
        keys = [t.flatten() for t in dropout_args]
        probs, chosen, weights, _ = self.gate(rows, *keys)
        inputs = rows if self.norm is None else self.norm(rows)
        experts, scales = chosen, weights
        if self.scales_input:  # a copy of a token for each of its experts
            inputs = (inputs[:, None] * weights[..., None]).flatten(0, 1)
            experts, scales = chosen.view(-1, 1), torch.ones_like(weights.view(-1, 1))
        # Nothing to prepare by what others put into its place
        route = self.experts.route(experts) if isinstance(self.experts, Experts) else None
        shared = None
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            share = F.sigmoid(self.shared_expert_gate(rows, *keys))
            shared = share * self.shared_expert(rows, *keys)
        elif self.shared_experts is not None:
            shared = self.shared_experts(rows, *keys)
        y = self.experts(inputs, experts, scales, route)
        if self.scales_input:
            y = y.unflatten(0, (-1, self.per_token)).sum(1)
        y = y if shared is None else y + shared
        # No view: FSDP2 warns of views among what a block returns
        return MoEOutput(torch.ops.aten._unsafe_view(y, x.shape), probs, chosen)

    count_routing = staticmethod(count_routing)


class Balance(NamedTuple):
    """How evenly a forward pass used its experts."""

    load: Tensor  # [L, E], the share of a layer's assignments that went to each expert
    aux_loss: Tensor  # differentiable scalar: k if even, up to E if k experts take everything


def balance(tallies: Sequence[Tensor], per_token: int) -> Balance:
    """Returns the balance from the counts of every layer; `per_token` is k.

    aux_loss = E sum_e f_e P_e over the tokens of all layers, where f_e is how often a token chose
    expert e and P_e its mean probability. Source: Fedus et al. (arXiv 2101.03961), eq. 4 to 6, for
    k experts as in transformers, which rounds P to the model's dtype.
    """
    counts, sums = torch.stack(list(tallies), dim=1)  # [L, E] each
    counts = counts.detach()
    tokens = (counts.sum() / per_token).clamp(min=1)  # times layers
    aux_loss = counts.shape[1] * (counts.sum(0) / tokens * (sums.sum(0) / tokens)).sum()
    return Balance(counts / counts.sum(1, keepdim=True).clamp(min=1), aux_loss)
