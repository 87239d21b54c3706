"""What a run learns from, and how: one file each, under the name that `task` takes."""

from tigon.train.objectives.base import Inputs, Objective, Part
from tigon.train.objectives.cross_entropy import CrossEntropyObjective
from tigon.train.objectives.pretrain import Pretrain
from tigon.train.objectives.sft import SFT

OBJECTIVES: dict[str, type[Objective]] = {"pretrain": Pretrain, "sft": SFT}

__all__ = ["OBJECTIVES", "CrossEntropyObjective", "Inputs", "Objective", "Part", "find_objective"]


def find_objective(task: str) -> type[Objective]:
    if task not in OBJECTIVES:
        raise ValueError(f"task={task!r} is not one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[task]
