"""`parallel=auto`: the run takes the layout that the plan ranks first.

Micro-batches, checkpointing and sharding stay those of the settings; what these leave to auto is
chosen afterwards, by `choices`.
"""

import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tigon.parallel import Meshes
from tigon.plan.cost import Job, Shapes
from tigon.plan.gpu import find_gpu
from tigon.plan.layout import Layout, enumerate_meshes
from tigon.plan.report import format_reasons
from tigon.plan.search import LayoutPlan, configured_layouts, make_plan
from tigon.settings.config import Config, Parallel, mesh_sizes
from tigon.settings.plan import check_modeled
from tigon.train import checkpoint
from tigon.train.choices import leanest_sharding
from tigon.train.distributed import World
from tigon.train.memory import gpu_memory
from tigon.train.model import meta_model
from tigon.utils.config import build_settings, read_settings
from tigon.utils.memory import format_gib


def resolve_layout(config: Config, world: World, gpus: int) -> tuple[Config, World]:
    """Returns the config and the world with the layout in place of parallel=auto.

    Every rank calls this and gets the choice of the first one. `gpus` is the number that the run is
    planned for. Raises ValueError if nothing can be planned or nothing fits.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", gpus)) if gpus == world.size else gpus
    ranks = world.gather((gpu_memory(world.device) or 0, local))
    memory, host = (min(values) for values in zip(*ranks, strict=True))
    parallel = Parallel(fsdp=1)
    if gpus > 1:
        parallel, why = world.share(lambda: choose_layout(config, world.device, gpus, memory, host))
        world.log_rank0(f"parallel=auto: {why}")
    config = replace(config, parallel=parallel)
    if gpus == world.size:
        world = replace(world, meshes=Meshes.of(world.device.type, mesh_sizes(config, gpus)))
    return config, world


def choose_layout(
    config: Config, device: torch.device, gpus: int, memory: int, host: int
) -> tuple[Parallel, str]:
    """Returns the layout for that many GPUs like `device`, a resumed run's if it fits, and why.
    `memory` is the least of a GPU in bytes, `host` the fewest ranks of a host."""
    instead = "set the dimensions (docs/parallel.md), or leave parallel out, which is fsdp alone"
    if device.type != "cuda":
        raise ValueError(
            f"parallel=auto chooses a layout for GPUs, and there is none here: {instead}; "
            f"`tigon plan {config.model or config.init} --gpus {gpus} --gpu NAME --seq-len "
            f"{config.seq_len}` plans for GPUs elsewhere"
        )
    try:
        check_modeled(config)
        gpu, constants = find_gpu(torch_name=torch.cuda.get_device_name(device))
    except ValueError as error:
        raise ValueError(f"parallel=auto: {error}: {instead}") from None
    gpu = replace(gpu, memory=memory, host=min(gpu.host, host))
    source, layouts = checkpoint_layout(config, gpus)
    shapes = model_shapes(config, source)
    job = Job(shapes, config, gpus, gpu, constants, config.seq_len, config.batch_size)

    def plan(meshes: list[Layout]) -> LayoutPlan:
        return make_plan(job, 2, variants=configured_layouts, meshes=meshes)

    if layouts and (kept := plan(layouts)).choices:
        return kept.choices[0].layout.parallel, f"{describe_best(kept)}, as in {source}"
    # With the sharding of the settings, so that errors name what it excludes
    meshes = enumerate_meshes(gpus, shapes.experts)
    found = plan([replace(mesh, sharding=leanest_sharding(config)) for mesh in meshes])
    if not found.choices:
        lines = [
            f"parallel=auto: no layout of {gpus} GPUs can have batch_size={config.batch_size}, "
            f"micro_batch_size={config.micro_batch_size}, seq_len={config.seq_len} and the other "
            "settings:"
        ]
        raise ValueError("\n  ".join(lines + [line.strip() for line in format_reasons(found)[1:]]))
    others = [f"{c.layout.description}, {c.step.seconds:.3g} s" for c in found.choices[1:]]
    return found.choices[0].layout.parallel, "; next ".join([describe_best(found), *others])


def checkpoint_layout(config: Config, gpus: int) -> tuple[Path | None, list[Layout]]:
    """Returns the checkpoint to resume from, None without, and its layout in a list, which is empty
    if that is not one of `gpus` GPUs or cannot be read."""
    source = None
    with suppress(ValueError, OSError, LookupError):  # resuming reports what is wrong with it
        if config.resume in (True, "auto"):
            source = checkpoint.latest(Path(config.run_dir) / "checkpoints")
        elif config.resume:
            source = Path(str(config.resume))
        values = checkpoint.read_metadata(source)["config"]["parallel"]
        if values is not None:
            sizes = build_settings(Parallel, read_settings(Parallel, values)).sizes(gpus)
            return source, [Layout(**asdict(sizes))]
    return source, []


def model_shapes(config: Config, source: Path | None) -> Shapes:
    """Returns the shapes of the model that the run starts with, or of its checkpoint `source`."""
    dtype = getattr(torch, config.param_dtype)
    with suppress(ValueError, OSError):  # likewise
        return Shapes(meta_model(config, dtype, source).config, dtype)
    return Shapes(meta_model(config, dtype).config, dtype)


def describe_best(plan: LayoutPlan) -> str:
    """Returns a text on the fastest layout that fits, with its estimated time and memory."""
    best = plan.choices[0]
    return (
        f"{best.layout.description}: {best.step.seconds:.3g} s a step and "
        f"{format_gib(best.memory.total)} of {format_gib(plan.budget)} GiB, on paper"
    )
