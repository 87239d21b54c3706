"""Every placement of a parameter over four ranks: each has its own part, bit for bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.parallel.ranks import run_on_ranks
from tigon.weights import Checkpoint, Repository, TensorSlice, load_into

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
}
SHAPES = {
    "fused": (17, 6),
    "apart": (3, 4, 7),
    "stacked": (3, 5, 6),
    "vector": (7,),
    "vectors": (3, 5),
    "scalar": (),
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
            ((_, target, length),) = part.rows
            found[part.name] = flat[target : target + length].reshape(part.shape).clone()
    return found


def case(
    directory: Path, sizes: tuple[int, ...], placements: tuple[Placement, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """What this rank got wrong, and the bytes that it read."""
    preadv, counted = os.preadv, []

    def counting(*arguments: Any) -> int:
        counted.append(preadv(*arguments))
        return counted[-1]

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
    os.preadv = counting
    try:
        load_into(parameters, LAYOUT, checkpoint, ignored=checkpoint.tensors.keys(), workers=2)
    finally:
        os.preadv = preadv
    wrong = [
        n for n, p in parameters.items() if not torch.equal(p.to_local(), expected[n].to_local())
    ]
    return {"wrong": wrong, "bytes": sum(counted), "names": names}


def failing(directory: Path) -> str:
    """One rank cannot read; all say so, and none waits for ever."""
    mesh = init_device_mesh("cpu", (4,))
    parameter = distribute_tensor(torch.zeros(7), mesh, [R], src_data_rank=None)
    checkpoint = Checkpoint.open(Repository(directory))
    dist.barrier()
    if dist.get_rank() == 0:  # it reads the only parameter
        os.truncate(directory / "model.safetensors", 8)
    try:
        load_into({"vector": parameter}, LAYOUT, checkpoint, ignored=checkpoint.tensors.keys())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def every_case(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{i} {dtype}": case(directory, *MESHES[i], getattr(torch, dtype))
        for i in range(len(MESHES))
        for dtype in ("float32", "bfloat16")
    }
    return found | {"failing": failing(directory)}


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
    assert sum(rank["bytes"] for rank in found) == sum(
        whole(name).nbytes for name in found[0]["names"]
    )
    if R in MESHES[i][1]:  # and not all by one rank
        assert sum(rank["bytes"] > 0 for rank in found) > 1


def test_a_failure_of_one_rank_is_one_of_all(ranks: list[dict[str, Any]]) -> None:
    assert "was shortened while read" in ranks[0]["failing"]
    for rank in ranks[1:]:
        assert (
            rank["failing"]
            == "RuntimeError: another rank could not read the checkpoint: it says why"
        )
