"""Chooses by memory what settings leave to `auto`: sharding, micro-batches and recomputed blocks.

A step is estimated for one choice after another, the fastest first, until one fits. More rows in a
micro-batch save launches and sums of gradients, and sharding=gradients casts or gathers weights
once a step; to recompute a block costs more than both, so it comes last. Only recomputation is
free of rounding, so a run that goes on prefers the rows and the sharding of its checkpoint.

# B rows of a micro-batch, T tokens of a row
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from tigon.models import CausalLM
from tigon.parallel import MeshSizes
from tigon.settings.config import MAX_TOKENS, Config, mesh_sizes
from tigon.train import checkpoint
from tigon.train.distributed import InputError, World
from tigon.train.memory import estimate, gpu_memory, held_by_others, memory_budget
from tigon.train.model import compute_dtype, is_sharded, meta_model, sum_dtype, weights_dtype
from tigon.train.tasks import Task
from tigon.utils.memory import format_gib

# Tokens of a micro-batch, beyond which more are hardly faster: to add up the gradients of 16,384 in
# bfloat16 moves bytes for about 1 % of a pass. Blocks of fewer than 2^25 parameters compute these
# in less time than Python needs to launch their kernels, and get as many more, up to a limit
USEFUL_TOKENS, MOST_TOKENS, USEFUL_WORK = 2**14, 2**16, 2**39  # the last in tokens x parameters
# Bytes that a pass moves for each parameter besides its kernels, about: FSDP2 casts or gathers
# weights twice and copies them, sharding=gradients only adds gradients up
MOVED = {"full": 34, "gradients": 10}
FEW_TOKENS = 2**12  # with fewer, GEMMs and launches lose more than recomputing blocks
BY_MEMORY = ("micro_batch_size", "sharding", "activation_checkpointing")
Sharding: TypeAlias = Literal["full", "gradients"]


class Way(NamedTuple):
    """One way to compute a step."""

    sharding: Sharding
    rows: int  # B


@dataclass(frozen=True)
class StepChoice:
    """Says how a step is computed where settings leave it open, and the memory it then takes."""

    auto: frozenset[str]  # the settings of BY_MEMORY that leave it open
    sharding: Sharding
    rows: int  # B
    blocks: int  # recomputed, those of `spaced_blocks`, if that was auto
    layers: int  # all blocks
    offload: bool
    total: int  # bytes of a GPU, estimated
    budget: int

    def resolve(self, config: Config) -> Config:
        """Returns the settings with the chosen rows and sharding."""
        return replace(config, micro_batch_size=self.rows, sharding=self.sharding)

    def apply(self, model: CausalLM) -> None:
        """Sets the model to recompute and offload as chosen."""
        if "activation_checkpointing" in self.auto:
            model.activation_checkpointing = spaced_blocks(self.blocks, self.layers)
            model.activation_offload = self.offload

    def describe(self) -> str:
        """Returns the chosen settings as a command line has them, recomputed blocks in words."""
        which = f"{self.blocks} of {self.layers} blocks"
        which = {0: "no block", self.layers: f"all {self.layers} blocks"}.get(self.blocks, which)
        offload = " and activation_offload" if self.offload else ""
        words = {
            "micro_batch_size": f"micro_batch_size={self.rows}",
            "sharding": f"sharding={self.sharding}",
            "activation_checkpointing": f"{which} recomputed{offload}",
        }
        return ", ".join(words[name] for name in BY_MEMORY if name in self.auto)

    def __str__(self) -> str:
        memory = f"{format_gib(self.total)} of {format_gib(self.budget)} GiB, estimated"
        return f"chosen: {self.describe()}; {memory}"


def spaced_blocks(count: int, layers: int) -> frozenset[int]:
    """Returns `count` of the indices below `layers`, evenly spaced, the last only if all are.

    All blocks cost the same time. Evenly spaced ones save most: a recomputed block keeps its input
    and the residual stream, and the block before it keeps the latter anyway unless it is recomputed
    too. The last block comes last: its recomputation runs beside all other activations.
    """
    return frozenset(i * layers // count for i in range(count))


def open_settings(config: Config) -> frozenset[str]:
    return frozenset(name for name in BY_MEMORY if getattr(config, name) == "auto")


def useful_rows(config: Config, sizes: MeshSizes, block: int, previous: int = 0) -> list[int]:
    """Returns the possible rows of a micro-batch, the most first, that are not beyond use for a
    model with `block` parameters in a block, or that a run has had; with optimizer_in_backward all
    rows of a rank."""
    if config.micro_batch_size != "auto":
        return [config.micro_batch_size]
    rows = max(1, config.batch_size // sizes.data)
    if config.optimizer_in_backward:
        return [rows]
    most = min(max(USEFUL_TOKENS, USEFUL_WORK // max(1, block)), MOST_TOKENS)
    tokens = -(-config.seq_len // sizes.context)
    divisors = (n for n in range(rows, 0, -1) if rows % n == 0)
    return [n for n in divisors if n in (1, previous) or n * tokens <= most]


def leanest_sharding(config: Config) -> Sharding:
    """Returns the sharding that takes least memory of those that the settings leave open."""
    return "full" if config.sharding == "auto" else config.sharding


def possible_shardings(config: Config, sizes: MeshSizes, compute: torch.dtype) -> list[Sharding]:
    """Returns the values of sharding that the other settings allow, the fastest first.

    Where nothing is sharded or cast, they are the same. Where sums of gradients would be in
    bfloat16 with sharding=gradients and in float32 without, only `full` is chosen. CUDA graphs need
    weights that FSDP2 does not gather.
    """
    if config.sharding != "auto":
        return [config.sharding]
    if not is_sharded(config, sizes.fsdp_ranks, compute) or sum_dtype(config) != torch.float32:
        return ["full"]
    try:
        replace(config, sharding="gradients")
    except ValueError:
        return ["full"]
    return ["gradients"] if config.cuda_graphs is True else ["gradients", "full"]


def order_ways(ways: Sequence[Way], previous: Way | None) -> list[Way]:
    """Sorts ways to compute a step: the run's own, those with its sharding, the fastest."""

    def order(way: Way) -> tuple[bool, bool, float]:
        differs = previous is not None and way.sharding != previous.sharding
        return way != previous, differs, MOVED[way.sharding] / way.rows

    return sorted(ways, key=order)


