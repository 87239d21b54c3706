"""Direct preference optimisation, and losses of the same form: of log-ratios to a reference."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tigon.train import reference
from tigon.train.objectives.answers import SHARED
from tigon.train.objectives.losses import DPO as LOSSES
from tigon.train.objectives.losses import Scores
from tigon.train.objectives.pairs import Metrics, Pairs


class DPO(Pairs):
    serves = SHARED | {"beta", "loss_type", "label_smoothing", "reference"}
    refers = True
    per_token: ClassVar[Mapping[str, torch.dtype]] = {reference.COLUMN: torch.float32}
    losses: ClassVar[Sequence[str]] = tuple(LOSSES)

    def compare(self, scores: Scores) -> tuple[Tensor, Metrics]:
        return LOSSES[self.loss_type](scores, self.beta, self.config.label_smoothing), {}


class IPO(DPO):
    serves = SHARED | {"beta", "reference"}
    losses = ("ipo",)


class APO(DPO):
    serves = SHARED | {"beta", "loss_type", "reference"}
    losses = ("apo_zero", "apo_down")
