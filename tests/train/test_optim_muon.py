"""Muon beside its definition on whole matrices, on one rank and on several."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.small import EXPERTS
from tests.train.ranks import Ranks
from tigon.models import MODELS
from tigon.settings.load import load
from tigon.train.distributed import shard, start
from tigon.train.optim import build_optimizer, hidden_matrices, muon
from tigon.train.optim.muon import Matrix, MatrixBlock, assign_ranks, plan

STEPS, LR, ADAMW_LR, DECAY, MOMENTUM = 3, 0.02, 0.003, 0.1, 0.9
SETTINGS = [
    *("run_dir=a", "model=m", "data=d", "optimizer=muon"),
    *(f"lr={LR}", f"adamw_lr={ADAMW_LR}", f"weight_decay={DECAY}", f"momentum={MOMENTUM}"),
]


def build():
    torch.manual_seed(0)
    return MODELS[EXPERTS["model_type"]].from_config(EXPERTS)


def gradient(name: str, step: int, shape) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)) * 10 + step)
    return torch.randn(shape, generator=draw)


def steps(directory: Path, *settings: str) -> None:
    """Three steps; rank 0 writes weights and momentum."""
    with start("cpu") as world:
        model = build()
        if world.size > 1:
            shard(model, world, torch.float32)
        optimizer = build_optimizer(model, load(None, [*SETTINGS, *settings]))
        for group in optimizer.param_groups:
            group["lr"] = LR * group["lr_scale"]
        for step in range(STEPS):
            for name, p in model.named_parameters():
                if not p.requires_grad:
                    continue
                given = gradient(name, step, p.shape)
                p.grad = given
                if world.size > 1:
                    own = given.chunk(world.size)
                    local = own[world.rank] if world.rank < len(own) else given[:0]
                    p.grad = torch.distributed.tensor.DTensor.from_local(
                        local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                    )
            optimizer.step()
        found = {}
        for name, p in model.named_parameters():
            found[name] = p.detach()
            for kind, value in optimizer.state.get(p, {}).items():
                found[f"{kind}.{name}"] = value
        found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
        if world.main:
            torch.save(found, directory / f"found-{world.size}")


def definition(name: str, weight: torch.Tensor, nesterov=True) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and momentum of one matrix after all steps, in float64."""
    w, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.double)
    for g in name:
        g = g.double()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * g
        x = (1 - MOMENTUM) * g + MOMENTUM * momentum if nesterov else momentum
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if tall else x
        w = w * (1 - LR * DECAY) - LR * 0.2 * math.sqrt(max(x.shape)) * x
    return w, momentum


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one, two and four ranks found."""
    directory = tmp_path_factory.mktemp("muon")
    steps(directory)
    both = [Ranks(count, steps, directory) for count in (2, 4)]
    for ranks in both:
        ranks.finish()
    return directory


def expected_of(name: str, p: torch.Tensor, heights) -> tuple[torch.Tensor, torch.Tensor]:
    grads = [gradient(name, step, p.shape).flatten(0, -2) for step in range(STEPS)]
    both, first = [], 0
    for height in heights:
        at = slice(first, first + height)
        both.append(definition([g[at] for g in grads], p.flatten(0, -2)[at]))
        first += height
    w, m = (torch.cat(parts).view(p.shape) for parts in zip(*both, strict=True))
    return w, m


@pytest.mark.parametrize("count", [1, 2, 4])
def test_steps_equal_the_definition_on_whole_matrices(runs, count):
    model, found = build(), torch.load(runs / f"found-{count}")
    hidden = hidden_matrices(model)
    assert len(hidden) == 8
    for name, p in model.named_parameters():
        if name in hidden:
            w, m = expected_of(name, p.detach(), hidden[name])
            torch.testing.assert_close(found[f"momentum_buffer.{name}"].double(), m)
            step = (w - p.detach().double()).norm()
            assert (found[name].double() - w).norm() < 1e-5 * step, name
        else:
            assert f"momentum_buffer.{name}" not in found
            reference = torch.nn.Parameter(p.detach().clone())
            decay = DECAY if p.dim() > 1 else 0.0
            adamw = torch.optim.AdamW([reference], ADAMW_LR, (0.9, 0.95), 1e-8, decay, fused=True)
            for step in range(STEPS):
                reference.grad = gradient(name, step, p.shape)
                adamw.step()
            assert torch.equal(found[name], reference.detach()), name


def test_experts_stay_on_the_rank_that_has_them():
    """Eight experts on four ranks, beside matrices of which every rank has some rows."""
    matrices = [Matrix(64, 64)] * 4 + [Matrix(32, 64)] * 16
    blocks = [
        [MatrixBlock(i + 1, 0, i, 16 * rank, 0, 16, 64) for i in range(4)]
        + [MatrixBlock(0, 32 * 64 * i, 4 + 4 * rank + i, 0, 0, 32, 64) for i in range(4)]
        for rank in range(4)
    ]
    assert assign_ranks(matrices, blocks) == [0, 1, 2, 3] + [i // 4 for i in range(16)]
    for rank in range(4):
        (turn,) = plan(matrices, blocks, rank)
        here = 4 * 32 * 64
        assert turn.sizes_out == [16 * 64 + (here if to == rank else 0) for to in range(4)]
        assert sum(turn.sizes_in) == sum(m.rows * m.cols for m in turn.matrices)
        assert len([c for c in turn.copies if c.parameter == 0]) == 1  # four matrices, one piece


def divided(values: list[torch.Tensor], ranks: int) -> tuple[list[list[MatrixBlock]], list[list]]:
    """Of four matrices on so many ranks: rows of one, columns of another, a third that all have,
    and rows of some columns of the last. What each rank has, and its part of each parameter."""
    blocks, parts = [], []
    for rank in range(ranks):
        mine, held = [], []
        for i, value in enumerate(values):
            rows, cols = value.shape
            by_rows, by_cols = ((rank, ranks), (0, 1)), ((0, 1), (rank, ranks))
            both = ((rank // 2, -(-ranks // 2)), (rank % 2, 2)) if ranks > 1 else by_rows
            (r, rs), (c, cs) = (by_rows, by_cols, ((0, 1), (0, 1)), both)[i]
            if i == 3 and rank == ranks - 1 and ranks % 2:  # an odd one has what is left
                c, cs = 0, 1
            top, end = rows * r // rs, rows * (r + 1) // rs
            left, right = cols * c // cs, cols * (c + 1) // cs
            piece = value[top:end, left:right]
            held.append(torch.cat([torch.zeros(i), piece.flatten()]))
            if piece.numel():
                mine.append(MatrixBlock(i, i, i, top, left, *piece.shape))
        blocks.append(mine)
        parts.append(held)
    return blocks, parts


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [1, 70, 1 << 26])
def test_rounds_exchange_every_block(ranks, size):
    """All ranks' plans, carried out here, on shapes that ranks share unevenly or not at all."""
    values = [torch.randn(shape) for shape in ((11, 4), (6, 5), (5, 4), (4, 6))]
    matrices = [Matrix(*value.shape) for value in values]
    blocks, parts = divided(values, ranks)
    plans = [plan(matrices, blocks, rank, size) for rank in range(ranks)]
    found = [[part.clone() for part in of_rank] for of_rank in parts]
    seen = []
    for turns in zip(*plans, strict=True):
        messages = [
            torch.cat([torch.empty(0), *muon._slices(turn.copies, parts[r])]).split(turn.sizes_out)
            for r, turn in enumerate(turns)
        ]
        back = []
        for rank, turn in enumerate(turns):
            got = torch.cat([message[rank] for message in messages])
            assert [len(message[rank]) for message in messages] == turn.sizes_in
            whole = torch.full((sum(m.rows * m.cols for m in turn.matrices),), math.nan)
            muon._copy(turn.moves, got, whole)
            changed = torch.full_like(got, math.nan)
            muon._copy(turn.moves, changed, whole + 1, back=True)
            back.append(changed.split(turn.sizes_in))
            for m in turn.matrices:
                part, whole = whole.split([m.rows * m.cols, len(whole) - m.rows * m.cols])
                seen += [i for i, v in enumerate(values) if torch.equal(part, v.flatten())]
        for rank, turn in enumerate(turns):
            mine = torch.cat([elements[rank] for elements in back])
            pieces = mine.split([copy.length for copy in turn.copies])
            for ours, new in zip(muon._slices(turn.copies, found[rank]), pieces, strict=True):
                ours.copy_(new)
    assert sorted(seen) == [0, 1, 2, 3]  # each once
    for of_rank, before in zip(found, parts, strict=True):
        for i, (now, was) in enumerate(zip(of_rank, before, strict=True)):
            torch.testing.assert_close(now[i:], was[i:] + 1)
