"""Goes on where a step runs out of a GPU's memory, with a choice that takes less if one is open."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from tigon.models.decoder import recomputed_blocks
from tigon.train.build import TrainingRun
from tigon.train.choices import lessen
from tigon.train.cuda_graphs import Graphs
from tigon.train.distributed import InputError
from tigon.utils.memory import is_out_of_memory

T = TypeVar("T")


class StepMemoryError(InputError):
    """Says that a step does not fit, that nothing that takes less is open, and which settings would
    take less; `problem` is the text without advice."""

    def __init__(self, problem: str, run: TrainingRun) -> None:
        model, layers = run.model, len(run.model.model.layers)
        recomputed = len(recomputed_blocks(model.activation_checkpointing, layers)) == layers
        saving = {
            "a smaller micro_batch_size": run.config.micro_batch_size != 1,
            "a smaller seq_len": True,
            "activation_checkpointing=true": not recomputed,
            "activation_offload=true": recomputed and not model.activation_offload,
        }
        settings = ", ".join(text for text, is_open in saving.items() if is_open)
        super().__init__(
            f"{problem}: give {settings}, or what docs/memory.md lists; --dry-run estimates each"
        )
        self.problem = problem


def first_sentence(error: BaseException) -> str:
    """Returns what an error says before the sizes and advice of torch's allocator, or CUDA's."""
    return str(error).split("\n")[0].split(". ")[0]


def within_memory(run: TrainingRun, step: int, compute: Callable[[], T]) -> T:
    """Returns the result of `compute`, the passes of a step, which is repeated with less memory
    while it runs out of a GPU's memory, as a line says each time.

    Raises StepMemoryError where nothing that takes less is left open, on several ranks, as the
    others wait for this one, and with optimizer_in_backward, which may have changed weights.
    """
    while True:
        try:
            return compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            rank = f"rank {run.world.rank}: " if run.world.size > 1 else ""
            problem = f"{rank}step {step}: {first_sentence(error)}"
        # Beyond the error, whose frames hold the tensors of the passes
        if run.world.size > 1 or run.in_backward is not None:
            raise StepMemoryError(problem, run)
        use_less(run, problem)


def use_less(run: TrainingRun, problem: str) -> None:
    """Drops what a step computed and takes the next smaller choice, or raises StepMemoryError."""
    model, graphs = run.model, run.model.graphs
    run.optimizer.zero_grad()
    if model.zero2 is not None:
        model.zero2.drop_gradients()
    if isinstance(graphs, Graphs) and graphs.auto and graphs.captured:
        graphs.turn_off(problem)
    # Passes that failed have left FSDP2, or a graph that was asked for, amid a step
    elif (
        run.choice is not None
        and run.config.cuda_graphs is not True
        and not isinstance(model, FSDPModule)
        and (choice := lessen(run.choice, run.config, run.world.data.size)) is not None
    ):
        run.choice, run.config = choice, choice.resolve(run.config)
        for loader in filter(None, (run.data, run.eval_data)):
            loader.micro_batch_size = choice.rows
        choice.apply(model)
        run.world.log_rank0(f"{problem}: goes on with {choice.describe()}")
    else:
        raise StepMemoryError(problem, run)
    gc.collect()
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
