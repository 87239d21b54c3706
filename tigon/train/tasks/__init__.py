"""The tasks of training, by their names in the setting `task`."""

from tigon.train.tasks.base import MicroBatchLoss, StepInputs, Task
from tigon.train.tasks.distill import Distill
from tigon.train.tasks.grpo import GRPO
from tigon.train.tasks.kto import KTO
from tigon.train.tasks.language_modeling import SFT, CrossEntropyTask, Pretrain
from tigon.train.tasks.preference import APO, CPO, DPO, IPO, ORPO, SimPO
from tigon.train.tasks.reward import Reward
from tigon.utils.config import find_misspelled

TASKS: dict[str, type[Task]] = {
    **{"pretrain": Pretrain, "sft": SFT},
    **{"dpo": DPO, "ipo": IPO, "apo": APO, "cpo": CPO, "simpo": SimPO, "orpo": ORPO, "kto": KTO},
    **{"reward": Reward, "grpo": GRPO, "distill": Distill},
}

__all__ = [
    "TASKS", "CrossEntropyTask", "MicroBatchLoss", "StepInputs", "Task", "describe_tasks",
    "find_task",
]  # fmt: skip


def describe_tasks() -> str:
    """Returns a line for --help: the values of `task`, by the data they learn from."""
    kinds: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        kinds.setdefault(task.learns, []).append(name)
    return "; ".join(f"{', '.join(names)}: {learns}" for learns, names in kinds.items())


def find_task(task: str) -> type[Task]:
    """Returns the class of a task by its name; ValueError for an unknown one."""
    if task not in TASKS:
        meant = find_misspelled(task, TASKS)
        hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(TASKS)}"
        raise ValueError(f"no task is called task={task!r}; {hint}")
    return TASKS[task]
