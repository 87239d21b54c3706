"""Runs that begin with random weights on several ranks: the same weights, and memory for a part."""

import ctypes
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_load_memory import CONFIG
from tests.support.small import EXPERTS, write_model
from tests.train.conftest import workspace
from tests.train.ranks import Ranks, train_on
from tigon import Qwen3Moe
from tigon.models import init
from tigon.settings.config import Parallel
from tigon.train import load, main, start
from tigon.train.distributed import local
from tigon.train.model import build_model
from tigon.weights import local_rows

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


def compare_shards(settings: list[str], parallel: dict[str, int]) -> None:
    """Asserts that this rank has its part of what one process draws, and draws not much more."""
    init.CHUNK, draw_normal, marked, rows = 256, init._draw_normal, 0, 0

    def count_rows(weight: Tensor, std: float, seeds: Iterator[int], marks: Tensor) -> None:
        nonlocal marked, rows
        marked, rows = marked + int(marks.sum()), rows + len(marks)
        draw_normal(weight, std, seeds, marks)

    config = load(None, settings)
    torch.manual_seed(config.seed)
    values = json.loads(Path(config.init).read_text())
    whole = dict(Qwen3Moe.from_config(values, device="cpu").named_parameters())
    init._draw_normal = count_rows
    with start("cpu", parallel=Parallel(**parallel)) as world:
        model = build_model(config, world)
        for name, parameter in model.named_parameters():
            memory, first = local_rows(name, parameter)
            spec = model.shard_specs.get(name)
            shard = whole[name] if spec is None else spec.take(whole[name])
            assert torch.equal(memory, shard[first : first + len(memory)]), name
        assert 0.2 < marked / rows < (0.3 if parallel == {"fsdp": 4} else 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"fsdp": 4}, {"tensor": 2, "expert": 4}], ids=str)
def test_each_rank_draws_its_part(workspace: Any, parallel: dict[str, int]) -> None:
    base = write_model(workspace.root / f"parts-{len(parallel)}", **EXPERTS | {"num_experts": 8})
    ends = {"init": base / "config.json", "tokenizer": base, "model": "", "dtype": "float32"}
    settings = workspace.settings("parts", **ends, batch_size=8, micro_batch_size=1)
    Ranks(4, compare_shards, settings, parallel).finish()


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
