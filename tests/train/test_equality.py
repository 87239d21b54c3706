"""One run on several ranks, and in other micro-batches.

Losses and weights after ten steps in fp32. Masks are uneven, answers and rows have weights, and the
loss has label smoothing and z-loss.
"""

from typing import Any

import pytest

from tests.train.layouts import assert_same_run, train_all, train_once
from tests.train.ranks import Ranks
from tests.train.weights import write_weighted

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


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, ("token-kept", "sequence-packed")), (4, ("token-packed", "sequence-kept"))],
    ids=["2", "4"],
)
def test_ranks(workspace, one, ranks, kinds):
    Ranks(ranks, train_all, [one(f"ranks-{ranks}", kind) for kind in kinds]).finish(540)
    for kind in kinds:
        assert_same_run(workspace, f"equal-{kind}-one", f"equal-{kind}-ranks-{ranks}")


def test_accumulation(workspace, one):
    train_all([one("whole", kind, micro_batch_size=4) for kind in KINDS])
    for kind in KINDS:
        assert_same_run(workspace, f"equal-{kind}-one", f"equal-{kind}-whole")
