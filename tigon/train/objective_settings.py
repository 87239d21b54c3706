"""The settings of objectives that compare answers, reward them or learn from a teacher.

They have the names that TRL has for them; those of one objective are an error with another.
"""

from dataclasses import dataclass
from typing import Literal

from tigon.train.settings import option

LossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
    "apo_zero",
    "apo_down",
    "dapo",
    "grpo",
    "dr_grpo",
    "cispo",
]

LARGEST = 3.4e38  # that float32 holds, in which losses are computed


@dataclass(frozen=True)
class ObjectiveSettings:
    """Preferences, rewards and distillation."""

    loss_type: LossType | None = option(  # noqa: RUF009
        None,
        "of dpo: sigmoid, hinge, ipo, robust, sigmoid_norm, apo_zero, apo_down; of apo: apo_zero, "
        "apo_down; of cpo: sigmoid, hinge, ipo; of grpo: dapo, grpo, dr_grpo, cispo; null: the "
        "first",
    )
    beta: float | None = option(
        None,
        "how much a model keeps to its reference, or its log-probabilities count; null: 0.1, 2 of "
        "simpo, 0 of grpo; of distill 0: forward KL, 1: reverse KL, between: Jensen-Shannon; "
        "null: 0",
        least=0,
        most=LARGEST,
    )
    max_length: int | None = option(
        None,
        "the most tokens of a prompt with one answer; null: seq_len. Packed pairs also have to fit "
        "into a row: docs/preference.md",
        least=2,
        stream=True,
    )
    reference: str = option(
        "",
        "the model to keep to, a directory or a hub repository; empty: the one that is trained, as "
        "it was at the beginning, or without its adapters",
    )
    simpo_gamma: float = option(
        0.5, "the margin of rewards that simpo asks for", least=0, most=LARGEST
    )
    cpo_alpha: float | None = option(
        None,
        "weight of the chosen answers' cross-entropy; null: 1 of cpo, 0 of simpo",
        least=0,
        most=LARGEST,
    )
    desirable_weight: float = option(1.0, "of the desired answers of kto", least=0, most=LARGEST)
    undesirable_weight: float = option(1.0, "of the others", least=0, most=LARGEST)
    center_rewards_coefficient: float = option(
        0.0, "weight of what keeps the rewards of a pair about 0", least=0, most=LARGEST
    )
    epsilon: float = option(0.2, "how far grpo's ratio of policies counts, below 1", least=0)
    epsilon_high: float | None = option(None, "and above 1; null: the same", least=0)
    delta: float | None = option(None, "the most of grpo's unclipped ratio; null: any", least=0)
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "what grpo's ratio of policies is of; sequence: GSPO"
    )
    scale_rewards: Literal["group", "none"] = option(
        "group", "whether advantages are divided by the deviation of their prompt", stream=True
    )
    max_completion_length: int | None = option(
        None, "tokens of an answer that dr_grpo divides by", least=1
    )
    teacher: str = option(
        "",
        "the model that distill learns from: a directory or a repository; empty: the rows have "
        "its distributions",
    )
    temperature: float = option(  # its square is a factor of the loss
        1.0, "by which distill divides the logits of both", least=0, most=LARGEST**0.5
    )
    cross_entropy_weight: float = option(
        0.0, "share of the labels' cross-entropy in distill, from 0 to 1", least=0
    )
