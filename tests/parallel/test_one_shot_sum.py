"""Sums through memory that ranks share: two processes of Triton's interpreter, and two GPUs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.ranks import Ranks as Processes
from tigon.kernels.one_shot_sum import BITS, TURNS, Buffers, P, S, empty, one_shot_sum
from tigon.layers import symmetric
from tigon.layers.collectives import Ranks

SIZES = (1, 7, S, S + 3, 3 * S, 2 * S - 1, 5)
PROGRAMS = 3


def cases(seed: int, ranks: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """[ranks, n] of each call: whole numbers, whose sums are exact, and what has bits of its own.

    A rank's -0.0 is what nothing has arrived at.
    """
    draw = torch.Generator().manual_seed(seed)
    for n in sizes:
        x = torch.randint(-99, 99, (ranks, n), generator=draw).to(dtype)
        x[:, ::5] = -0.0
        x[0, 1::5] = -0.0
        x[1, 2::5], x[0, 3::7] = float("nan"), float("inf")
        yield x


def same(found: Tensor, x: Tensor) -> bool:
    return torch.equal(found.float().nan_to_num(-1.5), x.float().sum(0).nan_to_num(-1.5))


def on_files(directory: str) -> None:
    """Files that both map stand for the GPUs' memory."""
    rank, shape = int(os.environ["RANK"]), (TURNS, 2, PROGRAMS * S)
    for dtype, bits in BITS.items():
        mapped = [
            torch.from_file(
                f"{directory}/{dtype}-{n}", shared=True, size=6 * PROGRAMS * S, dtype=bits
            )
            for n in range(2)
        ]
        addresses = torch.tensor([memory.data_ptr() for memory in mapped])
        turns = torch.zeros(PROGRAMS, dtype=torch.int32)
        buffers = Buffers(mapped[rank].view(shape), addresses, turns, rank, dtype)
        for x in cases(0, 2, SIZES, dtype):
            assert same(one_shot_sum(x[rank], buffers), x), (dtype, x.shape)
    with pytest.raises(
        ValueError, match=r"1 elements of torch.bfloat16: buffers for 3072, torch.float32"
    ):
        one_shot_sum(torch.zeros(1, dtype=torch.bfloat16), buffers)


@pytest.mark.kernel
def test_two_processes(tmp_path):
    for dtype, bits in BITS.items():
        for rank in range(2):
            memory = torch.full((6 * PROGRAMS * S,), empty(dtype), dtype=bits)
            Path(tmp_path, f"{dtype}-{rank}").write_bytes(memory.numpy().tobytes())
    Processes(2, on_files, str(tmp_path)).finish(60)


def graph_of(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        return graph, step()


def on_gpus() -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks = Ranks(dist.group.WORLD.group_name, rank, count)
    for dtype in BITS:
        sizes = (*SIZES, P * S, 100 * S + 8, P * S + 1)  # the last is too long
        for seed in range(20):
            for x in cases(seed, count, sizes, dtype):
                if (seed + rank) % 3 == 0:
                    torch.cuda._sleep(100_000)
                assert same(symmetric.sum_few(x[rank].cuda(), ranks).cpu(), x), (dtype, x.shape)
        given = [x[rank].cuda() for x in cases(0, count, sizes, dtype)]
        graph, found = graph_of(lambda given=given: [symmetric.sum_few(x, ranks) for x in given])
        for seed in range(20):
            fresh = list(cases(seed, count, sizes, dtype))
            for x, new in zip(given, fresh, strict=True):
                x.copy_(new[rank])
            graph.replay()
            for y, new in zip(found, fresh, strict=True):
                assert same(y.cpu(), new), (dtype, seed, new.shape)
        del graph, found  # NCCL's communicators wait for the graphs that hold their kernels
    (opened,) = symmetric._of_groups.values()
    shared = {dtype: buffers is not None for dtype, buffers in opened.items()}
    assert shared == dict.fromkeys(BITS, torch.cuda.device_count() >= count)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_gpus():
    """Where there is one GPU alone, NCCL sums."""
    Processes(2, on_gpus, on_gpus=True).finish(120)
