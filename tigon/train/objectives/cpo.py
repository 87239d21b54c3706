"""Contrastive preference optimisation and SimPO: pairs without a reference.

# B lines, T tokens of a line
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.train.objectives.answers import SHARED
from tigon.train.objectives.base import Inputs
from tigon.train.objectives.losses import CPO as LOSSES
from tigon.train.objectives.losses import Scores, simpo
from tigon.train.objectives.pairs import Metrics, Pairs, of_chosen


class CPO(Pairs):
    """The preference loss, and `cpo_alpha` times the cross-entropy of the chosen answers."""

    serves = SHARED | {"beta", "loss_type", "label_smoothing", "cpo_alpha"}
    losses: ClassVar[Sequence[str]] = tuple(LOSSES)
    default_alpha: ClassVar[float] = 1.0

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.alpha = self.default_alpha if config.cpo_alpha is None else config.cpo_alpha

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        return super().sums(model, inputs) | {"chosen_tokens": of_chosen(inputs).sum()}

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}

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
