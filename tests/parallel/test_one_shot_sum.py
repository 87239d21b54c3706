"""Sums through memory that ranks share: processes of Triton's interpreter, and two GPUs."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tests.support import interpreter
from tests.train.ranks import Ranks as Processes
from tigon.distributed import all_reduce
from tigon.distributed.collectives import Ranks
from tigon.kernels.comm.one_shot_all_reduce import (
    BITS,
    TURNS,
    P,
    S,
    SymmetricBuffers,
    empty_bits,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_norm,
)
from tigon.kernels.runtime import use

# Of the last four, the 5 empty what 2 S - 1 elements have filled, and the last S use that again
SIZES = (1, 7, S, S + 3, 3 * S, 2 * S - 1, 5, S, S)
NORMS = ((1, 1001), (3, S), (1, 3 * S), (1, 5), (1, 2 * S))
PROGRAMS = 3
EPS = 1e-2  # so large that it counts
LATE = 0.005  # seconds by which another rank comes last to each call
# The most that 1 / root mean square is off, relative: numpy and a GPU's threads add at most 64
# numbers in a row, and these sums in a tree; the root halves the error, and adds less than 16 units
ROOT_ERROR = 64 * 2**-24


def with_bits_of_its_own(x: Tensor) -> Tensor:
    """Every kind of number into x [R, ..., n]. A rank's -0.0 is what nothing has arrived at."""
    x[..., ::5] = x[0, ..., 1::5] = -0.0
    x[1, ..., 2::15] = torch.nan
    x[0, ..., 3::20], x[-1, ..., 3::40] = torch.inf, -torch.inf
    return x


