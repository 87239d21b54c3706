"""`activation_checkpointing: auto`: as few blocks are computed again as the memory allows.

Blocks of a stack cost the same time, so their number is what there is to choose. Evenly spread they
save most: of two tensors that a recomputed block keeps, its input and the residual stream, the
latter is the one that a block before it keeps anyway, unless that is recomputed too. The last block
is the last to be taken: at its recomputation all others' activations are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.train.estimate.memory import estimate
from tigon.train.model import compute_dtype, held_dtype, outline
from tigon.train.objectives import Objective

GIB = 2**30
# Of a GPU's memory, what is not for tensors: CUDA's context and NCCL's buffers, and a share for
# pieces that the allocator cannot use and for what the estimate is wrong by
CONTEXT, SHARE = 2 * GIB, 0.04


@dataclass(frozen=True)
class Choice:
    """What is computed again, and what that takes."""

    blocks: int  # as `spread` has them
    of: int  # all of the model's
    offload: bool
    total: int  # bytes of a GPU, estimated
    budget: int

    def apply(self, model: CausalLM) -> None:
        model.activation_checkpointing = spread(self.blocks, self.of)
        model.activation_offload = self.offload

    def __str__(self) -> str:
        which = f"{self.blocks} of {self.of} blocks"
        which = {0: "no block", self.of: f"all {self.of} blocks"}.get(self.blocks, which)
        away = ", with activation_offload" if self.offload else ""
        return (
            f"activation_checkpointing=auto: {which} computed again{away}; "
            f"{gib(self.total)} of {gib(self.budget)} GiB, estimated"
        )


def gib(size: int) -> str:
    """Bytes in GiB, in digits enough for tiny models."""
    return f"{size / GIB:.2f}" if size >= GIB else f"{size / GIB:.3g}"


def spread(count: int, of: int) -> frozenset[int]:
    """So many of the indices below `of`, evenly, the last of them only if all are."""
    return frozenset(i * of // count for i in range(count))


def budget_of(config: Config, room: int | None) -> int:
    """Bytes of tensors that a GPU may hold; `room`: what it has in all, None if nobody knows."""
    if config.memory_budget is not None:
        return int(config.memory_budget * GIB)
    if room is None:
        raise ValueError(
            "activation_checkpointing=auto needs the memory of a GPU, and there is no GPU here: "
            "give memory_budget=, in GiB"
        )
    return int(room * (1 - SHARE)) - CONTEXT


def choose(weigh: Callable[[int, bool], int], blocks: int, budget: int, *, offload: bool) -> Choice:
    """The fewest blocks whose recomputation fits; else all, with activations in host memory.

    `weigh(n, offload)`: bytes of a GPU with n blocks recomputed. ValueError with the figures if
    nothing fits.
    """
    none = weigh(0, offload)
    if none <= budget:
        return Choice(0, blocks, offload, none, budget)
    most, every = blocks, weigh(blocks, offload)
    if every > budget and blocks > 1:  # a recomputed last block may need more than a kept one
        most, every = min((blocks, every), (blocks - 1, weigh(blocks - 1, offload)), key=_bytes)
    if every > budget:
        away = every if offload else weigh(blocks, True)
        if away <= budget:
            return Choice(blocks, blocks, True, away, budget)
        raise ValueError(
            f"activation_checkpointing=auto: a step takes {gib(none)} GiB of a GPU, "
            f"{gib(every)} with every block computed again and {gib(away)} with "
            f"activation_offload too, and {gib(budget)} GiB are there: give a smaller "
            "micro_batch_size or seq_len, param_dtype=bfloat16, another optimizer, "
            "optimizer_offload=true, parallel.context, or more GPUs"
        )
    too_few, enough, total = 0, most, every
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        size = weigh(middle, offload)
        if size <= budget:
            enough, total = middle, size
        else:
            too_few = middle
    return Choice(enough, blocks, offload, total, budget)


def _bytes(tried: tuple[int, int]) -> int:
    return tried[1]


def decide(
    config: Config,
    world: World,
    objective: Objective,
    source: Path | None,
    gpus: int,
    device: torch.device,
) -> Choice | None:
    """For a run on so many GPUs of the kind `device`; None: the settings say it themselves.

    Every rank calls this, and gets what the first one finds for the GPU with the least memory.
    """
    if config.activation_checkpointing != "auto":
        return None
    compute = compute_dtype(config, device)

    def model() -> CausalLM:
        return outline(config, held_dtype(config, device), source)

    def weigh(blocks: int, offload: bool) -> int:
        tried = model()
        tried.activation_checkpointing = spread(blocks, len(tried.model.layers))
        tried.activation_offload = offload
        return estimate(tried, objective, config, gpus, compute).total

    room = memory_of(world.device)
    least = None if room is None else -world.all_reduce_max_int(-room)
    answer = [-1, -1, -1]
    with world.raise_on_all_ranks():
        budget = budget_of(config, least)
        of = len(model().model.layers)
        if world.main:
            made = choose(weigh, of, budget, offload=config.activation_offload)
            answer = [made.blocks, int(made.offload), made.total]
    blocks, offload, total = (world.all_reduce_max_int(number) for number in answer)
    return Choice(blocks, of, bool(offload), total, budget)


def memory_of(device: torch.device) -> int | None:
    """Bytes that a GPU has; None of a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory
