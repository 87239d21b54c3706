"""One run in many ways: ranks, micro-batches, packing, where its rows come from.

Losses and weights after ten steps in fp32. Masks are uneven, answers and rows have weights, and the
loss has label smoothing and z-loss.
"""

from typing import Any

import pytest

from tests.support.examples import join
from tests.support.numbers import relative_error
from tests.train.layouts import load_weights, train_all, train_once
from tests.train.ranks import Ranks
from tests.train.weights import write_weighted
from tigon.train import data

STEPS = 10
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


@pytest.fixture(scope="module")
def one(workspace):
    """Settings of a run, after one of its kind on one rank with four micro-batches a step."""
    rows, held_out = map(write_weighted, (workspace.data, workspace.held_out))

    def settings(way: str, kind: str, **changes: Any) -> list[str]:
        if way != "one":
            train_once(1, settings("one", kind))
        values = SAME | KINDS[kind] | {"data": rows, "eval_data": held_out} | changes
        return workspace.settings(f"equal-{kind}-{way}", **values)

    return settings


def assert_equal(
    workspace, kind: str, way: str, reference: str = "one", tolerance: float = TOLERANCE
) -> None:
    first, second = f"equal-{kind}-{reference}", f"equal-{kind}-{way}"
    for key in ("loss", "grad_norm", "eval_loss", "eval_accuracy"):
        expected = workspace.metrics(first, key)
        assert len(expected) == (1 if key.startswith("eval") else STEPS)
        assert workspace.metrics(second, key) == pytest.approx(expected, rel=tolerance), key
    old, new = (load_weights(workspace.root / run / "trained") for run in (first, second))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert relative_error(new[name], weight) <= tolerance, name
    assert workspace.metrics(second, "loss")[-1] != workspace.metrics(second, "loss")[0]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, ("token-kept", "sequence-packed")), (4, ("token-packed", "sequence-kept"))],
    ids=["2", "4"],
)
def test_ranks(workspace, one, ranks, kinds):
    Ranks(ranks, train_all, [one(f"ranks-{ranks}", kind) for kind in kinds]).finish(540)
    for kind in kinds:
        assert_equal(workspace, kind, f"ranks-{ranks}")


def test_accumulation(workspace, one):
    train_all([one("whole", kind, micro_batch_size=4) for kind in KINDS])
    for kind in KINDS:
        assert_equal(workspace, kind, "whole")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_packed_and_padded(workspace, one, reduction):
    """All examples in every step, since a packed row holds several."""
    kind = f"{reduction}-packed"
    same = {"batch_size": 64, "micro_batch_size": 16}
    train_all([one("rows", kind, **same), one("lines", kind, **same, packing="false")])
    assert_equal(workspace, kind, "lines", "rows")


@pytest.fixture
def sources(workspace, tmp_path, monkeypatch):
    """The rows in four files, which no cache knows; windows are smaller than an epoch."""
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    lines = write_weighted(workspace.data).read_text().splitlines(keepends=True)
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text("".join(lines[11 * i : 11 * i + 11]))
    return {"data": tmp_path / "*.jsonl", "shuffle_window": 16}


def test_cache_memory_and_stream(workspace, one, sources, monkeypatch):
    """The same bits."""
    kind = "sequence-packed"
    cached, streamed = one("cached", kind, **sources), one("stream", kind, **sources)
    train_all([cached, [*streamed, "streaming=true"]])
    made = []

    def in_memory(sources, encoder, workers, check):
        opened = [encoder.open(source) for source in sources]
        parts = [join(list(map(encoder, source.blocks()))) for source in opened]
        made.extend(parts)
        return parts

    monkeypatch.setattr(data, "tokenize", in_memory)
    train_all([one("memory", kind, **sources)])
    assert len(made) == 5  # four files, and one that is held out
    for way in ("memory", "stream"):
        assert_equal(workspace, kind, way, "cached", tolerance=0)


@pytest.mark.slow
def test_workers(workspace, one, sources, tmp_path, monkeypatch):
    """The same bits; each number has a cache of its own, where only the rows to learn are new."""
    kind = "sequence-packed"
    for workers in (0, 4):
        monkeypatch.setenv("TIGON_CACHE", str(tmp_path / f"cache-{workers}"))
        held_out = write_weighted(workspace.held_out)
        train_all([one("held-out", kind, data=held_out, run_dir=tmp_path / str(workers), steps=1)])
        train_all([one(f"workers-{workers}", kind, **sources, workers=workers)])
    assert_equal(workspace, kind, "workers-4", "workers-0", tolerance=0)
