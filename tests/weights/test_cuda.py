import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.saved import save
from tigon.weights import (
    TensorEntry,
    TensorSlice,
    load,
    load_into,
    prepin_staging,
    read,
    write_checkpoint,
)
from tigon.weights.read import ReadSpan, merge_reads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pinned", [4096, read.PINNED])
def test_loads_what_the_library_loads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: torch.dtype,
    target: torch.dtype,
    pinned: int,
) -> None:
    monkeypatch.setattr(read, "PINNED", pinned)
    shapes = [(999, 1001), (5000, 2048), (7,), ()]
    tensors = {f"w{i}": torch.randn(shape).to(source) for i, shape in enumerate(shapes)}
    checkpoint = save(tmp_path, tensors)
    parameters = {
        name: torch.full(tensor.shape, torch.nan, dtype=target, device="cuda")
        for name, tensor in tensors.items()
    }
    layout = {name: (TensorSlice.whole(name, tuple(t.shape)),) for name, t in tensors.items()}
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy  # what the memory's last owner has queued must not come after us
    for parameter in parameters.values():
        parameter.add_(busy[0, 0])
    load_into(parameters, layout, checkpoint)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(parameters[name].cpu(), tensor.to(target))
    columns = torch.zeros(999, 2000, dtype=target, device="cuda")
    checkpoint.read_into("w0", columns[:, :1001])
    assert torch.equal(columns[:, :1001].cpu(), tensors["w0"].to(target))
    assert not columns[:, 1001:].any()


def test_a_load_uses_what_was_pinned_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks() -> int:
        return torch.cuda.host_memory_stats()["num_host_alloc"]

    monkeypatch.setattr(load, "count_rank_cpus", lambda: 2)
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    begun, until = blocks(), time.monotonic() + 60
    with prepin_staging(torch.device("cuda")):
        while blocks() < begun + 4 and time.monotonic() < until:
            time.sleep(0.001)
    assert blocks() == begun + 4
    checkpoint = save(tmp_path, {"w": torch.randn(8000, 2000)})
    out = {"w": torch.zeros(8000, 2000, device="cuda")}
    load_into(out, {"w": (TensorSlice.whole("w", (8000, 2000)),)}, checkpoint)
    assert torch.equal(out["w"].cpu(), load_file(tmp_path / "model.safetensors")["w"])
    assert blocks() == begun + 4


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32], ids=str)
def test_columns_and_neighbours_on_the_device(tmp_path: Path, target: torch.dtype) -> None:
    stored = torch.randn(300, 64).to(torch.bfloat16)
    info = save(tmp_path, {"w": stored}).tensors["w"]
    left, right = (torch.zeros(150, 24, dtype=target, device="cuda") for _ in range(2))
    whole = torch.zeros(150, 64, dtype=target, device="cuda")
    half = info.offset + 150 * 64 * 2
    runs = [
        ReadSpan(info.path, info.offset, info.dtype, 64, 0, left),
        ReadSpan(info.path, half, info.dtype, 64, 40, right),
        ReadSpan(info.path, half, info.dtype, 64, 0, whole),
    ]
    with read.Reader() as reader:
        for transfer in merge_reads(runs, reader.max_bytes):
            reader.fill(transfer)
    assert torch.equal(left.cpu(), stored[:150, :24].to(target))
    assert torch.equal(right.cpu(), stored[150:, 40:].to(target))
    assert torch.equal(whole.cpu(), stored[150:].to(target))


def test_writes_from_the_device(tmp_path: Path) -> None:
    tensor = torch.randn(300, 200, device="cuda").t()
    write_checkpoint(tmp_path, [TensorEntry.of("w", tensor)])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensor.cpu())
    (tmp_path / "b").mkdir()
    write_checkpoint(tmp_path / "b", [TensorEntry.of("w", tensor)._replace(dtype=torch.bfloat16)])
    written = load_file(tmp_path / "b" / "model.safetensors")["w"]
    assert torch.equal(written, tensor.cpu().bfloat16())


ON_THE_SECOND = """
import sys, torch
from tigon.weights import *
device = torch.device("cuda:1")
torch.cuda.set_device(device)
checkpoint = Checkpoint.open(Repository(sys.argv[1]))
parameters = {"w": torch.empty(300, 200, device=device)}
load_into(parameters, {"w": (TensorSlice.whole("w", (300, 200)),)}, checkpoint)
write_checkpoint(sys.argv[2], [TensorEntry.of("w", parameters["w"])])
print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_of_the_second_device_takes_no_memory_of_the_first(tmp_path: Path) -> None:
    save_file({"w": torch.randn(300, 200)}, tmp_path / "model.safetensors")
    (tmp_path / "b").mkdir()
    command = [sys.executable, "-c", ON_THE_SECOND, str(tmp_path), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    expected = load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(load_file(tmp_path / "b/model.safetensors")["w"], expected)