def cases(seed: int, ranks: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """[ranks, n] of each call."""
    draw = torch.Generator().manual_seed(seed)
    for n in sizes:
        yield with_bits_of_its_own(torch.randn(ranks, n, generator=draw).to(dtype))


def summed(x: Tensor) -> Tensor:
    """The definition: float32, from 0 on, in the order of the ranks, and rounded once."""
    total = torch.zeros(x.shape[1:])
    for part in x.float():
        total += part
    return total.to(x.dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but that one NaN is as good as another: which it is, IEEE 754 leaves open."""
    assert found.dtype == expected.dtype
    a, b = (torch.where(x.isnan(), torch.nan, x).view(BITS[x.dtype]) for x in (found, expected))
    return torch.equal(a, b)


def norm_case(
    seed: int, ranks: int, rows: int, C: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """[ranks, rows, C] to sum, whose last rows are not finite, if there are several; and the
    stream, and a weight."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ranks, rows, C, generator=draw).to(dtype)
    x[..., ::5] = -0.0
    if rows > 1:
        x[1, -2, 2], x[0, -1, 3] = torch.inf, torch.nan
    stream = torch.randn(rows, C, generator=draw).to(dtype)
    return x, stream, torch.randn(C, generator=draw).to(dtype)


def normed(h: Tensor, inverse: Tensor, weight: Tensor, offset: float, before: bool) -> Tensor:
    """h [N, C] times `inverse` [N, 1] and the weight, rounded where `rms_norm_ref` rounds."""
    y, scale = h.float() * inverse, weight.float() + offset
    if before:
        y, scale = y.to(h.dtype).float(), scale.to(weight.dtype).float()
    return (y * scale).to(h.dtype)


def assert_normed(
    y: Tensor,
    stream: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    offset: float,
    before: bool,
) -> None:
    """`stream` has the bits of a sum and an addition. Of `y` only the root mean square may differ,
    by the order in which it is added up: so each element is between those of the least and the
    largest, which in 16 bits are the same, but for few."""
    total = (residual.float() + summed(x).float()).to(x.dtype)
    assert same(stream, total), x.shape
    square = total.double().square().mean(-1, keepdim=True)
    ends = [(square + EPS).rsqrt() * (1 + error) for error in (-ROOT_ERROR, ROOT_ERROR)]
    a, b = (normed(total, end.float(), weight, offset, before) for end in ends)
    assert torch.equal(y.isnan(), a.isnan()), x.shape
    near = (torch.minimum(a, b) <= y) & (y <= torch.maximum(a, b)) | y.isnan()
    assert near.all(), (x.shape, x.dtype, offset, before)


class Sum(NamedTuple):
    """A call of all ranks, and what it has to give; as the two that follow."""

    x: Tensor  # [R, ...]

    def run(self, rank: int, buffers: SymmetricBuffers) -> tuple[Tensor, ...]:
        return (one_shot_all_reduce(self.x[rank], buffers),)

    def check(self, y: Tensor) -> None:
        assert same(y, summed(self.x)), (self.x.shape, self.x.dtype)


class Norm(NamedTuple):
    x: Tensor  # [R, N, C]
    residual: Tensor
    weight: Tensor
    offset: float
    before: bool

    def run(self, rank: int, buffers: SymmetricBuffers) -> tuple[Tensor, ...]:
        x, residual, weight, offset, before = self
        return one_shot_all_reduce_norm(
            x[rank], residual, weight, EPS, buffers, offset=offset, before=before
        )

    def check(self, total: Tensor, y: Tensor, stream: Tensor) -> None:
        assert same(total, summed(self.x))
        assert_normed(y, stream, *self)


class Join(NamedTuple):
    whole: Tensor
    bounds: tuple[int, ...]  # of the ranks' columns

    def run(self, rank: int, buffers: SymmetricBuffers) -> tuple[Tensor, ...]:
        first, end = self.bounds[rank : rank + 2]
        own = self.whole[..., first:end]
        return (one_shot_all_gather(own, first, self.whole.shape[-1], buffers),)

    def check(self, y: Tensor) -> None:
        assert same(y, self.whole + 0), self.bounds  # a sum makes 0.0 of -0.0


def calls(ranks: int, dtype: torch.dtype) -> Iterator[Sum | Norm | Join]:
    """What each rank calls; norms between sums, whose programs have the same parts."""
    for x in cases(0, ranks, SIZES, dtype):
        yield Sum(x)
    for seed, (rows, C) in enumerate(NORMS):
        x, residual, weight = norm_case(seed, ranks, rows, C, dtype)
        yield Norm(x, residual, weight, 0.0, before=True)
        yield Norm(x, residual, weight, 1.0, before=False)
        yield Sum(x)
    (whole,) = cases(1, 3, (1001,), dtype)
    shares = [round(1001 * i / ranks) for i in range(ranks + 1)]
    for bounds in shares, [0] + [1001] * ranks:  # all ranks but the first may have no column
        yield Join(whole[:, None], tuple(bounds))


def emptied(buffers: SymmetricBuffers) -> bool:
    """Whether nothing is left in the buffers that each program's last turn had to empty. No rank
    has got so far that it writes there again."""
    own = buffers.local.view(TURNS, -1, PROGRAMS, S)
    before = [(turn - 2) % TURNS for turn in buffers.turns.tolist()]
    kept = [own[turn, :, part] != empty_bits(buffers.dtype) for part, turn in enumerate(before)]
    return not torch.stack(kept).any()


def load_whole_elements() -> None:
    """Makes loads whole, as a GPU's are. The interpreter copies an element by glibc's memcpy, which
    reads the high byte of 16 bits a second time: of what another process writes in between, it has
    one byte. Memory that a rank waits for changes once, so two equal loads are whole."""
    load = InterpreterBuilder.create_masked_load

    def load_until_equal(*args: Any) -> Any:
        before, now = load(*args), load(*args)
        while not np.array_equal(before.data.view(np.uint8), now.data.view(np.uint8)):
            before, now = now, load(*args)
        return now

    InterpreterBuilder.create_masked_load = load_until_equal


def on_files(directory: str) -> None:
    """Files that all ranks map stand for the GPUs' memory. What the calls give is left beside."""
    interpreter.install()  # processes that are forked have not read conftest.py
    load_whole_elements()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for dtype, bits in BITS.items():
        shape = TURNS, ranks, PROGRAMS * S
        paths = [f"{directory}/{dtype}-{n}" for n in range(ranks)]
        size = torch.Size(shape).numel()
        mapped = [torch.from_file(path, shared=True, size=size, dtype=bits) for path in paths]
        addresses = torch.tensor([memory.data_ptr() for memory in mapped])
        turns = torch.zeros(PROGRAMS, dtype=torch.int32)
        buffers = SymmetricBuffers(mapped[rank].view(shape), addresses, turns, rank, dtype)
        found = []
        for i, call in enumerate(calls(ranks, dtype)):
            if i % ranks == rank:  # the others are there first, and must wait
                time.sleep(LATE)
            found.append((call.run(rank, buffers), emptied(buffers)))
        torch.save(found, f"{directory}/{dtype}-{rank}-found")


@pytest.mark.kernel
@pytest.mark.parametrize("ranks", [2, 3])  # of two, the order of the sum would not show
def test_processes(ranks: int, tmp_path: Path) -> None:
    for dtype, bits in BITS.items():
        memory = torch.full((TURNS * ranks * PROGRAMS * S,), empty_bits(dtype), dtype=bits)
        for rank in range(ranks):
            Path(tmp_path, f"{dtype}-{rank}").write_bytes(memory.numpy().tobytes())
    Processes(ranks, on_files, str(tmp_path)).finish()
    for dtype in BITS:
        found = [torch.load(tmp_path / f"{dtype}-{rank}-found") for rank in range(ranks)]
        for call, *of_ranks in zip(calls(ranks, dtype), *found, strict=True):
            (first, _), *_ = of_ranks
            call.check(*first)
            for other, nothing_left in of_ranks:
                assert all(map(same, other, first)), "the ranks' results differ"
                assert nothing_left, (type(call), dtype)


def test_what_does_not_fit_is_refused() -> None:
    own = torch.zeros(TURNS, 2, PROGRAMS * S, dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int32)  # as nothing is launched
    buffers = SymmetricBuffers(own, nothing, nothing, 0, torch.float32)
    said = r"1 elements of torch.bfloat16: buffers for 3072, torch.float32"
    with pytest.raises(ValueError, match=said):
        one_shot_all_reduce(torch.zeros(1, dtype=torch.bfloat16), buffers)
    for rows, C, said in (3, 1001, r"x \(3, 1001\) and residual"), (4, S, "4096 elements of"):
        x, weight = torch.zeros(rows, C), torch.zeros(C)
        with pytest.raises(ValueError, match=said):
            one_shot_all_reduce_norm(x, x, weight, EPS, buffers)


def graph_of(
    step: Callable[[], list[Tensor]], first: bool = False
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """`first`: no sum has run before that of the graph."""
    stream = torch.cuda.Stream()
    if not first:
        with torch.cuda.stream(stream):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        return graph, step()


def recorded_first(ranks: Ranks) -> None:
    """Ranks cannot agree on shared memory while a graph is recorded: NCCL sums, also later."""
    x = torch.ones(1, device="cuda")
    ranks.sum(x)
    graph, (y,) = graph_of(lambda: [all_reduce.all_reduce_small(x, ranks)], first=True)
    assert not any(all_reduce._group_buffers.values())
    graph.replay()
    assert y.tolist() == [ranks.size]
    with use("reference"):
        assert all_reduce.all_reduce_small(x, ranks).tolist() == [ranks.size]
    (opened,) = all_reduce._group_buffers.values()
    assert list(opened) == [torch.float32]  # agreed on, and used once Triton is


def joined(ranks: Ranks, dtype: torch.dtype) -> None:
    """Columns of each rank, of which the last has fewer, to those of all."""
    whole = torch.randn(3, 1, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    share = -(-1001 // ranks.size)
    first = ranks.rank * share
    own = whole[..., first : first + share].cuda()
    found = all_reduce.all_gather_small(own, first, 1001, ranks)
    shared = torch.cuda.device_count() >= ranks.size
    assert torch.equal(found.cpu(), whole) if shared else found is None
    assert (
        all_reduce.all_gather_small(own, first, P * S, ranks) is None
    )  # too long: three times as much


def same_on_gpu(found: Tensor, x: Tensor) -> bool:
    """NCCL, which sums what is too long, keeps -0.0 where all ranks have it: here made 0.0."""
    return same(found.cpu() + 0, summed(x))


def norms_on_gpus(ranks: Ranks, dtype: torch.dtype) -> None:
    """In one kernel where parts are a row's own; in a graph, too."""
    shared = torch.cuda.device_count() >= ranks.size
    cases = []
    for seed, (rows, C) in enumerate(((1, 4096), (5, 3 * S), (1, 576), (3, 576), (64, 4096))):
        x, stream, weight = norm_case(seed, ranks.size, rows, C, dtype)
        cases.append((x, stream, weight, *(t.cuda() for t in (x[ranks.rank], stream, weight))))
    for how in ({"offset": 0.0, "cast": "before_weight"}, {"offset": 1.0, "cast": "after_weight"}):

        def every(how: dict[str, Any] = how) -> list[Any]:
            return [
                all_reduce.all_reduce_small_norm(*case[3:], EPS, ranks, **how) for case in cases
            ]

        graph, found = graph_of(every)
        for _ in range(20):
            graph.replay()
        for outputs, (x, residual, weight, *_) in zip(found, cases, strict=True):
            own_parts = x[0].numel() == len(weight) or len(weight) % S == 0
            assert (outputs is not None) == (shared and own_parts), x.shape
            if outputs is not None:
                total, y, stream = (t.cpu() for t in outputs)
                assert same(total, summed(x)), x.shape
                assert_normed(y, stream, x, residual, weight, how["offset"], "be" in how["cast"])
        del graph, found


def on_gpus() -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks = Ranks(dist.group.WORLD.group_name, rank, count)
    recorded_first(ranks)
    for dtype in BITS:
        sizes = (*SIZES, P * S, 100 * S + 8, P * S + 1)  # the last is too long
        for seed in range(20):
            for x in cases(seed, count, sizes, dtype):
                if (seed + rank) % 3 == 0:
                    torch.cuda._sleep(100_000)
                assert same_on_gpu(all_reduce.all_reduce_small(x[rank].cuda(), ranks), x), (
                    dtype,
                    x.shape,
                )
        given = [x[rank].cuda() for x in cases(0, count, sizes, dtype)]
        graph, found = graph_of(
            lambda given=given: [all_reduce.all_reduce_small(x, ranks) for x in given]
        )
        for seed in range(20):
            fresh = list(cases(seed, count, sizes, dtype))
            for x, new in zip(given, fresh, strict=True):
                x.copy_(new[rank])
            graph.replay()
            for y, new in zip(found, fresh, strict=True):
                assert same_on_gpu(y, new), (dtype, seed, new.shape)
        joined(ranks, dtype)
        norms_on_gpus(ranks, dtype)
        del graph, found  # NCCL's communicators wait for the graphs that hold their kernels
    (opened,) = all_reduce._group_buffers.values()
    shared = {dtype: buffers is not None for dtype, buffers in opened.items()}
    assert shared == dict.fromkeys(BITS, torch.cuda.device_count() >= count)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_two_gpus():
    """Where there is one GPU alone, NCCL sums."""
    Processes(2, on_gpus, on_gpus=True).finish(120)
