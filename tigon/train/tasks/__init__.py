"""The tasks of training, by their names in the setting `task`."""

from tigon.train.tasks.base import MicroBatchLoss, StepInputs, Task
from tigon.train.tasks.distill import Distill
from tigon.train.tasks.grpo import GRPO
from tigon.train.tasks.kto import KTO
from tigon.train.tasks.language_modeling import SFT, CrossEntropyTask, Pretrain
from tigon.train.tasks.preference import APO, CPO, DPO, IPO, ORPO, SimPO
from tigon.train.tasks.reward import Reward

TASKS: dict[str, type[Task]] = {
    **{"pretrain": Pretrain, "sft": SFT},
    **{"dpo": DPO, "ipo": IPO, "apo": APO, "cpo": CPO, "simpo": SimPO, "orpo": ORPO, "kto": KTO},
    **{"reward": Reward, "grpo": GRPO, "distill": Distill},
}

__all__ = [
    "TASKS", "CrossEntropyTask", "MicroBatchLoss", "StepInputs", "Task",
]  # fmt: skip
