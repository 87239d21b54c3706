"""`parallel: auto`: a run has the layout that the plan ranks first.

Not micro-batches, checkpointing and sharding, which are as the settings say.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tigon.parallel import Meshes
from tigon.train import checkpoint
from tigon.train.config import Config, Parallel, mesh_sizes
from tigon.train.estimate.budget import budget_of, gib, memory_of
from tigon.train.model import outline
from tigon.train.parallel import World
from tigon.train.plan.gpu import gpu_called
from tigon.train.plan.layout import MESH, Job, Layout, as_set, meshes
from tigon.train.plan.report import check, why_not
from tigon.train.plan.search import Plan, make_plan
from tigon.train.plan.work import Shapes
from tigon.utils.config import build_settings, read_settings


@dataclass(frozen=True)
class Room:
    """What all GPUs of a run have at least."""

    memory: int  # bytes
    host: int  # ranks of a host


def settle(config: Config, world: World, gpus: int | None = None) -> tuple[Config, World]:
    """With the layout in place of parallel=auto; other settings stay as they are.

    Every rank calls this, and gets what the first one finds. `gpus`: those that a run is planned
    for, if not the world's. ValueError where nothing can be planned, or nothing fits.
    """
    if config.parallel != "auto":
        return config, world
    gpus = world.size if gpus is None else gpus
    here = memory_of(world.device) or 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", gpus)) if gpus == world.size else gpus
    room = Room(-world.most(-here), -world.most(-local))
    parallel = Parallel(fsdp=1)
    with world.together():
        if gpus > 1 and world.main:
            parallel, why = choose(config, world.device, gpus, room)
            world.say(f"parallel=auto: {why}")
    parallel = Parallel(**{name: world.most(getattr(parallel, name) or 1) for name in MESH})
    config = replace(config, parallel=parallel)
    if gpus == world.size:
        world = replace(world, meshes=Meshes.of(world.device.type, mesh_sizes(config, gpus)))
    return config, world


def choose(config: Config, device: torch.device, gpus: int, room: Room) -> tuple[Parallel, str]:
    """The layout for so many GPUs of the kind `device`, and what speaks for it. A run that goes on
    with as many keeps the one that it had, if it still can."""
    instead = "set the dimensions (docs/parallel.md), or leave parallel out, which is fsdp alone"
    if device.type != "cuda":
        model = config.model or config.init
        raise ValueError(
            f"parallel=auto chooses a layout for GPUs, and there is none here: {instead}; "
            f"`tigon plan {model} --gpus {gpus} --gpu NAME --seq-len {config.seq_len}` plans for "
            "GPUs elsewhere"
        )
    try:
        check(config)
        gpu, constants = gpu_called(torch.cuda.get_device_name(device))
    except ValueError as error:
        raise ValueError(f"parallel=auto: {error}: {instead}") from None
    gpu = replace(gpu, memory=room.memory, host=min(gpu.host, room.host))
    source, had = recorded(config, gpus)
    shapes = outlined(config, source)
    job = Job(shapes, config, gpus, gpu, constants, config.seq_len, config.batch_size)
    how: dict[str, Any] = {"most": 2, "ways": as_set, "budget": budget_of(config, room.memory)}
    if had is not None and (kept := make_plan(job, of=had, **how)).choices:
        return kept.choices[0].layout.parallel, f"{told(kept)}, as in {source}"
    # As it is set, so that what is refused for it is told
    found = (replace(m, sharding=config.sharding) for m in meshes(gpus, shapes.experts))
    plan = make_plan(job, of=found, **how)
    if not plan.choices:
        raise ValueError("\n  ".join(why_none(plan)))
    others = [f"{c.layout.shown}, {c.step.seconds:.3g} s" for c in plan.choices[1:]]
    return plan.choices[0].layout.parallel, "; next ".join([told(plan), *others])


def recorded(config: Config, gpus: int) -> tuple[Path | None, list[Layout] | None]:
    """The checkpoint that the run goes on from, and its layout if that is of so many GPUs."""
    source = None
    with suppress(ValueError, OSError, LookupError):  # what is wrong with it is told later
        if config.resume in (True, "auto"):
            source = checkpoint.latest(Path(config.run_dir) / "checkpoints")
        elif config.resume:
            source = Path(str(config.resume))
        if source is not None:
            was = checkpoint.facts(source)["config"]["parallel"]
            sizes = build_settings(Parallel, read_settings(Parallel, was or {})).sizes(gpus)
            if was is not None:
                return source, [Layout(**asdict(sizes))]
    return source, None


def outlined(config: Config, source: Path | None) -> Shapes:
    """Of the model that the run begins with, or goes on with."""
    config = replace(config, activation_checkpointing=False, memory_budget=None, parallel=None)
    dtype = getattr(torch, config.param_dtype)
    with suppress(ValueError, OSError):  # likewise
        return Shapes(outline(config, dtype, source).config, dtype)
    return Shapes(outline(config, dtype).config, dtype)


def why_none(plan: Plan) -> list[str]:
    """For an error."""
    config = plan.job.config
    return [
        f"parallel=auto: no layout of {plan.job.gpus} GPUs can have "
        f"batch_size={config.batch_size}, micro_batch_size={config.micro_batch_size}, "
        f"seq_len={config.seq_len} and the other settings:",
        *(line.strip() for line in why_not(plan)[1:]),
    ]


def told(plan: Plan) -> str:
    """Of the first."""
    best = plan.choices[0]
    return (
        f"{best.layout.shown}: {best.step.seconds:.3g} s a step and {gib(best.memory.total)} of "
        f"{gib(plan.budget)} GiB, on paper"
    )
