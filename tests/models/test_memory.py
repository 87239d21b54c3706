"""Loading needs the parameters' memory and next to nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tigon

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {  # 104 million parameters
    "vocab_size": 40_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
SCRIPT = """
import os
import sys
from pathlib import Path
import torch
import tigon.models, tigon.parallel  # code that a load imports is not measured

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

for path, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    model = tigon.from_pretrained(path, dtype=getattr(torch, dtype))
    assert not {"torch._dynamo", "torch.distributed.fsdp", "transformers"} & sys.modules.keys()
    print(status("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
    break
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    with torch.no_grad():
        model = tigon.Llama.from_config(CONFIG)
        model.save_pretrained(directory / "float32", max_shard_size="100MB")
        model.bfloat16().save_pretrained(directory / "bfloat16")
    return directory


@pytest.mark.slow(first=1)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_of_from_pretrained(checkpoints: Path) -> None:
    """Each in a fork of one process, as to import torch takes seconds."""
    cases = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]
    given = [part for source, target in cases for part in (str(checkpoints / source), target)]
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(found) == len(cases)
    for (source, target), (peak, size) in zip(cases, found, strict=True):
        assert size > 200e6
        assert 0.95 * size <= peak <= 1.1 * size, f"{source} as {target}"
