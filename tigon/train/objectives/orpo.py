"""Odds ratio preference optimisation: fine-tuning on the chosen answer, and an odds ratio."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tigon.data import MicroBatch
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.models import CausalLM
from tigon.train.objectives.answers import SHARED, is_padding, sequence_of
from tigon.train.objectives.base import Inputs
from tigon.train.objectives.cpo import nll_of_chosen
from tigon.train.objectives.losses import Scores, orpo
from tigon.train.objectives.pairs import Metrics, Pairs, of_chosen


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
