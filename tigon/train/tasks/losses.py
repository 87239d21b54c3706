"""Losses of preference, reward and policy-gradient tasks, as functions of tensors.

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
    """Holds a pair's scores, fp32 [P]: log-ratios or log-probabilities of its answers."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor  # [P], of each answer
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        """The chosen answers' scores less the rejected ones' [P]."""
        return self.chosen - self.rejected

    def __sub__(self, other: "Scores") -> "Scores":
        """Returns scores less those of another model: log-ratios; numbers of tokens stay."""
        chosen, rejected = self.chosen - other.chosen, self.rejected - other.rejected
        return Scores(chosen, rejected, self.chosen_tokens, self.rejected_tokens)

    def means(self) -> "Scores":
        """Returns means over an answer's tokens in place of sums."""
        tokens = self.chosen_tokens, self.rejected_tokens
        chosen, rejected = (
            x / n.clamp(min=1) for x, n in zip((self.chosen, self.rejected), tokens, strict=True)
        )
        return Scores(chosen, rejected, *tokens)


def _smoothed_logsigmoid(x: Tensor, label_smoothing: float) -> Tensor:
    """Returns the binary cross-entropy of logits x, whose targets are 1 - label_smoothing."""
    return -F.logsigmoid(x) * (1 - label_smoothing) - F.logsigmoid(-x) * label_smoothing


def sigmoid(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns DPO's loss [P], arXiv 2305.18290: -log sigmoid(beta * margin); with
    `label_smoothing`, the assumed share of swapped labels, that of conservative DPO (cDPO)."""
    return _smoothed_logsigmoid(beta * s.margin, label_smoothing)


def hinge(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns SLiC's loss [P], arXiv 2305.10425: max(0, 1 - beta * margin)."""
    return torch.relu(1 - beta * s.margin)


def ipo(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns IPO's loss [P], arXiv 2310.12036 (17): (margin of means over tokens - 1 / (2 beta))
    squared; `beta` is its tau."""
    return (s.means().margin - 1 / (2 * beta)) ** 2


def robust(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns robust DPO's loss [P], arXiv 2403.00409, whose expectation is that of DPO on right
    labels if `label_smoothing` is the share of wrong ones."""
    x = beta * s.margin
    clean, flipped = F.logsigmoid(x) * (1 - label_smoothing), F.logsigmoid(-x) * label_smoothing
    return (flipped - clean) / (1 - 2 * label_smoothing)


def sigmoid_norm(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss [P] of length-normalized DPO, arXiv 2411.15124: `sigmoid` of means."""
    return sigmoid(s.means(), beta, label_smoothing)


def apo_zero(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns APO-zero's loss [P], arXiv 2408.06266 (7), which moves the chosen answer up and the
    rejected one down: 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected)."""
    return 1 - torch.sigmoid(beta * s.chosen) + torch.sigmoid(beta * s.rejected)


def apo_down(s: Scores, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns APO-down's loss [P], arXiv 2408.06266 (8), which moves both answers down, the
    rejected one more: sigmoid(beta * chosen) + 1 - sigmoid(beta * margin)."""
    return torch.sigmoid(beta * s.chosen) + 1 - torch.sigmoid(beta * s.margin)


def simpo(s: Scores, beta: float, label_smoothing: float = 0.0, *, gamma: float) -> Tensor:
    """Returns SimPO's loss [P], arXiv 2405.14734: -log sigmoid(beta * margin of means over tokens -
    gamma), smoothed as that of DPO."""
    return _smoothed_logsigmoid(beta * s.means().margin - gamma, label_smoothing)


Loss = Callable[[Scores, float, float], Tensor]
# By TRL's loss_type. DPO's compare log-ratios, CPO's (arXiv 2401.08417) log-probabilities
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
SMOOTHED_LOSSES = ("sigmoid", "sigmoid_norm", "robust", "simpo")  # they use label_smoothing


def orpo(s: Scores, beta: float) -> tuple[Tensor, Tensor]:
    """Returns ORPO's penalty and log odds ratio, arXiv 2403.07691 (4) and (7), from mean
    log-probabilities. The cross-entropy is not included; `beta` is the paper's lambda."""
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
    """Returns KTO's weighted loss of each answer [E], arXiv 2402.01306 (7), which compares its
    log-ratio with the divergence `kl` from the reference."""
    gain = torch.where(desired, ratios - kl, kl - ratios)
    weights = torch.where(desired, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(beta * gain))


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, *, center: float = 0.0
) -> Tensor:
    """Returns Bradley and Terry's loss [P] of rewards [P], with a `margin` between them (arXiv
    2307.09288): -log sigmoid(chosen - rejected - margin).

    `center` weighs the square of their sum, which keeps them about 0 (arXiv 2312.09244).
    """
    losses = -F.logsigmoid(chosen - rejected - margin)
    return losses + center * (chosen + rejected) ** 2 if center else losses


MAX_LOG_RATIO = 60.0  # log-ratio of a policy gradient: its exponential is finite in fp32


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio to the sampling policy, with TRL's names."""

    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: as epsilon
    delta: float | None = None  # upper bound of the unclipped ratio; None: no bound

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def policy_gradient(
    logprobs: Tensor,  # [N]
    log_ratios: Tensor,  # [N], to the sampling policy, per token or per sequence
    advantages: Tensor,  # [N]
    clip: Clip,
) -> tuple[Tensor, Tensor]:
    """Returns each token's loss and whether its ratio was clipped: PPO's surrogate without a critic
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
    logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Returns each token's CISPO loss [N], arXiv 2506.13585, and whether its ratio was clipped. The
    ratio, at most `epsilon_high` (not 1 + epsilon_high), weighs the gradient and is a constant."""
    ratio = log_ratios.exp().detach()
    clipped = (ratio > clip.high) & (advantages > 0)
    return -ratio.clamp(max=clip.high) * advantages * logprobs, clipped


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns an estimate of KL(model || reference) from each sampled token [N], never below 0: k3
    of http://joschu.net/blog/kl-approx.html."""
    x = reference - logprobs
    return x.exp() - x - 1


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) for x < 0 without cancellation; at 0, to which a certain answer
    rounds, a finite number without a gradient."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    small = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(small, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, x)))
    return torch.where(small, near, far)
