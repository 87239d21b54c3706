"""Every placement of a parameter over four ranks (gloo): each reads its own part, bit for bit, and
together they write the files of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.parallel.ranks import run_on_ranks
from tigon.weights import (
    Checkpoint,
    Repository,
    RowSpan,
    TensorSlice,
    load_into,
    make_entries,
    write_checkpoint,
)

LAYOUT = {
    "fused": (
        TensorSlice.whole("q", (9, 6)),
        TensorSlice.whole("k", (3, 6), 9),
        TensorSlice.whole("v", (5, 6), 12),
    ),
    # Experts apart, and in one tensor
    "apart": tuple(TensorSlice.whole(f"e.{i}", (2, 7), 2 * i) for i in range(6)),
    "stacked": (TensorSlice.whole("stacked", (3, 5, 6)),),
    "vector": (TensorSlice.whole("vector", (7,)),),
    "vectors": tuple(TensorSlice.whole(f"b.{i}", (5,), 5 * i) for i in range(3)),
    "scalar": (TensorSlice.whole("scalar", ()),),
    "single": (TensorSlice.whole("single", (1, 7)),),
    # Its halves are in the file the other way round
    "swapped": (TensorSlice("swapped", (9, 2), (RowSpan(4, 0, 5), RowSpan(0, 5, 4))),),
    "wide": (TensorSlice.whole("wide.a", (400, 64)), TensorSlice.whole("wide.b", (601, 64), 400)),
}
SHAPES = {
    "fused": (17, 6),
    "apart": (3, 4, 7),
    "stacked": (3, 5, 6),
    "vector": (7,),
    "vectors": (3, 5),
    "scalar": (),
    "single": (1, 7),
    "swapped": (9, 2),
    "wide": (1001, 64),
}
R, S = Replicate(), Shard
MESHES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (S(0),)),
    ((4,), (S(1),)),
    ((4,), (S(2),)),
    ((4,), (R,)),
    ((2, 2), (R, S(0))),
    ((2, 2), (S(0), R)),
    ((2, 2), (R, S(1))),
    ((2, 2), (S(0), S(1))),
    ((2, 2), (S(1), S(2))),
    ((2, 2), (R, R)),
]


def whole(name: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=draw)


def parts() -> dict[str, torch.Tensor]:
    found = {}
    for name, layout in LAYOUT.items():
        flat = whole(name).reshape(-1, *layout[0].shape[1:])
        for part in layout:
            rows = [flat[target : target + length] for _, target, length in sorted(part.rows)]
            found[part.name] = torch.cat(rows).reshape(part.shape)
    return found


def entries(parameters: dict[str, Any], dtype: torch.dtype) -> Any:
    return make_entries(parameters, {name: LAYOUT[name] for name in parameters}, dtype)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def case(
    directory: Path, sizes: tuple[int, ...], placements: tuple[Placement, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """What this rank got wrong, and the bytes that it read and wrote."""
    counted: dict[str, int] = {"preadv": 0, "pwrite": 0}

    def counting(name: str) -> Any:
        call = getattr(os, name)

        def count(*arguments: Any) -> int:
            done: int = call(*arguments)
            counted[name] += done
            return done

        return count

    mesh = init_device_mesh("cpu", sizes)
    cuts = [p.dim for p in placements if isinstance(p, Shard)]
    names = [name for name, shape in SHAPES.items() if all(dim < len(shape) for dim in cuts)]
    expected = {
        name: distribute_tensor(whole(name).to(dtype), mesh, placements, src_data_rank=None)
        for name in names
    }
    parameters = {
        name: DTensor.from_local(
            torch.full_like(e.to_local(), torch.nan),
            mesh,
            placements,
            run_check=False,
            shape=e.shape,
            stride=e.stride(),
        )
        for name, e in expected.items()
    }
    checkpoint = Checkpoint.open(Repository(directory))
    out = directory / "-".join(map(str, (*sizes, *placements, dtype)))
    with pytest.MonkeyPatch.context() as patch:
        for name in counted:
            patch.setattr(os, name, counting(name))
        load_into(parameters, LAYOUT, checkpoint, ignored=checkpoint.tensors.keys())
        to = make(out) if dist.get_rank() == 0 else None
        write_checkpoint(to, entries(parameters, dtype), max_shard_size=100_000)
    wrong = [
        n for n, p in parameters.items() if not torch.equal(p.to_local(), expected[n].to_local())
    ]
    return {"wrong": wrong, "out": out, "names": names} | counted


def make(directory: Path) -> Path:
    directory.mkdir()
    return directory


def broken(first: int, count: int) -> torch.Tensor:
    raise OSError(28, "No space left on device")


def stopped(out: Path, kind: str) -> str:
    """What stops this rank from writing, for something that is wrong on rank 1."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    names = ("fused", "single", "wide")
    found = entries({n: distribute_tensor(whole(n), mesh, [S(0)]) for n in names}, torch.float32)
    if kind == "lost":  # a row that nobody has
        (piece,) = next(entry for entry in found if entry.name == "single").blocks or (None,)
        found = [entry._replace(blocks=[]) if piece in entry.blocks else entry for entry in found]
    if kind == "other" and rank == 1:
        found = found[1:]
    if kind == "fails" and rank == 1:
        found = [e._replace(blocks=[p._replace(read=broken) for p in e.blocks]) for e in found]
    if kind == "elsewhere" and rank == 1:  # a directory of the same name on another machine
        Path.exists = lambda path: False  # type: ignore[method-assign, assignment]
    try:
        write_checkpoint(make(out) if rank == 0 else None, found, max_shard_size=100_000)
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def strided(directory: Path) -> str:
    mesh = init_device_mesh("cpu", (4,))
    placements = [_StridedShard(0, split_factor=2)]
    parameter = DTensor.from_local(torch.zeros(5, 6), mesh, placements, run_check=False)
    with pytest.raises(ValueError, match="only Shard and Replicate") as error:
        load_into({"fused": parameter}, LAYOUT, Checkpoint.open(Repository(directory)))
    return str(error.value)


