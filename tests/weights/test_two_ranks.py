"""Loading into and writing from parameters that two processes share, over gloo."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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

SHAPES = {
    "wide": (1001, 64),
    "odd": (5, 3),
    "single": (1, 7),
    "stack": (3, 4, 5),
    "bias": (3,),
    "swapped": (9, 2),  # its halves, in the file the other way round
}
LAYOUT = {
    "wide": (TensorSlice.whole("wide.a", (400, 64)), TensorSlice.whole("wide.b", (601, 64), 400)),
    "odd": (TensorSlice.whole("odd", (5, 3)),),
    "single": (TensorSlice.whole("single", (1, 7)),),
    "stack": tuple(TensorSlice.whole(f"stack.{i}", (2, 5), 2 * i) for i in range(6)),
    "bias": (TensorSlice.whole("bias", (3,)),),
    "swapped": (TensorSlice("swapped", (9, 2), (RowSpan(4, 0, 5), RowSpan(0, 5, 4))),),
}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parts() -> dict[str, torch.Tensor]:
    flat = {name: t.view(-1, *LAYOUT[name][0].shape[1:]) for name, t in whole().items()}
    return {
        part.name: torch.cat([flat[name][t : t + n] for _, t, n in sorted(part.rows)])
        for name, layout in LAYOUT.items()
        for part in layout
    }


COLUMNS = ("columns", "both")
WELL = ("sharded", "replicated", "hybrid", "whole mesh", *COLUMNS)
KINDS = (*WELL, "lost", "other", "fails", "elsewhere")


def columns(tensor: torch.Tensor) -> int:
    """The last dimension; of a stack, the one before."""
    return (0, 1, 1)[tensor.dim() - 1]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def results(directory: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    checkpoint = Checkpoint.open(Repository(directory))
    with torch.device("meta"):
        model = Model()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    parameters: dict[str, Any] = dict(model.named_parameters())
    load_into(parameters, LAYOUT, checkpoint)
    result: dict[str, Any] = {}
    result["rows"] = {name: len(p.to_local()) for name, p in parameters.items()}
    result["same"] = [
        name for name, p in parameters.items() if torch.equal(p.full_tensor(), whole()[name])
    ]
    strided = DTensor.from_local(
        torch.zeros(3, 3), mesh, [_StridedShard(0, split_factor=2)], run_check=False
    )
    try:
        load_into({"odd": strided}, LAYOUT, checkpoint)
    except ValueError as error:
        result["strided"] = str(error)

    result["written"] = {kind: written(directory / kind, kind, parameters) for kind in KINDS}
    return result


def written(out: Path, kind: str, sharded: dict[str, Any]) -> int | str:
    """The bytes that this rank writes; or what stops it."""
    first = dist.get_rank() == 0
    meshes = {"hybrid": (2, 1), "whole mesh": (1, 2), "columns": (1, 2), "both": (2, 1)}
    parameters = sharded
    if kind == "replicated":
        parameters = whole()
    elif kind in meshes:
        mesh = init_device_mesh("cpu", meshes[kind])
        first_place = Shard(0) if kind == "both" else Replicate()
        parameters = {
            name: distribute_tensor(
                t, mesh, [first_place, Shard(columns(t) if kind in COLUMNS else 0)]
            )
            for name, t in whole().items()
        }
    found = make_entries(parameters, LAYOUT, torch.float32)
    if kind == "lost":  # a row that nobody has
        (piece,) = next(entry for entry in found if entry.name == "single").blocks or (None,)
        found = [entry._replace(blocks=[]) if piece in entry.blocks else entry for entry in found]
    if kind == "other" and not first:
        found = found[1:]
    if kind == "elsewhere" and not first:  # a directory of the same name on another machine
        Path.is_file = lambda path: False  # type: ignore[method-assign, assignment]
    if kind == "fails" and not first:
        found = [e._replace(blocks=[p._replace(read=broken) for p in e.blocks]) for e in found]
    pwrite, counted = os.pwrite, []

    def counting(*arguments: Any) -> int:
        counted.append(pwrite(*arguments))
        return counted[-1]

    os.pwrite = counting
    try:
        write_checkpoint(out if first else None, found, max_shard_size=100_000)
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.pwrite = pwrite
    return sum(counted)


def broken(first: int, count: int) -> torch.Tensor:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        (directory / kind).mkdir()
    save_file(parts(), directory / "model.safetensors")
    return directory, run_on_ranks(2, results, directory)


def test_each_rank_reads_its_own_rows(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = ranks
    assert first["rows"] == dict(zip(SHAPES, (501, 3, 1, 2, 2, 5), strict=True))
    assert second["rows"] == dict(zip(SHAPES, (500, 2, 0, 1, 1, 4), strict=True))
    assert first["same"] == second["same"] == list(SHAPES)
    assert "only Shard and Replicate() load" in first["strided"]


@pytest.mark.parametrize("kind", WELL)
def test_ranks_write_one_checkpoint_together(
    kind: str, ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    directory, results = ranks
    each = [result["written"][kind] for result in results]
    assert sum(each) == sum(tensor.nbytes for tensor in parts().values())
    assert min(each) > 0.2 * sum(each)
    write_checkpoint(tmp_path, make_entries(whole(), LAYOUT, torch.float32), max_shard_size=100_000)
    assert files(directory / kind) == files(tmp_path)
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("fails", ["RankError: rank 1 stopped with OSError: ", "OSError: [Errno 28] No space"]),
        ("lost", ["ValueError: single [1, 7] cannot be written: there are [] of its rows"] * 2),
        ("other", ["ValueError: rank 1 and rank 0 do not write the same tensors"] * 2),
        ("elsewhere", ["RankError: rank 1 stopped with", "OSError: rank 1 does not see "]),
    ],
)
def test_what_stops_one_rank_stops_all(
    kind: str, messages: list[str], ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    directory, results = ranks
    for result, message in zip(results, messages, strict=True):
        assert result["written"][kind].startswith(message)
    assert files(directory / kind) == {}
