"""A rank of several that share a model reads its part with next to no memory besides: of each
layer, or its own experts, whole, or its share of the weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tigon

ROOT = Path(__file__).resolve().parents[2]
RANKS = 8
CONFIG = {  # 72 million parameters: 290 MB, and 36 MB for each rank
    "vocab_size": 20_001,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
EXPERTS = CONFIG | {  # 54 million parameters of experts, and 9 million others
    "vocab_size": 4_001,
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
}
SCRIPT = f"""
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import tigon
from tigon.train.distributed import local

torch.set_num_threads(1)

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def load(path, rank, dtype, name="tensor", **how):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size={RANKS})
    mesh = init_device_mesh("cpu", ({RANKS},), mesh_dim_names=(name,))
    return tigon.from_pretrained(path, mesh=mesh, dtype=getattr(torch, dtype), **how)

def warm_up(rank):  # what a first call imports, and pages of libraries, are not of interest
    for name in ("tensor", "fsdp"):
        load(small, rank, "bfloat16", name)
        dist.destroy_process_group()

large, small, experts = sys.argv[1:]
WAYS = (
    (large, "float32", {{}}),
    (large, "bfloat16", {{}}),
    (experts, "float32", {{"expert_parallel": True}}),
    (large, "float32", {{"name": "fsdp"}}),
)
warm_up(0)
for rank in range({RANKS}):
    for path, dtype, how in WAYS:
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            continue
        warm_up(rank)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
        model = load(path, rank, dtype, **how)
        peak = status("VmHWM") - before
        print(peak, sum(local(p).nbytes for p in model.parameters()), flush=True)
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_of_each_rank(tmp_path: Path) -> None:
    """One after the other, in forks of a process that knows no other rank; as the file has it, and
    in another dtype."""
    small = CONFIG | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    whole_bytes = {}
    for name, config in (("small", small), ("large", CONFIG), ("experts", EXPERTS)):
        kind = tigon.models.MODELS[config.get("model_type", "llama")]
        whole = kind.from_config(config, device="meta").to_empty(device="cpu")
        whole_bytes[name] = sum(p.nbytes for p in whole.parameters())
        with torch.no_grad():
            for p in whole.parameters():
                p.zero_()  # which numbers they are does not matter
        whole.save_pretrained(tmp_path / name, max_shard_size="100MB")
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(tmp_path / n) for n in ("large", "small", "experts"))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [tuple(map(int, line.split())) for line in output.splitlines()]
    large, experts = (whole_bytes[name] / RANKS for name in ("large", "experts"))
    shares = [large, large / 2, experts, large] * RANKS  # as WAYS has them
    for i, ((peak, held), share) in enumerate(zip(found, shares, strict=True)):
        assert share > 15e6 and held <= 1.05 * share
        assert 0.95 * held <= peak <= 1.2 * share, f"rank {i // 4}: {peak} bytes for {held}"