def choose_step(
    total: Callable[[Way, int, bool], int], ways: Sequence[Way], tokens: int, layers: int,
    budget: int, *, auto: frozenset[str], offload: bool, all_rows: int, previous: Way | None = None,
) -> StepChoice:  # fmt: skip
    """Returns the first way that fits without recomputed blocks, of those with FEW_TOKENS or more
    and the `previous` one of the run; else that of the leanest sharding, wherever it stands in
    `ways`, with the fewest recomputed blocks.

    `total(way, n, offload)` is the memory of a GPU that recomputes n blocks, `tokens` those of a
    row on a rank, `all_rows` those of a step on it. Raises ValueError if even all blocks with
    their inputs in host memory do not fit.
    """

    def choice(way: Way, blocks: int, size: int, offload: bool = offload) -> StepChoice:
        return StepChoice(auto, *way, blocks, layers, offload, size, budget)

    least = min(FEW_TOKENS, max(way.rows for way in ways) * tokens)
    large_ways = [way for way in ways if way == previous or way.rows * tokens >= least]
    small_ways = [way for way in ways if way not in large_ways]
    fixed = "activation_checkpointing" not in auto
    sizes: dict[Way, int] = {}
    for way in [*large_ways, *(small_ways if fixed else ())]:
        sizes[way] = total(way, 0, offload)
        if sizes[way] <= budget:
            return choice(way, 0, sizes[way])
    if fixed:  # is tried all the same
        way = min(sizes, key=lambda way: sizes[way])
        return choice(way, 0, sizes[way])
    lean = "full" if any(way.sharding == "full" for way in ways) else ways[0].sharding
    # Few rows have few activations, all rows at once no gradients to add up: both are tried
    for group in (large_ways, small_ways, [Way(lean, all_rows)]):
        lean_ways = [way for way in group if way.sharding == lean]
        found = [
            choice(way, *result)
            for way in dict.fromkeys((*lean_ways[:1], *lean_ways[-1:]))
            if (result := _fewest_blocks(partial(total, way), layers, budget, offload))
        ]
        if found:
            return min(found, key=lambda choice: (choice.offload, choice.blocks))
    raise ValueError(_explain(total, Way(lean, min(way.rows for way in ways)), layers, budget))


def _fewest_blocks(
    total: Callable[[int, bool], int], layers: int, budget: int, offload: bool
) -> tuple[int, int, bool] | None:
    """Returns the fewest recomputed blocks that fit, their memory, and whether activations are in
    host memory, which comes last; None if nothing fits."""
    high, size = layers, total(layers, offload)
    if size > budget and layers > 1:  # recomputing the last block may take more than saving it
        fewer = total(layers - 1, offload)
        if fewer < size:
            high, size = layers - 1, fewer
    if size > budget:
        offloaded = size if offload else total(layers, True)
        return (layers, offloaded, True) if offloaded <= budget else None
    low = 0  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if (tried := total(middle, offload)) <= budget:
            high, size = middle, tried
        else:
            low = middle
    return high, size, offload


