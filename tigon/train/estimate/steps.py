"""A few steps of a run, on random weights: how long one takes, and the memory at its peak."""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch.distributed.tensor import DTensor

from tigon.models import CausalLM, materialize
from tigon.train.build import Run
from tigon.train.config import Config
from tigon.train.flops import Cost
from tigon.train.loop import update
from tigon.train.model import compute_dtype, is_sharded, outline
from tigon.train.parallel import World, shard
from tigon.train.step import backward

STEPS = 4  # of which the first two prepare: kernels, the allocator, the optimizer's states


@dataclass(frozen=True)
class Measured:
    """Of one step; the same on every rank."""

    seconds: float
    tokens: float  # of all ranks, as are the operations
    flops: float
    peak: int  # bytes allocated on the GPU that holds most; 0 on the CPU


def random_model(config: Config, world: World, source: Path | None = None) -> CausalLM:
    """The model of a run as `build_model` makes it, with random weights: none are read."""
    dtype, compute = getattr(torch, config.param_dtype), compute_dtype(config, world.device)
    model = outline(config, dtype, source)
    if is_sharded(config, world.size, compute):
        shard(model, world, compute)
    materialize(model, world.device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02)
    return model


def measure(run: Run, steps: int = STEPS) -> Measured:
    """The last of `steps` steps; raises torch.OutOfMemoryError where the GPU is too small."""
    device, cost = run.world.device, Cost.of(run.model)
    first = run.start + run.state.offset  # a stream has no rows before
    run.objective.begin(run.model)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
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
            lengths, _ = run.data.lengths(step)
            tokens.append(int(lengths.sum()))
            flops.append(cost(lengths))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    half = slice(steps // 2, None)
    own = [float(peak), fmean(seconds[half])]
    most, slowest = run.world.top(torch.tensor(own, dtype=torch.double)).tolist()
    return Measured(slowest, fmean(tokens[half]), fmean(flops[half]), int(most))