def failing(directory: Path) -> str:
    """One rank cannot read; all say so, and none waits for ever."""
    mesh = init_device_mesh("cpu", (2, 2))
    parameter = distribute_tensor(torch.zeros(7), mesh, [R, R], src_data_rank=None)
    checkpoint = Checkpoint.open(Repository(directory))
    dist.barrier()
    if dist.get_rank() == 0:  # it reads the only parameter
        os.truncate(directory / "model.safetensors", 8)
    try:
        load_into({"vector": parameter}, LAYOUT, checkpoint, ignored=checkpoint.tensors.keys())
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def every_case(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{i} {dtype}": case(directory, *MESHES[i], getattr(torch, dtype))
        for i in range(len(MESHES))
        for dtype in ("float32", "bfloat16")
    }
    found["strided"] = strided(directory)
    found["failing"] = failing(directory)
    return found | {kind: stopped(directory / kind, kind) for kind in STOPPED}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("placements")
    save_file(parts(), directory / "model.safetensors")
    return run_on_ranks(4, every_case, directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("i", range(len(MESHES)), ids=str)
def test_every_rank_has_its_part(ranks: list[dict[str, Any]], i: int, dtype: str) -> None:
    assert [rank[f"{i} {dtype}"]["wrong"] for rank in ranks] == [[]] * 4
    assert ranks[0][f"{i} {dtype}"]["names"]


@pytest.mark.parametrize(
    "i", [i for i, (_, p) in enumerate(MESHES) if not {1, 2} & {getattr(x, "dim", 0) for x in p}]
)
def test_rows_and_replicas_are_read_once(ranks: list[dict[str, Any]], i: int) -> None:
    found = [rank[f"{i} float32"] for rank in ranks]
    assert sum(rank["preadv"] for rank in found) == sum(
        whole(name).nbytes for name in found[0]["names"]
    )
    if R in MESHES[i][1]:  # and not all by one rank
        assert sum(rank["preadv"] > 0 for rank in found) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("i", range(len(MESHES)), ids=str)
def test_ranks_write_one_checkpoint_together(
    ranks: list[dict[str, Any]], i: int, dtype: str, tmp_path: Path
) -> None:
    found, kind = [rank[f"{i} {dtype}"] for rank in ranks], getattr(torch, dtype)
    alone = {name: whole(name).to(kind) for name in found[0]["names"]}
    write_checkpoint(tmp_path, entries(alone, kind), max_shard_size=100_000)
    assert files(found[0]["out"]) == files(tmp_path)
    assert sum(rank["pwrite"] for rank in found) == sum(t.nbytes for t in alone.values())
    assert sum(rank["pwrite"] > 0 for rank in found) > 1


STOPPED = {  # what rank 1 says, and the others
    "fails": ("OSError: [Errno 28] No space", "RankError: rank 1 stopped with OSError: "),
    "lost": ("ValueError: single [1, 7] cannot be written: there are [] of its rows",) * 2,
    "other": ("ValueError: rank 1 and rank 0 do not write the same tensors",) * 2,
    "elsewhere": ("OSError: ", "RankError: rank 1 stopped with"),
}


@pytest.mark.parametrize("kind", STOPPED)
def test_what_stops_one_rank_stops_all(ranks: list[dict[str, Any]], kind: str) -> None:
    for number, rank in enumerate(ranks):
        assert rank[kind].startswith(STOPPED[kind][number != 1]), rank[kind]


def test_a_failure_of_one_rank_is_one_of_all(ranks: list[dict[str, Any]]) -> None:
    """The others hear of it, or see themselves that the file is another one."""
    assert "was shortened while read" in ranks[0]["failing"]
    for rank in ranks[1:]:
        said = rank["failing"]
        assert said.startswith("RankError: rank ") or "was replaced while it was read" in said
