"""Routers: which experts a token takes, and with what weights.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; transformers' modeling_gemma4.

# N tokens, C model dim, E experts in G groups of E / G, k of them per token
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels.linear.linear import linear
from tigon.kernels.mlp.softmax_topk import softmax_topk
from tigon.kernels.norm.rms_norm import rms_norm
from tigon.kernels.runtime import without_autocast
from tigon.layers.float32 import keep_dtype
from tigon.layers.linear import Linear


class Routing(NamedTuple):
    """What a router says of every token."""

    probs: Tensor  # [N, E] fp32, sum to 1
    experts: Tensor  # [N, k] int64
    weights: Tensor  # [N, k]
    logits: Tensor  # [N, E]


class Router(nn.Module):
    """A projection of tokens x [N, C] to experts, some of which it chooses: x -> Routing.

    As in transformers it is no nn.Linear: what changes all linear layers leaves routers as they
    are. `dropout_args`: keys [N] of an adapter's dropout, if there is one.
    """

    zero_init = ()  # a router's bias is drawn, too

    def __init__(self, dim: int, experts: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None

    def logits(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        """Returns logits [N, E] of x [N, C]."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Routing:
        """Returns the routing of x [N, C]."""
        raise NotImplementedError


class TopKRouter(Router):
    """The k experts of E with the largest logits.

    The weights are probabilities over all experts, made to sum to 1 with `normalize`, or with
    `sigmoid` those of the logits; rounded to the model's dtype unless `exact_weights`.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        per_token: int,
        *,
        normalize: bool,
        exact_weights: bool = False,
        sigmoid: bool = False,
        bias: bool = False,
    ):
        super().__init__(dim, experts, bias=bias)
        self.per_token, self.normalize, self.sigmoid = per_token, normalize, sigmoid
        self.exact_weights = exact_weights

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Routing:
        logits = self.logits(x)
        dtype = torch.float32 if self.exact_weights else logits.dtype
        if self.sigmoid:
            weights, experts = logits.topk(self.per_token)
            probs = logits.softmax(-1, dtype=torch.float32)
            return Routing(probs, experts, weights.float().sigmoid().to(dtype), logits)
        best = softmax_topk(logits, self.per_token, normalize=self.normalize, dtype=dtype)
        return Routing(*best, logits)


class ScaledRouter(Router):
    """Gemma 4's choice of experts for normed, scaled tokens, with a factor of each expert."""

    one_init = ("scale", "per_expert_scale")  # parameters that begin as ones

    def __init__(self, dim: int, experts: int, per_token: int, eps: float):
        nn.Module.__init__(self)  # the base would make a weight
        self.per_token, self.eps = per_token, eps
        self.proj = Linear(dim, experts, bias=False)
        self.scale = nn.Parameter(torch.empty(dim))
        self.per_expert_scale = nn.Parameter(torch.empty(experts))

    def logits(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        """Returns logits [N, E] of x [N, C], which is normed and scaled."""
        normed = rms_norm(x, None, self.eps, cast="after_weight")
        return self.proj(normed * self.scale * x.shape[-1] ** -0.5, *dropout_args)

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Routing:
        """Returns the routing of x [N, C], with weights in fp32."""
        logits = self.logits(x, *dropout_args)
        probs, experts, weights = softmax_topk(logits, self.per_token, normalize=True)
        return Routing(probs, experts, weights * self.per_expert_scale[experts], logits)


class GroupRouter(Router):
    """Scores of experts [N, E], and the k that each token takes, from the best `top_groups` groups.

    A group is as good as the sum of its two best experts. The weights are the scores of the chosen
    experts, made to sum to 1 with `normalize`, times `scale`. With `sigmoid`, a score is the
    sigmoid of the expert's logit, in fp32 if `exact`; if `corrected`, `e_score_correction_bias`,
    which no gradient reaches, is added for the choice alone. Without, scores are probabilities of
    all experts in the model's dtype.
    """

    e_score_correction_bias: Tensor | None  # [E], fp32 in models of any dtype

    def __init__(
        self,
        dim: int,
        experts: int,
        per_token: int,
        *,
        sigmoid: bool,
        corrected: bool = True,
        exact: bool = True,
        groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        eps: float = 1e-20,  # added to the sum of a token's weights
    ):
        super().__init__(dim, experts)
        if experts % groups or (groups > 1 and experts < 2 * groups):
            raise ValueError(f"n_group={groups} does not divide {experts} experts into two or more")
        if not 1 <= top_groups <= groups or per_token > top_groups * (experts // groups):
            raise ValueError(
                f"topk_group={top_groups} of {groups} groups of {experts // groups} experts: no "
                f"token can take {per_token} of them"
            )
        self.per_token, self.sigmoid, self.exact = per_token, sigmoid, exact
        self.groups, self.top_groups = groups, top_groups
        self.normalize, self.scale, self.eps = normalize, scale, eps
        self.register_buffer(
            "e_score_correction_bias",
            torch.zeros(experts, dtype=torch.float32) if sigmoid and corrected else None,
        )

    def logits(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        """Returns logits [N, E] of x [N, C], in fp32 with `sigmoid` and `exact`."""
        if not (self.sigmoid and self.exact):
            return super().logits(x)
        with without_autocast(x.device):
            return F.linear(x.float(), self.weight.float())

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Routing:
        logits = self.logits(x)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        ranked = scores.detach()
        if self.e_score_correction_bias is not None:
            ranked = ranked + self.e_score_correction_bias
        if self.top_groups < self.groups:
            ranked = self._mask_groups(ranked)
        experts = ranked.topk(self.per_token, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        probs = scores.float()
        if self.sigmoid:
            probs = probs / probs.sum(-1, keepdim=True)
        return Routing(probs, experts, weights * self.scale, logits)

    def _mask_groups(self, ranked: Tensor) -> Tensor:
        """Returns `ranked` [N, E] with -inf, or 0 for probabilities, outside of the best groups."""
        groups = ranked.unflatten(-1, (self.groups, -1))
        best = groups.topk(2).values.sum(-1).topk(self.top_groups, sorted=False).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        fill = float("-inf") if self.sigmoid else 0.0
        return groups.masked_fill(outside.unsqueeze(-1), fill).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupRouter":
        """Converts the module; the bias only moves: rounded, it would choose others."""
        exact, move = self._buffers.get("e_score_correction_bias"), keep_dtype(fn)

        def convert(x: Tensor) -> Tensor:
            return move(x) if x is exact else fn(x)

        return super()._apply(convert, recurse)
