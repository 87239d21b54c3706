"""Pairs of a chosen and a rejected answer: what all tasks over them share.

# P pairs, B lines, T tokens of a line
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tigon.data import Encoder, MicroBatch, PairEncoder
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.train.tasks.base import MicroBatchLoss, StepInputs
from tigon.train.tasks.logprobs import (
    COMMON_SETTINGS,
    AnswerTask,
    answer_mask,
    is_padding,
    sequence_indices,
    sum_per_sequence,
    target_mask,
)
from tigon.train.tasks.losses import CPO as CPO_LOSSES
from tigon.train.tasks.losses import DPO as DPO_LOSSES
from tigon.train.tasks.losses import SMOOTHED_LOSSES, Scores, orpo, simpo

Metrics = dict[str, Tensor]


class PairTask(AnswerTask):
    """Learns from how likely the model finds both answers of a pair.

    A subclass says what the scores lose (`compare`). They are log-probabilities, or log-ratios to
    the reference of an objective that `refers` to one. Logged are TRL's means over pairs: rewards
    (beta times the scores), how often the chosen answer's is higher, and log-probabilities.
    """

    learns = "pairs of answers"
    group = 2
    unit = "pair"
    one_prompt = True
    distinct = True

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
        if not self.beta > 0:
            raise ValueError(f"beta={self.beta} of task={config.task} must be above 0")

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return PairEncoder(tokenizer, **self.encoder_options())

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        pairs = torch.full((), len(inputs.micro_batch.spans) // 2, device=model.device)
        return super().sums(model, inputs) | {"pairs": pairs}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        """Each pair's loss [P], and more values of pairs, whose means are logged."""
        raise NotImplementedError

    def likelihood(
        self, logprobs: Tensor, inputs: StepInputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        """What the log-probabilities [B, T] add to the loss by themselves, and to what is logged;
        this micro-batch's part of both."""
        return 0.0, {}

    def shown(self, scores: Scores) -> Scores:
        """Scores as rewards are made of them and log-probabilities logged."""
        return scores

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        # First, while nothing of the model's own pass is in memory
        known = self.reference_logprobs(inputs) if self.refers else None
        output = self.forward(model, inputs)
        assert output.logprobs is not None
        tokens = answer_mask(inputs)
        logprobs = scores = pair_scores(inputs, output.logprobs, tokens)
        if known is not None:
            scores = logprobs - pair_scores(inputs, known, tokens)
        losses, values = self.compare(scores)
        also, metrics = self.likelihood(output.logprobs, inputs, sums)
        pairs = sums["pairs"].clamp(min=1)
        loss = losses.sum() / pairs + also + self.balance(model, output, inputs, sums)
        rewards, shown = self.shown(scores), self.shown(logprobs)
        values |= reward_metrics(self.beta * rewards.chosen, self.beta * rewards.rejected)
        values |= {"logps/chosen": shown.chosen, "logps/rejected": shown.rejected}
        means = {n: x.detach().sum(dtype=torch.float64) / pairs for n, x in values.items()}
        return MicroBatchLoss(loss, means | metrics)


def pair_scores(inputs: StepInputs, values: Tensor, tokens: Tensor) -> Scores:
    """The sums of values [B, T] over the tokens of each answer."""
    both = sum_per_sequence(inputs.micro_batch, torch.where(tokens, values, 0))
    counts = sum_per_sequence(inputs.micro_batch, tokens)
    return Scores(*(x.unflatten(0, (-1, 2))[:, i] for x in (both, counts) for i in (0, 1)))


def chosen_mask(inputs: StepInputs) -> Tensor:
    """Bool [B, T]: what is learned of the chosen answers."""
    tokens = target_mask(inputs)
    return tokens & (sequence_indices(inputs.micro_batch, tokens) % 2 == 0)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> Metrics:
    """What is logged of rewards [P]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }


# Direct preference optimisation, and losses of the same form: of log-ratios to a reference.


class DPO(PairTask):
    serves = COMMON_SETTINGS | {"beta", "loss_type", "label_smoothing", "reference"}
    refers = True
    per_token: ClassVar[Mapping[str, torch.dtype]] = {reference.COLUMN: torch.float32}
    losses: ClassVar[Sequence[str]] = tuple(DPO_LOSSES)

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return DPO_LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}


class IPO(DPO):
    serves = COMMON_SETTINGS | {"beta", "reference"}
    losses = ("ipo",)


class APO(DPO):
    serves = COMMON_SETTINGS | {"beta", "loss_type", "reference"}
    losses = ("apo_zero", "apo_down")


# Contrastive preference optimisation and SimPO: pairs without a reference.
#
# B lines, T tokens of a line


class CPO(PairTask):
    """The preference loss, and `cpo_alpha` times the cross-entropy of the chosen answers."""

    serves = COMMON_SETTINGS | {"beta", "loss_type", "label_smoothing", "cpo_alpha"}
    losses: ClassVar[Sequence[str]] = tuple(CPO_LOSSES)
    default_alpha: ClassVar[float] = 1.0

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.alpha = self.default_alpha if config.cpo_alpha is None else config.cpo_alpha

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        return super().sums(model, inputs) | {"chosen_tokens": chosen_mask(inputs).sum()}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return CPO_LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}

    def likelihood(
        self, logprobs: Tensor, inputs: StepInputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        if not self.alpha:
            return 0.0, {}
        nll = chosen_nll(logprobs, inputs, sums)
        return self.alpha * nll, {"nll_loss": nll.detach().double()}

    def shown(self, scores: Scores) -> Scores:
        return scores.means() if self.loss_type in ("ipo", "simpo") else scores


class SimPO(CPO):
    """Compares mean log-probabilities, with a margin between them."""

    serves = COMMON_SETTINGS | {"beta", "label_smoothing", "cpo_alpha", "simpo_gamma"}
    losses = ("simpo",)
    default_beta = 2.0
    default_alpha = 0.0

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        smoothing, gamma = self.config.label_smoothing, self.config.simpo_gamma
        return simpo(scores, self.beta, smoothing, gamma=gamma), {}


def chosen_nll(logprobs: Tensor, inputs: StepInputs, sums: Mapping[str, Tensor]) -> Tensor:
    """This micro-batch's part of the mean over what is learned of all chosen answers."""
    return -(logprobs * chosen_mask(inputs)).sum() / sums["chosen_tokens"].clamp(min=1)


# Odds ratio preference optimisation: fine-tuning on the chosen answer, and an odds ratio.


class ORPO(PairTask):
    """The cross-entropy is of the chosen answer and its prompt, as in TRL and the paper's code."""

    serves = COMMON_SETTINGS | {"beta"}

    def targets(self, micro_batch: MicroBatch) -> dict[str, Any]:
        ids = micro_batch.input_ids
        sequence = sequence_indices(micro_batch, ids)
        chosen = (sequence % 2 == 0) & ~is_padding(micro_batch, sequence)
        said = micro_batch.per_token["supervised"]
        return {"labels": ids.masked_fill(~(said | chosen), IGNORE_INDEX)}

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        return super().sums(model, inputs) | {"chosen_tokens": chosen_mask(inputs).sum()}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        losses, log_odds = orpo(scores, self.beta)
        return losses, {"log_odds_chosen": log_odds, "log_odds_ratio": -losses / self.beta}

    def likelihood(
        self, logprobs: Tensor, inputs: StepInputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        nll = chosen_nll(logprobs, inputs, sums)
        return nll, {"nll_loss": nll.detach().double()}

    def shown(self, scores: Scores) -> Scores:
        return scores.means()
