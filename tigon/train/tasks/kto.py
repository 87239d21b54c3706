"""Kahneman-Tversky optimization: single answers that are labeled as desired or not.

# n sequences
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tigon.data import Encoder, LabelledEncoder, MicroBatch, Mixture
from tigon.models import CausalLM, CausalLMOutput
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.tasks.base import MicroBatchLoss, StepInputs
from tigon.train.tasks.logprobs import COMMON_SETTINGS, AnswerTask, answer_mask, sum_per_sequence
from tigon.train.tasks.losses import kto


@dataclass(frozen=True)
class KTOInputs(StepInputs):
    """Holds the answers of a micro-batch, and their prompts with mismatched answers."""

    mismatched: StepInputs = field(kw_only=True)


class KTO(AnswerTask):
    """Compares each answer with the divergence from the reference, estimated over the whole step.

    The estimate is the mean log-ratio of mismatched answers, which are those of other prompts. TRL
    takes the mean over a device's micro-batch; here it does not depend on the numbers of
    micro-batches and ranks. Mismatched answers have a separate pass without gradients.
    """

    serves = COMMON_SETTINGS | {"beta", "desirable_weight", "undesirable_weight", "reference"}
    refers = True
    group = 2
    per_token: ClassVar[Mapping[str, torch.dtype]] = {reference.COLUMN: torch.float32}
    per_example: ClassVar[Mapping[str, torch.dtype]] = {
        "desired": torch.bool,
        "matched": torch.bool,
    }

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        thinking = self.config.train_on_empty_thinking
        return LabelledEncoder(tokenizer, train_on_empty_thinking=thinking)

    def notes(self, data: Mixture, *, held_out: bool) -> list[str]:
        """Returns a note if desired and other answers of the training data are not balanced."""
        if held_out:
            return []
        passes, desired, answers = data.passes(), 0.0, 0.0
        for part, entry in enumerate(data.entry_of_part):
            columns = data.corpus.open(part).per_example
            if "matched" in columns:  # it has rows
                matched = np.asarray(columns["matched"])
                answers += passes[entry] * matched.sum()
                desired += passes[entry] * columns["desired"][matched].sum()
        return balance_note(desired, answers - desired, self.config)

    def resolve(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool = True
    ) -> StepInputs:
        """Returns the inputs of the matched sequences, with those of the mismatched ones in
        `mismatched`; in an estimate both are the whole micro-batch."""
        if not micro_batch.sources:  # an estimate, or padding alone
            whole = super().resolve(model, micro_batch, training=training)
            return KTOInputs(**vars(whole), mismatched=whole)
        matched = micro_batch.host_column("matched")
        own, other = (
            super(KTO, self).resolve(model, micro_batch.select(keep), training=training)
            for keep in (matched, ~matched)
        )
        return KTOInputs(**vars(own), mismatched=other)

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """Adds the numbers of "answers", of "desired" and of "mismatched" ones, and "divergence",
        the sum of the log-ratios of the latter, by a pass without gradients."""
        assert isinstance(inputs, KTOInputs)
        desired = inputs.micro_batch.per_example["desired"]
        count = torch.full((), len(inputs.mismatched.micro_batch.spans), device=model.device)
        with torch.no_grad():
            _, ratios, _ = self._ratios(model, inputs.mismatched)
        return super().sums(model, inputs) | {
            "answers": torch.full((), len(desired), device=model.device),
            "desired": desired.sum(),
            "mismatched": count,
            "divergence": ratios.double().sum(),
        }

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns a micro-batch's part of the mean loss of answers, with rewards and
        log-probabilities of desired ("chosen") and other ones and the estimate "kl" as metrics."""
        logprobs, ratios, output = self._ratios(model, inputs)
        desired = inputs.micro_batch.per_example["desired"]
        kl = (sums["divergence"] / sums["mismatched"].clamp(min=1)).clamp(min=0).float()
        config = self.config
        losses = kto(
            ratios,
            desired,
            kl,
            beta=self.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        loss = losses.sum() / sums["answers"].clamp(min=1)
        loss = loss + self.balance(model, output, inputs, sums)
        metrics = {}
        for name, which, count in (
            ("chosen", desired, sums["desired"]),
            ("rejected", ~desired, sums["answers"] - sums["desired"]),
        ):
            for kind, values in (("rewards", self.beta * ratios), ("logps", logprobs)):
                chosen = torch.where(which, values.detach().double(), 0)
                # NaN where the step has no such answer: 0 would be a mean
                metrics[f"{kind}/{name}"] = chosen.sum() / count
        share = len(desired) / sums["answers"].clamp(min=1)
        return MicroBatchLoss(loss, metrics | {"kl": kl.double() * share})

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds rewards/margins: the mean reward of desired answers less that of the others."""
        return metrics | {
            "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]
        }

    def _ratios(self, model: CausalLM, inputs: StepInputs) -> tuple[Tensor, Tensor, CausalLMOutput]:
        """Returns log-probabilities and log-ratios, fp32 [n], and the model's output."""
        known = self.reference_logprobs(model, inputs)
        logprobs, output = self.forward(model, inputs)
        tokens = answer_mask(inputs)
        known = sum_per_sequence(inputs.micro_batch, torch.where(tokens, known, 0))
        logprobs = sum_per_sequence(inputs.micro_batch, torch.where(tokens, logprobs, 0))
        return logprobs, logprobs - known, output


def balance_note(desired: float, others: float, config: Config) -> list[str]:
    """Returns a note if all answers are of one kind, or if the weights do not balance both kinds.

    By equation 8 of arXiv 2402.01306, all desired answers should weigh 1 to 4/3 times as much as
    all others. TRL warns by the same rule, also rounded.
    """
    if not desired or not others:
        return [
            f"all answers are {'desired' if desired else 'not desired'}, by their label, and kto "
            "learns from the difference to the other kind: add such answers"
        ]
    weights = config.desirable_weight, config.undesirable_weight
    if not all(weights):
        return []
    balance = desired * weights[0] / (others * weights[1])
    if 1 <= round(balance, 2) <= 1.33:
        return []
    if balance < 1:
        name, least, most = "desirable_weight", weights[0] / balance, weights[0] / balance * 4 / 3
    else:
        name, least, most = "undesirable_weight", weights[1] * balance * 3 / 4, weights[1] * balance
    return [
        f"{desired:,.0f} answers are desired, {others:,.0f} are not; with their weights, the "
        f"former count {balance:.2f} times as much as the latter, and arXiv 2402.01306 advises 1 "
        f"to 1.33 times: {name} from {least:.3g} to {most:.3g}"
    ]
