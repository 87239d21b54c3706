"""Runs that begin with random weights on several ranks: the same weights, and memory for a part."""

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_load_memory import CONFIG
from tests.support.small import EXPERTS, write_model
from tests.train.conftest import workspace
from tests.train.ranks import Ranks, train_on
from tigon.train import load, main, start
from tigon.train.config import Parallel
from tigon.train.distributed import local
from tigon.train.model import build_model

__all__ = ["workspace"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "replicas, tensor": {"parallel.replicate": 2, "parallel.tensor": 2},
    "tensor, experts": {"parallel.tensor": 2, "parallel.expert": 4},
    "an adapter": {"lora.rank": 2, "parallel.tensor": 2},
}


@pytest.mark.slow
def test_any_ranks_begin_with_the_same_weights(workspace: Any) -> None:
    base = write_model(workspace.root / "experts", **EXPERTS | {"num_experts": 8})
    same = {"init": base / "config.json", "tokenizer": base, "model": "", "steps": 2, "lr": 1e-3}
    same |= {"dtype": "float32", "batch_size": 8}
    for name, changes in LAYOUTS.items():
        alone = {key: value for key, value in changes.items() if key.startswith("lora")}
        main(workspace.settings(f"{name}-one", **same, **alone))
        train_on(4, workspace.settings(f"{name}-four", **same, **changes))
        for key in ("loss", "grad_norm"):
            one, four = (workspace.metrics(f"{name}-{ways}", key) for ways in ("one", "four"))
            assert len(one) == 2 and four == pytest.approx(one, rel=1e-5), (name, key)


def peaks(directory: str, large: list[str], small: list[str], parallel: dict[str, int]) -> None:
    """Bytes that building the model takes at most, and that it has at the end."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    with start("cpu", parallel=Parallel(**parallel)) as world:
        build_model(load(None, small), world)  # pages of libraries are not of interest
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        model = build_model(load(None, large), world)
        held = sum(local(p).nbytes for p in model.parameters())
        found = [status("VmHWM") - before, held]
        Path(directory, f"{world.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("parallel", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_peak_of_each_rank(workspace: Any, tmp_path: Path, parallel: dict[str, int]) -> None:
    """Besides its part a rank has one module's weights."""
    deep = CONFIG | {"model_type": "llama", "vocab_size": 2001, "num_hidden_layers": 8}
    settings = []
    for name, changes in (("large", {}), ("small", {"hidden_size": 64})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(deep | changes))
        ends = {"init": path, "tokenizer": workspace.model, "model": "", "steps": 1}
        ends |= {"batch_size": 4, "micro_batch_size": 1}
        settings.append(workspace.settings(name, **ends))
    Ranks(4, peaks, str(tmp_path), *settings, parallel).finish()
    for rank in range(4):
        peak, held = json.loads((tmp_path / f"{rank}.json").read_text())
        assert 80e6 < held <= peak <= held + 24e6  # of 350e6; the largest module has 17e6
