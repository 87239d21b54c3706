"""A rank of a side of bench/parallel.py or scaling.py: OUT SIDE ATTENTION setting=value ...

Rank 0 writes what it finds to OUT. Both sides read the same rows by the trainer's loader, and have
the same weights, drawn by name.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.compare_side import laps
from bench.harness import Record, installed
from bench.train_cases import draw, is_drawn, peer_names
from bench.train_peer import CHUNKS, Options, adamw, head_chunks, peer_model
from tigon.kernels.attention import backends
from tigon.settings.config import Config
from tigon.train import load, start
from tigon.train.build import read_inputs
from tigon.train.distributed import World, local
from tigon.train.dry_run import random_run
from tigon.train.trainer import forward_backward, update_weights
from tigon.weights import local_rows

TIGON, PEER = "tigon", "peer"
TENSOR_PEER, CONTEXT_PEER, EXPERT_PEER = (
    f"{PEER}-{way}" for way in ("tensor", "context", "expert")
)
FIRST = 3  # steps that are not timed


@torch.no_grad()
def fill(model: Any) -> None:
    """Each parameter's own rows of what its names draw, as `fill_ours`; other norms change
    nothing."""
    layout = model.layout(stacked_experts=True)  # as transformers draws them
    names = peer_names(layout)
    for name, parameter in model.named_parameters():
        own = local(parameter)
        parts = dict.fromkeys((part.name, part.shape) for part in layout[name])
        if not any(is_drawn(*part) for part in parts):
            own.fill_(1.0)
            continue
        whole = torch.cat([draw(*part, own.device, names) for part in parts])
        if name in model.shard_specs:
            whole = model.shard_specs[name].take(whole.view(model.shard_specs[name].shape))
        _, first = local_rows(name, parameter)
        own.copy_(whole.view(-1, *own.shape[1:])[first : first + len(own)])


def tigon(config: Config, world: World, count: int) -> Record:
    """The trainer's steps: forward, backward, the norm of all gradients, update."""
    run = random_run(read_inputs(config, world), world)
    fill(run.model)
    numbers, metrics = iter(range(run.steps)), []

    def step() -> None:
        number = next(numbers)
        values, scale = forward_backward(run, number)
        metrics.append(values)
        update_weights(run, number, scale)
        run.optimizer.zero_grad()

    with run.prefetcher:
        found = timed(step, world, count)
    found |= {"losses": [values["loss"] for values in metrics[:FIRST]]}
    found |= {"expert_imbalance": metrics[-1].get("expert_imbalance")}
    return found | {"attention": sorted({backend for backend, *_ in backends._logged})}


def peer(config: Config, world: World, count: int, side: str, attention: str) -> Record:
    """transformers + Liger under FSDP2, torch's tensor or context parallelism or transformers' own
    expert parallelism: forward, backward, update."""
    inputs = read_inputs(config, world)
    batches = [inputs.data.micro_batches(n)[0].input_ids for n in range(FIRST + count)]
    inputs.data.close()
    ids = iter([batch.to(world.device) for batch in batches])
    shape = json.loads(Path(config.init).read_text())
    gpu = world.device.type == "cuda"
    liger = installed("liger-kernel") is not None and gpu
    options = Options(attention, "grouped_mm" if gpu and "num_experts" in shape else "")
    model = peer_model(shape, shape["model_type"], options, str(world.device), liger)
    if side == TENSOR_PEER:
        divide(model, world)
    elif side == EXPERT_PEER:
        model = divide_experts(model, world)
    else:
        reshards = side in (f"{PEER}-reshard", CONTEXT_PEER)
        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=reshards)
        fully_shard(model, reshard_after_forward=False)
    optimizer, losses = adamw(model.train()), []
    ring = side == CONTEXT_PEER
    tokens = batches[0].numel() // (world.size if ring else 1)
    chunks = head_chunks(shape["model_type"], shape, tokens) if liger else 0
    more = {CHUNKS: chunks} if chunks else {}
    learn = context_pass(model, world, more) if ring else whole_pass(model, more)

    def step() -> None:
        loss = learn(next(ids))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) < FIRST:
            losses.append(mean(loss.detach(), world))

    return timed(step, world, count) | {"losses": losses, "attention": [attention], **more}


