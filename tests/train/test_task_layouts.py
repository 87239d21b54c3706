"""Tasks learn the same on ranks, packed or padded, in micro-batches, recomputed and resumed."""

from typing import Any

import numpy as np
import pytest

from tests.support.small import write_chats, write_model
from tests.train import preferences
from tests.train.ranks import train_on

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")
PREFERENCES = ("loss", "grad_norm", *REWARDS, "eval_loss", *(f"eval_{key}" for key in REWARDS))
ANSWERS = ("loss", "grad_norm", "kl", "clip_ratio/region_mean", "reward", "reward_std")
SAMPLED = {"beta": 0.1, "importance_sampling_level": "sequence", "seq_len": 64}
# Settings, metrics and tolerance; ipo, apo and simpo are dpo and cpo with other losses
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], float]] = {
    **{task: ({"task": task}, PREFERENCES, 2e-4) for task in ("dpo", "cpo", "orpo", "kto")},
    "adapter": (
        {"task": "dpo", "lora.rank": 4, "lora.alpha": 8, "lr": 1e-2},
        ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected"),
        2e-4,
    ),
    "reward": (
        {"task": "reward"},
        ("loss", "grad_norm", "accuracy", "margin", "mean_reward", "eval_loss"),
        2e-4,
    ),
    "distill": (
        {"task": "distill", "beta": 0.5, "cross_entropy_weight": 0.5, "temperature": 1.5},
        ("loss", "grad_norm", "accuracy", "kl"),
        1e-4,
    ),
    "dapo": ({"task": "grpo", "loss_type": "dapo", **SAMPLED}, ANSWERS, 5e-4),
    "grpo": ({"task": "grpo", "loss_type": "grpo", **SAMPLED}, ANSWERS, 5e-4),
}


@pytest.fixture(scope="module")
def data(workspace):
    """The settings of a task's data."""
    root = workspace.root
    rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(preferences.pairs(13, 5))]
    made = {
        "pairs": (rows, preferences.pairs(5, 9)),
        "labeled": (preferences.labeled(13, 5), preferences.labeled(5, 9)),
        "rewarded": (preferences.rewarded(14), preferences.rewarded(3, 2)),
    }
    files = {}
    for name, both in made.items():
        paths = root / f"{name}.jsonl", root / f"{name}-held-out.jsonl"
        train, held_out = (preferences.write(*pair) for pair in zip(paths, both, strict=True))
        files[name] = {"data": train, "eval_data": held_out, "eval_every": 2}
    teacher = write_model(root / "teacher", num_hidden_layers=1, hidden_size=48)
    distilled = {"data": write_chats(root / "few.jsonl", 16), "teacher": teacher}
    kinds = {"kto": files["labeled"], "grpo": files["rewarded"], "distill": distilled}
    return lambda task: kinds.get(task, files["pairs"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("case", CASES)
def test_a_task_is_the_same_in_every_layout(workspace, data, case):
    """Resumed with the same bits, on two ranks, packed, padded, and in micro-batches that are
    recomputed."""
    settings, keys, rel = CASES[case]
    same = {"steps": 4, "max_grad_norm": 0, **data(settings["task"]), **settings}
    parts = {"batch_size": 64, "micro_batch_size": 4}
    runs = {
        "": {"save_every": 2},
        "-resumed": {"resume": workspace.checkpoint(case, 2)},
        "-two": {},
        "-packed": {"batch_size": 64},
        "-padded": parts | {"packing": "false"},
        "-parts": parts | {"activation_checkpointing": "true"},
    }
    for run, changes in runs.items():
        train_on(2 if run == "-two" else 1, workspace.settings(f"{case}{run}", **same | changes))
    for key in keys:
        whole, resumed, two, packed, padded, recomputed = (
            [np.nan if x is None else x for x in workspace.metrics(f"{case}{run}", key)]
            for run in runs
        )
        assert len(whole) == (3 if key.startswith("eval_") else 4) and len(resumed) == 2
        assert resumed == pytest.approx(whole[-2:], rel=0, abs=0, nan_ok=True), key
        close = {"rel": rel, "abs": rel / 10, "nan_ok": True}
        assert two == pytest.approx(whole, **close), key
        for found in (padded, recomputed):
            assert found == pytest.approx(packed, **close), key
