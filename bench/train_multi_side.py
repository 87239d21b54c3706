"""A rank of a side of bench/train_multi.py: OUT SIDE ATTENTION setting=value ...

Rank 0 writes what it finds to OUT. Both sides read the same rows by the trainer's loader, and have
the same weights, drawn by name.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.compare_side import laps
from bench.harness import Record, installed
from bench.train_cases import Case, Options, adamw, draw, peer_model
from tigon.kernels import _attention_backends as backends
from tigon.train import load, start
from tigon.train.build import make_run, read_inputs
from tigon.train.config import Config
from tigon.train.estimate.steps import random_model
from tigon.train.loop import update
from tigon.train.optim import build_ema, build_optimizer
from tigon.train.parallel import World, local
from tigon.train.step import backward

TIGON, PEER = "tigon", "peer"
FIRST = 3  # steps that are not timed
CASE = Case("Llama-3.1-8B", 1, 8192, 1.09)


@torch.no_grad()
def fill(model: Any, world: World) -> None:
    """Each parameter's own rows of what its names draw; norms change nothing."""
    layout = model.layout()
    for name, parameter in model.named_parameters():
        own = local(parameter)
        if parameter.dim() == 1:
            own.fill_(1.0)
            continue
        parts = [draw(part.name, part.shape, own.device) for part in layout[name]]
        whole = torch.cat(parts)
        if isinstance(parameter, DTensor):  # by rows, as torch.chunk divides them
            rows = -(-len(whole) // world.size)
            whole = whole[rows * world.rank : rows * (world.rank + 1)]
        own.copy_(whole)


def tigon(config: Config, world: World, count: int) -> Record:
    """The trainer's steps: forward, backward, the norm of all gradients, update."""
    inputs = read_inputs(config, world)
    model = random_model(config, world)
    fill(model, world)
    run = make_run(
        config, world, inputs, model, build_optimizer(model, config), build_ema(model, config)
    )
    run.objective.begin(model)
    done, losses = iter(range(run.steps)), []

    def step() -> None:
        number = next(done)
        losses.append(backward(run, number)["loss"])
        update(run, number)
        run.optimizer.zero_grad()

    with run.feed:
        found = timed(step, world, count)
    return found | {"losses": losses[:FIRST], "attention": sorted({s[0] for s in backends._said})}


def peer(config: Config, world: World, count: int, reshard: bool, attention: str) -> Record:
    """transformers + Liger under FSDP2: forward, backward, update."""
    inputs = read_inputs(config, world)
    batches = [inputs.data.micro_batches(n)[0].input_ids for n in range(FIRST + count + 1)]
    inputs.data.close()
    ids = iter([batch.to(world.device) for batch in batches])
    shape = json.loads(Path(config.init).read_text())
    liger = installed("liger-kernel") is not None and world.device.type == "cuda"
    model = peer_model(shape, "llama", Options(attention), str(world.device), liger)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=False)
    optimizer, losses = adamw(model.train()), []

    def step() -> None:
        tokens = next(ids)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) < FIRST:
            losses.append(mean(loss.detach(), world))

    return timed(step, world, count) | {"losses": losses, "attention": [attention]}


def mean(loss: Tensor, world: World) -> float:
    """Over all ranks, which have as many targets."""
    return float(world.sum(loss.double())) / world.size


def timed(step: Callable[[], None], world: World, count: int) -> Record:
    """Milliseconds of a step on the slowest rank, and the most memory that one has."""
    gpu = world.device.type == "cuda"
    for number in range(FIRST):
        if gpu and number == 1:  # the states are there
            torch.cuda.reset_peak_memory_stats()
        step()
    world.barrier()
    times = laps(lambda: step() or torch.empty(0), count)
    own = [median(times)]
    own += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if gpu else [0, 0]
    ms, allocated, reserved = world.top(torch.tensor(own, dtype=torch.double)).tolist()
    sizes = {"allocated_gib": allocated / 2**30, "reserved_gib": reserved / 2**30} if gpu else {}
    return {"ms": ms, "steps": count, **sizes}


def main(out: str, side: str, attention: str, *arguments: str) -> None:
    config = load(None, arguments)
    assert config.steps is not None
    count = config.steps - FIRST
    with start(config.device) as world:
        if side == TIGON:
            found = tigon(config, world, count)
        else:
            found = peer(config, world, count - 1, side == f"{PEER}-reshard", attention)
        if world.main:
            Path(out).write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
