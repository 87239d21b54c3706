"""A rank of bench/one_shot_sum.py: OUT KIND TOKENS ...; KIND is "whole", or "tiny" on CPUs.

Rank 0 writes what it finds to OUT.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from bench.harness import Record
from tigon.distributed.all_reduce import all_reduce_small
from tigon.distributed.collectives import Ranks

Way = Callable[[Tensor], Tensor]
NCCL, IN_PLACE = "NCCL, functional", "NCCL, in place"
TORCH, TIGON = "torch, one_shot_all_reduce", "tigon"
DIM, SUMS, ROUNDS = 4096, 32, 20


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def one_shot(workspace: Tensor, group: str, x: Tensor) -> Tensor:
    shared = workspace[: x.numel()].view(x.shape)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", group)


def ways(ranks: Ranks, device: torch.device, longest: int) -> dict[str, Way]:
    """`sum_few`, beside NCCL's all-reduce as it was before, and the fastest ways that torch has."""
    found: dict[str, Way] = {NCCL: ranks.sum, IN_PLACE: in_place}
    if device.type == "cuda":
        workspace = symmetric.empty(longest, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(workspace, ranks.group)
        found[TORCH] = partial(one_shot, workspace, ranks.group)
    return found | {TIGON: partial(all_reduce_small, ranks=ranks)}


def chain(way: Way, x: Tensor) -> Tensor:
    """Each sum of the one before it; zeros stay as they are."""
    for _ in range(SUMS):
        x = way(x)
    return x


def seconds(way: Way, x: Tensor) -> float:
    """Of a sum, in a CUDA graph of many; the slowest rank's."""
    if not x.is_cuda:
        chain(way, x)
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(way, x)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        chain(way, x)
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        graph.replay()  # the ranks begin the next one together
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took = torch.tensor(begin.elapsed_time(end) / 1e3 / SUMS, device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return median(times)


def measured(ranks: Ranks, device: torch.device, tokens: list[int]) -> Record:
    every = ways(ranks, device, max(tokens) * DIM)
    found: Record = {name: {} for name in every}
    for rows in tokens:
        draw = torch.Generator().manual_seed(rows)
        all_of = torch.randn(ranks.size, rows, DIM, generator=draw).bfloat16()
        x = all_of[ranks.rank].to(device)
        exact = all_of.float().sum(0).bfloat16()
        for name, way in every.items():
            wrong = float((way(x).cpu().float() - exact.float()).abs().max())
            if wrong:
                found[name][str(rows)] = {"error": f"off by {wrong}"}
            else:
                found[name][str(rows)] = {"us": 1e6 * seconds(way, torch.zeros_like(x))}
    return found


def main(out: str, kind: str, *tokens: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cpu") if kind == "tiny" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "tiny" else "nccl")
    ranks = Ranks(dist.group.WORLD.group_name, rank, dist.get_world_size())
    found = measured(ranks, device, [int(n) for n in tokens])
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
