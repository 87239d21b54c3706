"""One run in many ways: ranks, micro-batches, packing. Losses and weights after 20 steps in fp32.

Masks are uneven, answers and rows have weights, and the loss has label smoothing and z-loss.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.numbers import relative_error
from tests.train.test_two_ranks import ROOT
from tests.train.weights import write_weighted
from tigon.train import load, prepare, start, train

STEPS = 20
SAME = {"steps": STEPS, "label_smoothing": 0.1, "z_loss": 1e-3}
KINDS: dict[str, dict[str, Any]] = {
    f"{reduction}-{layout}": {"loss_reduction": reduction} | settings
    for reduction in ("token", "sequence")
    for layout, settings in {
        "packed": {},
        "kept": {"packing": "false", "logits_to_keep": 6},
    }.items()
}
TOLERANCE = 1e-5  # relative, as the project asks; the weights differ by some 1e-7


def run_all(runs: list[list[str]]) -> None:
    """Train each in the processes that torchrun started, or this one; leave weights.pt in each."""
    with start("cpu") as world:
        for settings in runs:
            run = prepare(load(None, settings), world)
            assert train(run) == 0
            weights = {
                name: p.full_tensor() if isinstance(p, DTensor) else p
                for name, p in run.model.named_parameters()
            }
            if world.main:
                weights = {name: w.detach().clone() for name, w in weights.items()}
                torch.save(weights, Path(run.config.run_dir, "weights.pt"))


if __name__ == "__main__":
    run_all(json.loads(sys.argv[1]))


@pytest.fixture(scope="module")
def one(workspace):
    """One rank, four micro-batches a step."""
    data, held_out = map(write_weighted, (workspace.data, workspace.held_out))

    def settings(way: str, kind: str, **changes: Any) -> list[str]:
        values = SAME | KINDS[kind] | {"data": data, "eval_data": held_out} | changes
        return workspace.settings(f"equal-{kind}-{way}", **values)

    run_all([settings("one", kind) for kind in KINDS])
    return settings


def assert_equal(workspace, kind: str, way: str, reference: str = "one") -> None:
    first, second = f"equal-{kind}-{reference}", f"equal-{kind}-{way}"
    for key in ("loss", "grad_norm", "eval_loss", "eval_accuracy"):
        expected = workspace.metrics(first, key)
        assert len(expected) == (1 if key.startswith("eval") else STEPS)
        assert workspace.metrics(second, key) == pytest.approx(expected, rel=TOLERANCE), key
    old, new = (torch.load(workspace.root / run / "weights.pt") for run in (first, second))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert relative_error(new[name], weight) <= TOLERANCE, name
    assert workspace.metrics(second, "loss")[-1] != workspace.metrics(second, "loss")[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(workspace, one, ranks):
    runs = [one(f"ranks-{ranks}", kind) for kind in KINDS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "tests.train.test_equality", json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in KINDS:
        assert_equal(workspace, kind, f"ranks-{ranks}")


def test_accumulation(workspace, one):
    run_all([one("whole", kind, micro_batch_size=4) for kind in KINDS])
    for kind in KINDS:
        assert_equal(workspace, kind, "whole")


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_packed_and_padded(workspace, one, reduction):
    """All examples in every step, since a packed row holds several."""
    kind = f"{reduction}-packed"
    same = {"batch_size": 64, "micro_batch_size": 4}
    run_all([one("rows", kind, **same), one("lines", kind, **same, packing="false")])
    assert_equal(workspace, kind, "lines", "rows")
