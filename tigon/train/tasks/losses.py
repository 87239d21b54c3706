"""Losses of preferences, as functions of the log-probabilities of whole answers, and of rewards.

A log-probability is the sum over an answer's tokens, fp32; a log-ratio is that of the model less
that of the reference. Checked against TRL (dpo_trainer, kto_trainer, reward_trainer, grpo_trainer;
experimental.cpo, experimental.orpo), whose names of losses these are.

# P pairs, E answers, N tokens of answers
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What the losses of pairs compare, fp32 [P]: log-ratios, or log-probabilities."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor  # [P], of each answer
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    def __sub__(self, other: "Scores") -> "Scores":
        """Those of another model taken off: of log-probabilities, log-ratios."""
        chosen, rejected = self.chosen - other.chosen, self.rejected - other.rejected
        return Scores(chosen, rejected, self.chosen_tokens, self.rejected_tokens)

    def means(self) -> "Scores":
        """Returns means over an answer's tokens in place of sums."""
        tokens = self.chosen_tokens, self.rejected_tokens
        chosen, rejected = (
            x / n.clamp(min=1) for x, n in zip((self.chosen, self.rejected), tokens, strict=True)
        )
        return Scores(chosen, rejected, *tokens)


def sigmoid(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO, arXiv 2305.18290; with label_smoothing, the share of labels that are taken to be the
    wrong way round, conservative DPO (cDPO)."""
    x = beta * s.margin
    return -F.logsigmoid(x) * (1 - label_smoothing) - F.logsigmoid(-x) * label_smoothing


def hinge(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """SLiC, arXiv 2305.10425; `beta` is the reciprocal of the margin."""
    return torch.relu(1 - beta * s.margin)


def ipo(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """IPO, arXiv 2310.12036 (17), over means of tokens; `beta` is its tau."""
    return (s.means().margin - 1 / (2 * beta)) ** 2


def robust(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Robust DPO, arXiv 2403.00409: unbiased where that share of labels is wrong."""
    x = beta * s.margin
    clean, flipped = F.logsigmoid(x) * (1 - label_smoothing), F.logsigmoid(-x) * label_smoothing
    return (flipped - clean) / (1 - 2 * label_smoothing)


def sigmoid_norm(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Length-normalised DPO, arXiv 2411.15124: of means of tokens in place of sums."""
    return sigmoid(s.means(), beta, label_smoothing)


def apo_zero(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """APO-zero, arXiv 2408.06266 (7): the chosen up, the rejected down."""
    return 1 - torch.sigmoid(beta * s.chosen) + torch.sigmoid(beta * s.rejected)


def apo_down(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """APO-down, arXiv 2408.06266 (8): the chosen down, the rejected more so."""
    return torch.sigmoid(beta * s.chosen) + 1 - torch.sigmoid(beta * s.margin)


def simpo(s: Scores, beta: float, label_smoothing: float = 0.0, *, gamma: float) -> Tensor:
    """SimPO, arXiv 2405.14734: of means of log-probabilities, by a margin of `gamma`."""
    x = beta * s.means().margin - gamma
    return -F.logsigmoid(x) * (1 - label_smoothing) - F.logsigmoid(-x) * label_smoothing


Loss = Callable[[Scores, float, float], Tensor]
# By TRL's loss_type: of log-ratios, and (CPO, arXiv 2401.08417) of log-probabilities
DPO: Mapping[str, Loss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "sigmoid_norm": sigmoid_norm,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}
CPO: Mapping[str, Loss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo}
SMOOTHED_LOSSES = (
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "simpo",
)  # those that label_smoothing changes


def orpo(s: Scores, beta: float) -> tuple[Tensor, Tensor]:
    """ORPO's penalty and its log odds ratio, arXiv 2403.07691 (4) and (7), of mean
    log-probabilities; the cross-entropy of the chosen answer is added to it. `beta` is lambda."""
    s = s.means()
    log_odds = s.margin - (_log1mexp(s.chosen) - _log1mexp(s.rejected))
    return -beta * F.logsigmoid(log_odds), log_odds


def kto(
    ratios: Tensor,  # [E]
    desired: Tensor,  # bool [E]
    kl: Tensor,  # scalar, no gradient
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO, arXiv 2402.01306 (7): answers against the divergence from the reference."""
    gain = torch.where(desired, ratios - kl, kl - ratios)
    weights = torch.where(desired, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(beta * gain))


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, center: float = 0.0
) -> Tensor:
    """Of rewards [P], which are to be apart by `margin` (arXiv 2307.09288); `center` weighs the
    square of their sum, which keeps them about 0 (arXiv 2312.09244)."""
    losses = -F.logsigmoid(chosen - rejected - margin)
    return losses + center * (chosen + rejected) ** 2 if center else losses


MAX_LOG_RATIO = 60.0  # log-ratio of a policy gradient: its exponential is finite in fp32


@dataclass(frozen=True)
class Clip:
    """How far a policy may go from the one that has sampled: GRPO's settings, as TRL names them."""

    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: as epsilon
    delta: float | None = None  # the most of the unclipped ratio; None: any

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def policy_gradient(
    logprobs: Tensor,  # [N]
    log_ratios: Tensor,  # [N], to the policy that has sampled, of tokens or of their sequences
    advantages: Tensor,  # [N]
    clip: Clip = Clip(),
) -> tuple[Tensor, Tensor]:
    """Each token's loss, and whether its ratio was clipped: PPO's objective, without a critic
    (GRPO, arXiv 2402.03300), with the two bounds of DAPO, arXiv 2503.14476."""
    # Infinity times an advantage of 0, or the gradient 0 of what is clipped, would be NaN
    ends = (advantages >= 0) | (clip.delta is not None)
    ratio = torch.where(ends, log_ratios.clamp(max=MAX_LOG_RATIO), log_ratios).exp()
    low, high = 1 - clip.epsilon, 1 + clip.high
    bounded = ratio.clamp(low, high)
    free = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    clipped = ((free < low) & (advantages < 0)) | ((free > high) & (advantages > 0))
    return -torch.minimum(free * advantages, bounded * advantages), clipped


def cispo(
    logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, clip: Clip = Clip()
) -> tuple[Tensor, Tensor]:
    """CISPO, arXiv 2506.13585: the ratio weighs the gradient, up to `epsilon_high` (not one more
    than it), and has none itself."""
    ratio = log_ratios.exp().detach()
    clipped = (ratio > clip.high) & (advantages > 0)
    return -ratio.clamp(max=clip.high) * advantages * logprobs, clipped


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(model || reference) of sampled tokens [N]: the estimator that is never negative, k3 of
    http://joschu.net/blog/kl-approx.html."""
    x = reference - logprobs
    return x.exp() - x - 1


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, in the form that loses nothing; of 0, which an answer that is
    certain rounds to, a finite number without a gradient."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    small = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(small, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, x)))
    return torch.where(small, near, far)
