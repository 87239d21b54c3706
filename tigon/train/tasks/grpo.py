"""Policy gradients over answers in the data: GRPO, DAPO, Dr. GRPO, CISPO, GSPO.

# B lines, T tokens of a line, n sequences
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.data import Encoder, Mixture, RewardedEncoder
from tigon.data.examples import format_count
from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.distributed import World
from tigon.train.tasks.base import MicroBatchLoss, StepInputs
from tigon.train.tasks.logprobs import (
    COMMON_SETTINGS,
    AnswerTask,
    sequence_indices,
    sum_per_sequence,
)
from tigon.train.tasks.losses import Clip, cispo, divergence, policy_gradient

CLIP = ("epsilon", "epsilon_high", "delta")
ROUNDING = 1e-13  # of sums in float64, relative


class GRPO(AnswerTask):
    """Maximizes advantages times the ratio of each token's probability to that when it was sampled.

    Rows have log-probabilities of the sampling policy; without them it is the current model. With
    `beta`, the divergence from a reference is added. Weights of tokens are TRL's: dapo and cispo
    average over all tokens of a step, grpo over answers, dr_grpo divides by
    `max_completion_length`. Logged are "kl", the share of tokens whose ratio was clipped, and mean
    and standard deviation of the step's rewards.
    """

    one_prompt = True
    serves = COMMON_SETTINGS | {
        *("beta", "loss_type", "reference", "scale_rewards", "importance_sampling_level"),
        *("max_completion_length", *CLIP),
    }
    default_beta = 0.0
    losses: ClassVar[Sequence[str]] = ("dapo", "grpo", "dr_grpo", "cispo")
    per_token: ClassVar[Mapping[str, torch.dtype]] = {
        "old_logprobs": torch.float32,
        reference.COLUMN: torch.float32,
    }
    per_example: ClassVar[Mapping[str, torch.dtype]] = {
        "advantage": torch.float32,
        "reward": torch.float64,
    }

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.refers = self.beta > 0
        self.clip = Clip(config.epsilon, config.epsilon_high, config.delta)

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        scale, thinking = self.config.scale_rewards == "group", self.config.train_on_empty_thinking
        return RewardedEncoder(tokenizer, scale=scale, train_on_empty_thinking=thinking)

    def notes(self, data: Mixture, *, held_out: bool) -> list[str]:
        """Returns notes on data that GRPO would learn little from."""
        corpus = data.corpus
        rows = idle = 0
        for part in range(len(corpus.parts)):
            examples = corpus.open(part)
            if not len(examples):
                continue
            lines = np.asarray(examples.origin)
            first = np.append(0, 1 + np.flatnonzero((lines[1:] != lines[:-1]).any(1)))
            teaches = np.logical_or.reduceat(examples.per_example["advantage"] != 0, first)
            rows, idle = rows + len(first), idle + int((~teaches).sum())
        if not idle:
            return []
        have = "has" if idle == 1 else "have"
        return [
            f"{idle:,} of {format_count(rows, 'row')} {have} equal rewards or advantages of 0, "
            "which teach nothing"
        ]

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """Adds the number of "answers" to the base's sums."""
        answers = torch.full((), len(inputs.micro_batch.spans), device=model.device)
        return super().sums(model, inputs) | {"answers": answers}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns a micro-batch's part of the clipped policy-gradient loss, with beta times the
        divergence from the reference, and of the metrics."""
        known = self.reference_logprobs(model, inputs) if self.refers else None
        logprobs, output = self.forward(model, inputs)
        micro_batch, tokens = inputs.micro_batch, inputs.targets.mask
        sequence = sequence_indices(micro_batch, tokens)
        lengths = sum_per_sequence(micro_batch, tokens).clamp(min=1)

        def spread(values: Tensor) -> Tensor:
            """Returns [B, T] with the value of each position's sequence, from values [n]."""
            return F.pad(values, (0, 1))[sequence]

        old = F.pad(micro_batch.per_token["old_logprobs"][:, 1:], (0, 1))
        old = torch.where(old.isnan(), logprobs.detach(), old)
        ratios = torch.where(tokens, logprobs - old, 0)
        if self.config.importance_sampling_level == "sequence":
            ratios = spread(sum_per_sequence(micro_batch, ratios) / lengths)
        advantages = spread(micro_batch.per_example["advantage"])
        surrogate = cispo if self.loss_type == "cispo" else policy_gradient
        each, clipped = surrogate(logprobs, ratios, advantages, self.clip)
        count = sums["items"].clamp(min=1)
        metrics = {"clip_ratio/region_mean": (clipped & tokens).sum().double() / count}
        metrics["rewards"] = moments(micro_batch.per_example["reward"])
        if known is not None:
            kl = torch.where(tokens, divergence(logprobs, torch.where(tokens, known, 0)), 0)
            each = each + self.beta * kl
            metrics["kl"] = kl.detach().sum(dtype=torch.float64) / count
        loss = (torch.where(tokens, each, 0) * self._weights(spread(lengths), sums)).sum()
        return MicroBatchLoss(loss + self.balance(model, output, inputs, sums), metrics)

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replaces "rewards", the sums of `moments`, by TRL's "reward" and "reward_std": mean and
        standard deviation of all rewards of a step, NaN without rewards."""
        metrics = dict(metrics)
        count, total, squares = metrics.pop("rewards")
        mean = total / count
        spread = squares - total * mean
        spread = torch.where(spread <= ROUNDING * squares, 0, spread)  # of equal rewards
        return metrics | {"reward": mean, "reward_std": (spread / (count - 1)).sqrt()}

    def _weights(self, lengths: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
        """Returns the factors of the tokens' losses, [B, T] or a scalar: 1 / tokens of the step;
        with grpo 1 / (answers x length of the answer), with dr_grpo 1 / (answers x
        max_completion_length)."""
        answers = sums["answers"].clamp(min=1)
        if self.loss_type == "grpo":
            return 1 / (lengths.clamp(min=1) * answers)
        if self.loss_type == "dr_grpo":
            assert self.config.max_completion_length is not None
            return 1 / (answers * self.config.max_completion_length)
        return 1 / sums["items"].clamp(min=1)


def moments(rewards: Tensor) -> Tensor:
    """Returns float64 [3], the count, sum and sum of squares of rewards [n], without those that are
    NaN, as of rows with advantages."""
    exists = ~rewards.isnan()
    values = torch.where(exists, rewards, 0)
    return torch.stack([exists.sum(dtype=values.dtype), values.sum(), values.square().sum()])
