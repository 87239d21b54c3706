"""What a run on a GPU says: MFU, memory, where the time goes; and that looking changes no bit."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.small import write_chats
from tests.train.conftest import workspace
from tests.train.ranks import train_on_gpus
from tigon.train import main
from tigon.train.logging import read_metrics
from tigon.train.throughput import peak_flops

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

STEPS = {"steps": 6, "eval_every": 3, "batch_size": 8, "device": "cuda", "log_every": 1}
BITS = ("loss", "grad_norm", "eval_loss", "eval_accuracy")


def test_samples_sets_and_profiles_change_no_bit(workspace, capsys):
    """On the default of a GPU: bfloat16 through FSDP2; and without FSDP, in one dtype."""
    other = write_chats(workspace.root / "other.jsonl", 5, seed=7)
    for name, changes in (("fsdp", {}), ("plain", {"dtype": "float32"})):
        same = {**STEPS, **changes}
        plain = f"[{workspace.held_out}, {other}]"
        main(workspace.settings(f"gpu-{name}-silent", eval_data=plain, **same))
        capsys.readouterr()
        settings = {"eval_data": f"{{first: {workspace.held_out}, second: {other}}}"}
        settings |= {"sample_prompts": "[the model, who asked]", "sample_tokens": 12}
        settings |= {"profile": "{start: 2, steps: 2}"}
        main(workspace.settings(f"gpu-{name}-seen", **settings, **same))
        said = capsys.readouterr().out
        for key in BITS:
            values = workspace.metrics(f"gpu-{name}-seen", key)
            assert values == workspace.metrics(f"gpu-{name}-silent", key), (name, key)
        assert "  first: loss" in said and '  "the model" -> "' in said
        names = kernels(workspace.root / f"gpu-{name}-seen")
        assert re.search("gemm|nvjet", names)
        assert name == "plain" or re.search("flash|fmha|attention|sdpa", names)
        rows = read_metrics(workspace.root / f"gpu-{name}-seen/metrics.jsonl")
        assert all(0 < r["memory_gib"] <= r["memory_reserved_gib"] for r in rows if "loss" in r)
        dtype = torch.bfloat16 if name == "fsdp" else torch.float32
        if peak_flops(torch.device("cuda", 0), dtype) is not None:
            assert all(0 < r["mfu"] < 1 for r in rows if "loss" in r)
            assert re.search(r"MFU: of [\d.]+ TFLOP/s \(NVIDIA .*, bfloat16, dense\)", said)
            assert re.search(r"step 6/6  loss .*  MFU +\d+\.\d%", said)
        else:
            assert all(r["mfu"] is None for r in rows if "loss" in r)


def kernels(run_dir: Path) -> str:
    """Returns the names of the kernels in a run's trace, one a line."""
    with gzip.open(run_dir / "profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    return "\n".join(event["name"] for event in events if event.get("cat") == "kernel")


def test_two_gpus_sample_in_step(workspace):
    """Both ranks make the same passes, and collectives are a kind of their own."""
    same = {**STEPS, "eval_data": workspace.held_out}
    train_on_gpus(workspace.settings("gpu-two-silent", **same))
    same |= {"sample_prompts": "[the model, who asked]", "sample_tokens": 12}
    train_on_gpus(workspace.settings("gpu-two-seen", profile="{start: 2, steps: 2}", **same))
    for key in BITS:
        values = workspace.metrics("gpu-two-seen", key)
        assert values == pytest.approx(workspace.metrics("gpu-two-silent", key), rel=1e-6), key
    rows = read_metrics(workspace.root / "gpu-two-seen/samples.jsonl")
    assert [row["step"] for row in rows] == [0, 0, 3, 3, 6, 6]
    assert "nccl" in kernels(workspace.root / "gpu-two-seen")
