"""The memory of a GPU in a layout: that of a run, as `tigon train --dry-run` estimates it."""

from dataclasses import replace

import torch

from tigon.train.distributed import World
from tigon.train.estimate import Estimate, estimate
from tigon.train.objectives import find_objective
from tigon.train.plan.layout import Job, Layout

ALONE = World(0, 1, torch.device("cpu"))


def weigh(job: Job, layout: Layout) -> Estimate:
    """Makes a step of one rank's part of the model, on the meta device."""
    config = replace(layout.config(job.config), seq_len=job.seq_len)
    model = job.shapes.build()
    model.activation_checkpointing = layout.checkpointing
    objective = find_objective(config.task)(config, ALONE)
    return estimate(model, objective, config, job.gpus, torch.bfloat16)