def _explain(total: Callable[[Way, int, bool], int], way: Way, layers: int, budget: int) -> str:
    """Returns the error's text that says what a step takes, and what would take less."""
    options = (0, False), (layers, False), (layers, True)
    plain, recompute, offload = (format_gib(total(way, *option)) for option in options)
    fewer = "a smaller micro_batch_size or seq_len" if way.rows > 1 else "a smaller seq_len"
    return (
        f"activation_checkpointing=auto: a step with micro_batch_size={way.rows} takes "
        f"{plain} GiB of a GPU, {recompute} with every block recomputed and "
        f"{offload} with activation_offload too, and {format_gib(budget)} GiB are there: "
        f"give {fewer}, param_dtype=bfloat16, another optimizer, "
        "optimizer_offload=true, parallel.context, or more GPUs"
    )


def resolve_choices(
    config: Config, world: World, task: Task, source: Path | None, gpus: int, device: torch.device
) -> tuple[Config, StepChoice | None]:
    """Returns the settings for a run on that many GPUs like `device` with what is chosen in place
    of auto, and the choice; None if nothing is open or no memory is known, as on a CPU.

    Every rank calls this and gets the choice of the first one, for the GPU with the least memory.
    """
    auto = open_settings(config)
    if not auto:
        if config.memory_budget is not None:
            raise InputError(
                f"memory_budget={config.memory_budget:g} limits what is chosen by memory, and "
                f"{', '.join(BY_MEMORY)} are all set: set one of them to auto, or leave it out"
            )
        return config, None
    memories = [size for size in world.gather(gpu_memory(world.device)) if size is not None]
    if config.memory_budget is None and (held := held_by_others(world.device)):
        world.log_rank0(f"note: other processes hold {format_gib(held)} GiB of the GPU")
    if memories or config.memory_budget is not None:
        budget = memory_budget(config, min(memories, default=0))
        choice = world.share(lambda: _choose(config, task, source, gpus, device, budget))
        return choice.resolve(config), choice
    if device.type == "cuda":
        world.log_rank0(
            f"{', '.join(f'{name}=auto' for name in BY_MEMORY if name in auto)}: chosen by the "
            "memory of a GPU, and there is no GPU here: give memory_budget=, in GiB"
        )
    kept = _previous_way(source).rows
    possible = useful_rows(config, mesh_sizes(config, gpus), 0, kept)
    rows = kept if kept in possible else possible[-1]
    return replace(config, micro_batch_size=rows, sharding=leanest_sharding(config)), None


def _choose(
    config: Config, task: Task, source: Path | None, gpus: int, device: torch.device, budget: int
) -> StepChoice:
    """Returns the choice of the first rank."""
    compute, sizes = compute_dtype(config, device), mesh_sizes(config, gpus)
    auto = open_settings(config)

    build = partial(meta_model, config, weights_dtype(config, device), source)

    def total(way: Way, blocks: int, offload: bool) -> int:
        model = build()
        if "activation_checkpointing" in auto:
            model.activation_checkpointing = spaced_blocks(blocks, len(model.model.layers))
        model.activation_offload = offload
        tried = replace(config, micro_batch_size=way.rows, sharding=way.sharding)
        return estimate(model, task, tried, gpus, compute).total

    layers, previous = build().model.layers, _previous_way(source)
    block = sum(p.numel() for p in layers[0].parameters())
    rows = useful_rows(config, sizes, block, previous.rows)
    shardings = possible_shardings(config, sizes, compute)
    ways = [Way(sharding, n) for sharding in shardings for n in rows]
    ways = order_ways(ways, None if source is None else previous)
    tokens = -(-config.seq_len // sizes.context)
    all_rows = rows[0]
    if config.micro_batch_size == "auto" and config.batch_size * tokens <= MAX_TOKENS:
        all_rows = max(1, config.batch_size // sizes.data)
    return choose_step(
        total, ways, tokens, len(layers), budget,
        auto=auto, offload=config.activation_offload, all_rows=all_rows, previous=previous,
    )  # fmt: skip


def _previous_way(source: Path | None) -> Way:
    """Returns the way of the run that has saved a checkpoint; one of no rows without any."""
    known = checkpoint.read_metadata(source).get("config", {})
    return Way(known.get("sharding", "full"), known.get("micro_batch_size", 0))


def lessen(choice: StepChoice, config: Config, ranks: int) -> StepChoice | None:
    """Returns the next choice that takes less memory: half the rows, then more recomputed blocks,
    then activations in host memory; None if nothing of these is open."""
    rows = config.batch_size // ranks
    fewer = [n for n in range(1, choice.rows // 2 + 1) if rows % n == 0]
    if "micro_batch_size" in choice.auto and fewer and not config.optimizer_in_backward:
        return replace(choice, rows=fewer[-1])
    if "activation_checkpointing" not in choice.auto:
        return None
    if choice.blocks < choice.layers:
        more = max(2 * choice.blocks, -(-choice.layers // 4))
        return replace(choice, blocks=min(choice.layers, more))
    return None if choice.offload else replace(choice, offload=True)
