"""Preference tasks over pairs of answers: DPO, IPO, APO, CPO, SimPO and ORPO.

# P pairs, B lines, T tokens of a line
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.data import Encoder, MicroBatch, PairEncoder
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.distributed import World
from tigon.train.tasks.base import MicroBatchLoss, StepInputs
from tigon.train.tasks.logprobs import (
    COMMON_SETTINGS,
    AnswerTask,
    answer_mask,
    sequence_indices,
    sum_per_sequence,
)
from tigon.train.tasks.losses import CPO as CPO_LOSSES
from tigon.train.tasks.losses import DPO as DPO_LOSSES
from tigon.train.tasks.losses import SMOOTHED_LOSSES, Loss, Scores, orpo, simpo

Metrics = dict[str, Tensor]


class PairTask(AnswerTask):
    """Learns from the model's log-probabilities of both answers of a pair.

    A subclass names `pair_losses` or overrides `compare`, the loss of a pair's scores: these are
    log-probabilities, or log-ratios to the reference if the task `refers` to one. `alpha` times the
    cross-entropy of the chosen answers is added. Logged are TRL's means over pairs: rewards (beta
    times the scores), how often that of the chosen answer is higher, and log-probabilities.
    """

    group = 2
    unit = "pair"
    one_prompt = True
    distinct = True
    alpha = 0.0  # weight of the chosen answers' cross-entropy
    pair_losses: ClassVar[Mapping[str, Loss]] = {}  # by loss_type

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        smoothing = config.label_smoothing
        if smoothing and self.loss_type not in SMOOTHED_LOSSES:
            raise ValueError(
                f"label_smoothing={smoothing}: loss_type={self.loss_type} of task={config.task} "
                "has no use for it"
            )
        most = 0.5 if self.loss_type == "robust" else 1.0
        if not smoothing < most:
            raise ValueError(f"label_smoothing={smoothing} must be below {most}")

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        thinking = self.config.train_on_empty_thinking
        return PairEncoder(tokenizer, train_on_empty_thinking=thinking)

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """Adds the number of "pairs" and, with `alpha`, of "chosen_tokens" to the base's sums."""
        pairs = torch.full((), len(inputs.micro_batch.spans) // 2, device=model.device)
        sums = super().sums(model, inputs) | {"pairs": pairs}
        return sums | {"chosen_tokens": chosen_mask(inputs).sum()} if self.alpha else sums

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        """Returns each pair's loss [P], and more values [P] whose means are logged."""
        loss = self.pair_losses[self.loss_type]
        return loss(scores, self.beta, self.config.label_smoothing), {}

    def logged_scores(self, scores: Scores) -> Scores:
        """Returns the scores that rewards and logged log-probabilities are computed from."""
        return scores

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns a micro-batch's part of the mean of `compare` over pairs, of `alpha` times the
        chosen answers' cross-entropy and of the balance of experts, with TRL's metrics."""
        # First, before the activations of the model's pass are in memory
        known = self.reference_logprobs(model, inputs) if self.refers else None
        token_logprobs, output = self.forward(model, inputs)
        tokens = answer_mask(inputs)
        logprobs = scores = pair_scores(inputs, token_logprobs, tokens)
        if known is not None:
            scores = logprobs - pair_scores(inputs, known, tokens)
        losses, values = self.compare(scores)
        pairs = sums["pairs"].clamp(min=1)
        metrics: Metrics = {}
        loss = losses.sum() / pairs
        if self.alpha:
            nll = -(token_logprobs * chosen_mask(inputs)).sum()
            nll = nll / sums["chosen_tokens"].clamp(min=1)
            loss, metrics["nll_loss"] = loss + self.alpha * nll, nll.detach().double()
        loss = loss + self.balance(model, output, inputs, sums)
        rewards, logged = self.logged_scores(scores), self.logged_scores(logprobs)
        chosen, rejected = self.beta * rewards.chosen, self.beta * rewards.rejected
        values |= {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": logged.chosen,
            "logps/rejected": logged.rejected,
        }
        means = {n: x.detach().sum(dtype=torch.float64) / pairs for n, x in values.items()}
        return MicroBatchLoss(loss, means | metrics)


def pair_scores(inputs: StepInputs, values: Tensor, tokens: Tensor) -> Scores:
    """Returns sums of values [B, T] over `tokens` of each answer, and their numbers."""
    both = sum_per_sequence(inputs.micro_batch, torch.where(tokens, values, 0))
    counts = sum_per_sequence(inputs.micro_batch, tokens)
    return Scores(*(x.unflatten(0, (-1, 2))[:, i] for x in (both, counts) for i in (0, 1)))


def chosen_mask(inputs: StepInputs) -> Tensor:
    """Returns a mask [B, T] of the positions that predict a learned token of a chosen answer."""
    tokens = inputs.targets.mask
    return tokens & (sequence_indices(inputs.micro_batch, tokens) % 2 == 0)


class DPO(PairTask):
    """Direct preference optimization, and losses of the same form on log-ratios to a reference."""

    serves = COMMON_SETTINGS | {"beta", "loss_type", "label_smoothing", "reference"}
    refers = True
    per_token: ClassVar[Mapping[str, torch.dtype]] = {reference.COLUMN: torch.float32}
    pair_losses = DPO_LOSSES
    losses: ClassVar[Sequence[str]] = tuple(DPO_LOSSES)


class IPO(DPO):
    """IPO, arXiv 2310.12036: DPO with a squared loss of the margin of means over tokens, alone."""

    serves = COMMON_SETTINGS | {"beta", "reference"}
    losses = ("ipo",)


class APO(DPO):
    """APO, arXiv 2408.06266: DPO with the two losses that anchor each answer to the reference."""

    serves = COMMON_SETTINGS | {"beta", "loss_type", "reference"}
    losses = ("apo_zero", "apo_down")


class CPO(PairTask):
    """Contrastive preference optimization: no reference, `cpo_alpha` times cross-entropy."""

    serves = COMMON_SETTINGS | {"beta", "loss_type", "label_smoothing", "cpo_alpha"}
    pair_losses = CPO_LOSSES
    losses: ClassVar[Sequence[str]] = tuple(CPO_LOSSES)
    default_alpha: ClassVar[float] = 1.0

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.alpha = self.default_alpha if config.cpo_alpha is None else config.cpo_alpha

    def logged_scores(self, scores: Scores) -> Scores:
        """Returns means over tokens with ipo and simpo, whose losses compare means, else sums."""
        return scores.means() if self.loss_type in ("ipo", "simpo") else scores


class SimPO(CPO):
    """Simple preference optimization: CPO with one loss, which compares mean log-probabilities with
    a margin of `simpo_gamma`; by default without cross-entropy."""

    serves = COMMON_SETTINGS | {"beta", "label_smoothing", "cpo_alpha", "simpo_gamma"}
    losses = ("simpo",)
    default_beta = 2.0
    default_alpha = 0.0

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        smoothing, gamma = self.config.label_smoothing, self.config.simpo_gamma
        return simpo(scores, self.beta, smoothing, gamma=gamma), {}


class ORPO(PairTask):
    """Odds ratio preference optimization, with cross-entropy of the prompt too, as in TRL."""

    serves = COMMON_SETTINGS | {"beta"}
    alpha = 1.0

    def targets(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Returns the labels: all tokens of chosen sequences, and the supervised ones of others."""
        ids = micro_batch.input_ids
        sequence = sequence_indices(micro_batch, ids)  # of padding that of the next one
        starts = F.pad(micro_batch.spans[:, 0], (0, 1), value=ids.numel())
        real = torch.arange(ids.numel(), device=ids.device).view(ids.shape) >= starts[sequence]
        chosen = (sequence % 2 == 0) & real
        supervised = micro_batch.per_token["supervised"]
        return {"labels": ids.masked_fill(~(supervised | chosen), IGNORE_INDEX)}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        losses, log_odds = orpo(scores, self.beta)
        return losses, {"log_odds_chosen": log_odds, "log_odds_ratio": -losses / self.beta}

    def logged_scores(self, scores: Scores) -> Scores:
        """Returns means over tokens, which the loss compares too."""
        return scores.means()
