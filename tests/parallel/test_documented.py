"""The Python of docs/parallel.md runs, on two ranks, and computes what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.support.small import write_model
from tests.train.ranks import Ranks

DOCUMENT = Path(__file__).parents[2] / "docs/parallel.md"


def run(blocks: list[str], directory: str) -> None:
    """The script up to its end, then the step of a training loop."""
    script, step = blocks
    script = re.sub('MODEL = ".*"', f"MODEL = {directory!r}", script)
    script, end = script.rsplit("\n", 2)[0], script.rstrip().rsplit("\n", 1)[1]
    found: dict[str, Any] = {}
    exec(script, found)
    exec(step, found)
    print(f"norm {found['norm'].item():.6f}")
    exec(end, found)


def test_generation_and_a_training_step(tmp_path):
    write_model(tmp_path / "model")
    blocks = re.findall("```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    chosen = [b for b in blocks if "capital" in b or "sum_gradients" in b]
    printed = Ranks(2, run, chosen, str(tmp_path / "model")).finish()
    model = tigon.from_pretrained(tmp_path / "model")
    tokenizer = tigon.Tokenizer.from_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    text = tokenizer.decode(model.generate(ids, max_new_tokens=16)[0].tolist())
    assert printed.count(text) == 1
    model(ids, labels=ids).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    norms = [float(n) for n in re.findall(r"norm ([\d.]+)", printed)]
    assert norms == [pytest.approx(norm, rel=1e-5)] * 2
