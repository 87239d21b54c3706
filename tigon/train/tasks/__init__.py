"""What a run learns from, and how: one file each, under the name that `task` takes."""

from tigon.train.tasks.base import Inputs, Objective, Part
from tigon.train.tasks.distill import Distill
from tigon.train.tasks.grpo import GRPO
from tigon.train.tasks.kto import KTO
from tigon.train.tasks.language_modeling import SFT, CrossEntropyObjective, Pretrain
from tigon.train.tasks.preference import APO, CPO, DPO, IPO, ORPO, SimPO
from tigon.train.tasks.reward import Reward
from tigon.utils.config import find_misspelled

OBJECTIVES: dict[str, type[Objective]] = {
    **{"pretrain": Pretrain, "sft": SFT},
    **{"dpo": DPO, "ipo": IPO, "apo": APO, "cpo": CPO, "simpo": SimPO, "orpo": ORPO, "kto": KTO},
    **{"reward": Reward, "grpo": GRPO, "distill": Distill},
}

# What other trainers' names of tasks are here
OTHERS = {
    **dict.fromkeys(("lora", "sft_lora", "qlora"), "task=sft with lora.rank=16"),
    "dpo_lora": "task=dpo with lora.rank=16",
    **dict.fromkeys(("rm", "reward_model", "reward_modeling"), "task=reward"),
    **dict.fromkeys(("gkd", "kd", "knowledge_distillation"), "task=distill with teacher"),
    "bco": "none; task=kto learns from the same rows",
    "rloo": "none; task=grpo, with advantages in the rows",
}

__all__ = [
    "OBJECTIVES",
    "CrossEntropyObjective",
    "Inputs",
    "Objective",
    "Part",
    "find_objective",
    "tasks",
]


def tasks() -> str:
    """For a person: the values of `task`, by what they learn from."""
    kinds: dict[str, list[str]] = {}
    for name, objective in OBJECTIVES.items():
        kinds.setdefault(objective.learns, []).append(name)
    return "; ".join(f"{', '.join(names)}: {learns}" for learns, names in kinds.items())


def find_objective(task: str) -> type[Objective]:
    if task not in OBJECTIVES:
        if task in OTHERS:
            raise ValueError(f"no objective is called task={task!r}; here: {OTHERS[task]}")
        meant = find_misspelled(task, OBJECTIVES)
        hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(OBJECTIVES)}"
        raise ValueError(f"no objective is called task={task!r}; {hint}")
    return OBJECTIVES[task]
