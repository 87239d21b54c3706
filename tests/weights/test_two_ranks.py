"""Loading into and writing from parameters that two processes share, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tigon.weights import Checkpoint, Part, Repository, Rows, load_into, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "wide": (1001, 64),
    "odd": (5, 3),
    "single": (1, 7),
    "stack": (3, 4, 5),
    "bias": (3,),
    "swapped": (9, 2),  # its halves, in the file the other way round
}
LAYOUT = {
    "wide": (Part.whole("wide.a", (400, 64)), Part.whole("wide.b", (601, 64), 400)),
    "odd": (Part.whole("odd", (5, 3)),),
    "single": (Part.whole("single", (1, 7)),),
    "stack": tuple(Part.whole(f"stack.{i}", (2, 5), 2 * i) for i in range(6)),
    "bias": (Part.whole("bias", (3,)),),
    "swapped": (Part("swapped", (9, 2), (Rows(4, 0, 5), Rows(0, 5, 4))),),
}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parts() -> dict[str, torch.Tensor]:
    flat = {name: t.view(-1, *LAYOUT[name][0].shape[1:]) for name, t in whole().items()}
    return {
        part.name: torch.cat([flat[name][t : t + n] for _, t, n in sorted(part.slices)])
        for name, layout in LAYOUT.items()
        for part in layout
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def rank_main(directory: Path) -> dict[str, Any]:
    preadv, counted = os.preadv, []

    def counting(*arguments: Any) -> int:
        counted.append(preadv(*arguments))
        return counted[-1]

    os.preadv = counting
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    checkpoint = Checkpoint.open(Repository(directory))
    with torch.device("meta"):
        model = Model()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    parameters: dict[str, Any] = dict(model.named_parameters())
    load_into(parameters, LAYOUT, checkpoint)
    result: dict[str, Any] = {"bytes": sum(counted)}
    result["rows"] = {name: len(p.to_local()) for name, p in parameters.items()}
    result["same"] = [
        name for name, p in parameters.items() if torch.equal(p.full_tensor(), whole()[name])
    ]

    replicated = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])
    load_into({"odd": replicated}, LAYOUT, checkpoint)
    result["replicated"] = torch.equal(replicated.to_local(), whole()["odd"])
    strided = DTensor.from_local(
        torch.zeros(3, 3), mesh, [_StridedShard(0, split_factor=2)], run_check=False
    )
    try:
        load_into({"odd": strided}, LAYOUT, checkpoint)
    except ValueError as error:
        result["strided"] = str(error)

    calls: list[str] = []

    def entry(name: str, parameter: Any) -> tuple[str, torch.Size, torch.dtype, Any]:
        def get() -> torch.Tensor:
            calls.append(name)
            return parameter.full_tensor()

        return name, parameter.shape, parameter.dtype, get

    entries = [entry(name, parameter) for name, parameter in parameters.items()]
    out = directory / "out" if rank == 0 else None
    write_checkpoint(out, entries, max_shard_size=1000)
    result["calls"] = calls.copy()
    calls.clear()
    try:  # the first shard's name is taken: the writer fails at once, the others must not hang
        write_checkpoint(out, entries, max_shard_size=1000)
    except FileExistsError as error:
        result["taken"] = str(error)
    dist.barrier()
    result["calls_of_failure"] = calls
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "out").mkdir()
    save_file(parts(), directory / "model.safetensors")
    threads = str(torch.get_num_threads())  # as this process has: the bits may depend on it
    environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(directory), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return directory, [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


def test_each_rank_reads_its_own_rows(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = ranks
    assert first["rows"] == {
        "wide": 501,
        "odd": 3,
        "single": 1,
        "stack": 2,
        "bias": 2,
        "swapped": 5,
    }
    assert second["rows"] == {
        "wide": 500,
        "odd": 2,
        "single": 0,
        "stack": 1,
        "bias": 1,
        "swapped": 4,
    }
    assert first["same"] == second["same"] == list(SHAPES)
    total = sum(tensor.nbytes for tensor in whole().values())
    assert first["bytes"] + second["bytes"] == total
    assert abs(first["bytes"] - total / 2) < 0.01 * total


def test_placements(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ranks[1]:
        assert rank["replicated"]
        assert "only Shard and Replicate() load" in rank["strided"]


def test_ranks_write_one_checkpoint_together(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, (first, second) = ranks
    assert sorted(first["calls"]) == sorted(SHAPES)
    assert first["calls"] == second["calls"]
    written = {
        name: tensor
        for path in sorted((directory / "out").glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    assert written.keys() == whole().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in whole().items())


def test_a_rank_that_cannot_write_does_not_hang_the_others(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    directory, (first, second) = ranks
    assert "model-00001-of-00002.safetensors" in first["taken"]
    assert "taken" not in second
    assert first["calls_of_failure"] == second["calls_of_failure"] == first["calls"]
    assert len(list((directory / "out").iterdir())) == 3


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    root, this_rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{root}/init", rank=this_rank, world_size=2)
    print(json.dumps(rank_main(root)))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread that still frees a tensor aborts an interpreter on its way out
