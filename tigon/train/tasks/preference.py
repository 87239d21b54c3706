"""Pairs of a chosen and a rejected answer: what all objectives over them share.

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
from tigon.train.tasks.base import Inputs, Part
from tigon.train.tasks.logprobs import (
    SHARED,
    Answers,
    answered,
    is_padding,
    learned,
    of_sequences,
    sequence_of,
)
from tigon.train.tasks.losses import CPO as CPO_LOSSES
from tigon.train.tasks.losses import DPO as DPO_LOSSES
from tigon.train.tasks.losses import SMOOTHED, Scores, orpo, simpo

Metrics = dict[str, Tensor]


class Pairs(Answers):
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
        if smoothing and self.loss_type not in SMOOTHED:
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

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        pairs = torch.full((), len(inputs.micro_batch.spans) // 2, device=model.device)
        return super().sums(model, inputs) | {"pairs": pairs}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        """Each pair's loss [P], and more values of pairs, whose means are logged."""
        raise NotImplementedError

    def likelihood(
        self, logprobs: Tensor, inputs: Inputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        """What the log-probabilities [B, T] add to the loss by themselves, and to what is logged;
        this micro-batch's part of both."""
        return 0.0, {}

    def shown(self, scores: Scores) -> Scores:
        """Scores as rewards are made of them and log-probabilities logged."""
        return scores

    def loss(self, model: CausalLM, inputs: Inputs, sums: dict[str, Tensor]) -> Part:
        # First, while nothing of the model's own pass is in memory
        known = self.reference_logprobs(inputs) if self.refers else None
        output = self.forward(model, inputs)
        assert output.logprobs is not None
        tokens = answered(inputs)
        logprobs = scores = as_pairs(inputs, output.logprobs, tokens)
        if known is not None:
            scores = logprobs - as_pairs(inputs, known, tokens)
        losses, values = self.compare(scores)
        also, metrics = self.likelihood(output.logprobs, inputs, sums)
        pairs = sums["pairs"].clamp(min=1)
        loss = losses.sum() / pairs + also + self.balance(model, output, inputs, sums)
        rewards, shown = self.shown(scores), self.shown(logprobs)
        values |= rewards_of(self.beta * rewards.chosen, self.beta * rewards.rejected)
        values |= {"logps/chosen": shown.chosen, "logps/rejected": shown.rejected}
        means = {n: x.detach().sum(dtype=torch.float64) / pairs for n, x in values.items()}
        return Part(loss, means | metrics)


def as_pairs(inputs: Inputs, values: Tensor, tokens: Tensor) -> Scores:
    """The sums of values [B, T] over the tokens of each answer."""
    both = of_sequences(inputs.micro_batch, torch.where(tokens, values, 0))
    counts = of_sequences(inputs.micro_batch, tokens)
    return Scores(*(x.unflatten(0, (-1, 2))[:, i] for x in (both, counts) for i in (0, 1)))


def of_chosen(inputs: Inputs) -> Tensor:
    """Bool [B, T]: what is learned of the chosen answers."""
    tokens = learned(inputs)
    return tokens & (sequence_of(inputs.micro_batch, tokens) % 2 == 0)


def rewards_of(chosen: Tensor, rejected: Tensor) -> Metrics:
    """What is logged of rewards [P]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }


# Direct preference optimisation, and losses of the same form: of log-ratios to a reference.


class DPO(Pairs):
    serves = SHARED | {"beta", "loss_type", "label_smoothing", "reference"}
    refers = True
    per_token: ClassVar[Mapping[str, torch.dtype]] = {reference.COLUMN: torch.float32}
    losses: ClassVar[Sequence[str]] = tuple(DPO_LOSSES)

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return DPO_LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}


class IPO(DPO):
    serves = SHARED | {"beta", "reference"}
    losses = ("ipo",)


class APO(DPO):
    serves = SHARED | {"beta", "loss_type", "reference"}
    losses = ("apo_zero", "apo_down")


# Contrastive preference optimisation and SimPO: pairs without a reference.
#
# B lines, T tokens of a line


class CPO(Pairs):
    """The preference loss, and `cpo_alpha` times the cross-entropy of the chosen answers."""

    serves = SHARED | {"beta", "loss_type", "label_smoothing", "cpo_alpha"}
    losses: ClassVar[Sequence[str]] = tuple(CPO_LOSSES)
    default_alpha: ClassVar[float] = 1.0

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.alpha = self.default_alpha if config.cpo_alpha is None else config.cpo_alpha

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        return super().sums(model, inputs) | {"chosen_tokens": of_chosen(inputs).sum()}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return CPO_LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}

    def likelihood(
        self, logprobs: Tensor, inputs: Inputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        if not self.alpha:
            return 0.0, {}
        nll = nll_of_chosen(logprobs, inputs, sums)
        return self.alpha * nll, {"nll_loss": nll.detach().double()}

    def shown(self, scores: Scores) -> Scores:
        return scores.means() if self.loss_type in ("ipo", "simpo") else scores


class SimPO(CPO):
    """Of means of log-probabilities, which are to be apart by a margin."""

    serves = SHARED | {"beta", "label_smoothing", "cpo_alpha", "simpo_gamma"}
    losses = ("simpo",)
    default_beta = 2.0
    default_alpha = 0.0

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        smoothing, gamma = self.config.label_smoothing, self.config.simpo_gamma
        return simpo(scores, self.beta, smoothing, gamma=gamma), {}


def nll_of_chosen(logprobs: Tensor, inputs: Inputs, sums: Mapping[str, Tensor]) -> Tensor:
    """This micro-batch's part of the mean over what is learned of all chosen answers."""
    return -(logprobs * of_chosen(inputs)).sum() / sums["chosen_tokens"].clamp(min=1)


# Odds ratio preference optimisation: fine-tuning on the chosen answer, and an odds ratio.


class ORPO(Pairs):
    """The cross-entropy is of the chosen answer and its prompt, as in TRL and the paper's code."""

    serves = SHARED | {"beta"}

    def targets(self, micro_batch: MicroBatch) -> dict[str, Any]:
        ids = micro_batch.input_ids
        sequence = sequence_of(micro_batch, ids)
        chosen = (sequence % 2 == 0) & ~is_padding(micro_batch, sequence)
        said = micro_batch.per_token["supervised"]
        return {"labels": ids.masked_fill(~(said | chosen), IGNORE_INDEX)}

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        return super().sums(model, inputs) | {"chosen_tokens": of_chosen(inputs).sum()}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        losses, log_odds = orpo(scores, self.beta)
        return losses, {"log_odds_chosen": log_odds, "log_odds_ratio": -losses / self.beta}

    def likelihood(
        self, logprobs: Tensor, inputs: Inputs, sums: Mapping[str, Tensor]
    ) -> tuple[Tensor | float, Metrics]:
        nll = nll_of_chosen(logprobs, inputs, sums)
        return nll, {"nll_loss": nll.detach().double()}

    def shown(self, scores: Scores) -> Scores:
        return scores.means()
