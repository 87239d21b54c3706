"""A few steps of a run, on random weights: how long one takes, and the memory at its peak."""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from tigon.layers import QuantisedWeight
from tigon.models import CausalLM, materialize
from tigon.train.build import Run
from tigon.train.config import Config
from tigon.train.distributed import World, local
from tigon.train.loop import update
from tigon.train.model import divide, held_dtype, outline
from tigon.train.step import backward
from tigon.train.throughput import Cost

STEPS = 4  # of which the first two prepare: kernels, the allocator, the optimizer's states


@dataclass(frozen=True)
class Measured:
    """Of one step; the same on every rank."""

    seconds: float
    tokens: float  # of all ranks
    flops: float  # likewise
    peak: int  # bytes allocated on the GPU that holds most; 0 on the CPU


def random_model(config: Config, world: World, source: Path | None = None) -> CausalLM:
    """The model of a run as `build_model` makes it, with random weights: none are read."""
    model = outline(config, held_dtype(config, world.device), source)
    divide(model, config, world)
    materialize(model, world.device)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.02)
        for module in model.modules():
            if isinstance(module, QuantisedWeight):
                module.fill()
    return model


def measure(run: Run, steps: int = STEPS) -> Measured:
    """The last of `steps` steps; raises torch.OutOfMemoryError where the GPU is too small."""
    device, first = run.world.device, run.start + run.state.offset  # a stream has no rows before
    run.objective.rehearse(run.model)
    run.objective.begin(run.model)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cost = Cost.from_model(run.model)
    seconds, tokens, flops = [], [], []
    with run.feed:
        for step in range(first, first + steps):
            began = time.perf_counter()
            backward(run, step)
            update(run, step)
            run.optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
            lengths, before, _ = run.data.lengths(step)
            tokens.append(int(lengths.sum()))
            flops.append(
                cost(lengths, before) * run.world.sizes.tensor
            )  # of which a rank has a share
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    half = slice(steps // 2, None)
    time_of_one = fmean(seconds[half])
    highest = run.world.all_reduce_max(torch.tensor([float(peak), time_of_one], dtype=torch.double))
    return Measured(
        seconds=float(highest[1]),
        tokens=fmean(tokens[half]),
        flops=fmean(flops[half]),
        peak=int(highest[0]),
    )