def divide(model: Any, world: World) -> None:
    """Each block's products over the ranks, as transformers' plan of the family has them; all else
    every rank has whole."""
    assert world.meshes is not None and world.meshes.tensor is not None
    for block in model.model.layers:
        plan: dict[str, Any] = {}
        for name, module in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            plan |= {f"{name}.{each}_proj": ColwiseParallel() for each in module}
        plan |= {f"{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(block, world.meshes.tensor, plan)


def whole_pass(model: Any, more: Record) -> Callable[[Tensor], Tensor]:
    """Forward and backward of rows [B, T] of this rank, with these further arguments; returns the
    loss."""

    def learn(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, **more).loss
        loss.backward()
        return loss

    return learn


def context_pass(model: Any, world: World, more: Record) -> Callable[[Tensor], Tensor]:
    """As `whole_pass`, of rows that both ranks have, each of half of their tokens: torch's ring of
    SDPA, set up as accelerate does it."""
    assert world.meshes is not None and world.meshes.context is not None
    mesh = world.meshes.context

    def causal(_: Any, given: Any, named: Record) -> tuple[Any, Record]:
        return given, named | {"attention_mask": None, "is_causal": True}

    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(causal, with_kwargs=True)

    def learn(tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        parts = [tokens, places, targets]
        ring = context_parallel(
            mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)
        )
        with ring:
            loss = model(
                input_ids=tokens,
                position_ids=places,
                labels=targets,
                shift_labels=targets,
                # Of four dimensions it is taken as it is, so that none is made
                attention_mask=tokens.new_zeros(1, 1, 1, 1),
                **more,
            ).loss
            loss.backward()
        return loss

    return learn


def divide_experts(model: Any, world: World) -> Any:
    """Its experts over the ranks, which exchange tokens, and FSDP2 for all else; as from_pretrained
    does it with DistributedConfig(fsdp_size, ep_size)."""
    library: Any = importlib.import_module("transformers.distributed")
    chosen = library.DistributedConfig(fsdp_size=world.size, ep_size=world.size)
    chosen, _, mesh = model.prepare_distribute_model(chosen)
    return model.maybe_distribute_model(model, chosen, mesh)


def mean(loss: Tensor, world: World) -> float:
    """Over all ranks, which have as many targets each, or the same ones."""
    total = loss.double()
    dist.all_reduce(total)
    return float(total) / world.size


def timed(step: Callable[[], None], world: World, count: int) -> Record:
    """Milliseconds of a step on the slowest rank, and the most memory that one has."""
    gpu = world.device.type == "cuda"
    for number in range(FIRST):
        if gpu and number == 1:  # the states are there
            torch.cuda.reset_peak_memory_stats()
        step()
    dist.barrier()
    times = laps(lambda: step() or torch.empty(0), count)
    own = [median(times)]
    own += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if gpu else [0, 0]
    ms, allocated, reserved = world.all_reduce_max(torch.tensor(own, dtype=torch.double)).tolist()
    sizes = {"allocated_gib": allocated / 2**30, "reserved_gib": reserved / 2**30} if gpu else {}
    return {"ms": ms, "steps": count, **sizes}


def main(out: str, side: str, attention: str, *arguments: str) -> None:
    config = load(None, arguments)
    assert config.steps is not None
    count = config.steps - FIRST
    with start(config.device, parallel=config.parallel) as world:
        if side == TIGON:
            found = tigon(config, world, count)
        else:
            found = peer(config, world, count, side, attention)
        if world.main:
            Path(out).write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
