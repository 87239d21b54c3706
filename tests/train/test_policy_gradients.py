"""Policy gradients in the trainer: against the definition, ranks, packing, rows.

# G answers of a prompt
"""

from typing import Any

import numpy as np
import pytest
import torch

import tigon
from tests.support.small import write_model
from tests.train import preferences
from tigon.data.encode_answers import compute_advantages
from tigon.train import main

CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"epsilon_high": 0.28},
    "dr_grpo": {"max_completion_length": 20, "delta": 1.1},
    "cispo": {"importance_sampling_level": "sequence", "epsilon_high": 5},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def data(workspace) -> Any:
    return preferences.write(workspace.root / "rewarded.jsonl", preferences.rewarded(14))


@pytest.fixture(scope="module")
def other(workspace) -> Any:
    return write_model(workspace.root / "other", num_hidden_layers=1)


def definition(
    workspace: Any, other: Any, kind: str, beta: float, settings: dict[str, Any]
) -> float:
    """Of the untrained model, an answer at a time, in fp64."""
    models = [tigon.from_pretrained(path) for path in (workspace.model, other)]
    low = 0.2
    high = settings.get("epsilon_high", low)
    total, tokens, encode = 0.0, 0, 0
    for row in preferences.rewarded(14):
        rewards = np.array(row["rewards"])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for ids, old, advantage in zip(
            row["completions"], row["old_logprobs"], advantages, strict=True
        ):
            whole = torch.tensor([*row["prompt"], *ids])
            first = len(row["prompt"])
            with torch.no_grad():
                own, reference = (
                    m(whole[None])
                    .logits[0, first - 1 : -1]
                    .double()
                    .log_softmax(-1)
                    .gather(1, whole[first:, None])[:, 0]
                    for m in models
                )
            ratio = (own - torch.tensor(old, dtype=torch.float64)).exp()
            if settings.get("importance_sampling_level") == "sequence":
                ratio = (own - torch.tensor(old)).mean().exp().expand(len(ids))
            if kind == "cispo":
                each = -ratio.clamp(max=high) * advantage * own
            else:
                free = ratio.clamp(max=settings.get("delta", np.inf))
                bounded = ratio.clamp(1 - low, 1 + high)
                each = -torch.minimum(free * advantage, bounded * advantage)
            each = each + beta * ((reference - own).exp() - (reference - own) - 1)
            total += (each.mean() if kind == "grpo" else each.sum()).item()
            tokens, encode = tokens + len(ids), encode + 1
    counts = {"grpo": encode, "dr_grpo": encode * settings.get("max_completion_length", 0)}
    return total / counts.get(kind, tokens)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kind", CASES)
def test_the_first_loss_is_the_definition(workspace, data, other, kind, beta):
    name = f"first-{kind}-{beta}"
    own = {"task": "grpo", "loss_type": kind, "steps": 1, "batch_size": 64, **CASES[kind]}
    own |= {"beta": beta, "reference": other} if beta else {}
    main(workspace.settings(name, data=data, **own))
    expected = definition(workspace, other, kind, beta, CASES[kind])
    assert workspace.metrics(name, "loss")[0] == pytest.approx(expected, rel=2e-5, abs=1e-6)
    rewards = np.concatenate([row["rewards"] for row in preferences.rewarded(14)])
    assert workspace.metrics(name, "reward")[0] == pytest.approx(rewards.mean(), rel=1e-12)
    assert workspace.metrics(name, "reward_std")[0] == pytest.approx(rewards.std(ddof=1), rel=1e-12)


def test_without_old_logprobs_the_first_ratios_are_one(workspace, tmp_path):
    rows = [{k: v for k, v in r.items() if k != "old_logprobs"} for r in preferences.rewarded(4)]
    data = preferences.write(tmp_path / "plain.jsonl", rows)
    main(workspace.settings("plain", task="grpo", data=data, steps=1, batch_size=64))
    weights = [len(a) for row in rows for a in row["completions"]]
    advantages = np.concatenate([compute_advantages(np.array(row["rewards"])) for row in rows])
    expected = -(advantages * weights).sum() / sum(weights)
    assert workspace.metrics("plain", "loss")[0] == pytest.approx(expected, rel=1e-5)
    assert workspace.metrics("plain", "grad_norm")[0] > 1e-3


@pytest.mark.parametrize("given", ["rewards", "some", "equal", "none"])
def test_what_is_logged_of_rewards(workspace, tmp_path, given):
    """Of the rows that have any; equal ones have no deviation, whatever rounding does."""
    rows = preferences.rewarded(6)
    for i, row in enumerate(rows):
        if given == "equal":
            row["rewards"] = [0.1] * 3
        if given == "none" or (given == "some" and i < 4):
            row["advantages"] = row.pop("rewards")
    name = f"logged-{given}"
    data = preferences.write(tmp_path / f"{given}.jsonl", rows)
    main(workspace.settings(name, task="grpo", data=data, steps=1, batch_size=64, eval_data=data))
    rewards = np.concatenate([row["rewards"] for row in rows if "rewards" in row] or [[np.nan]])
    mean, deviation = rewards.mean(), rewards.std(ddof=1) if len(rewards) > 1 else np.nan
    if given == "equal":
        deviation = 0.0
    for prefix in ("", "eval_"):
        (found,) = workspace.metrics(name, f"{prefix}reward")
        if given == "none":
            assert found is None
            assert workspace.metrics(name, f"{prefix}reward_std")[0] is None
            continue
        assert found == pytest.approx(mean, rel=1e-12)
        (found,) = workspace.metrics(name, f"{prefix}reward_std")
        assert found == (pytest.approx(deviation, rel=1e-12) if deviation else 0)


def test_advantages_are_those_of_trl():
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = torch.tensor([0.1, 0.7, 0.2, 1.5])
    expected = (rewards - rewards.mean()) / (utils.nanstd(rewards) + 1e-4)
    assert compute_advantages(rewards.numpy()) == pytest.approx(expected.numpy(), rel=1e-5)
    assert compute_advantages(np.full(3, 0.1)).tolist() == [0.0] * 3  # whose mean is not quite 0.1


TEXT = {"prompt": "the model", "completions": [" reads", " says"], "rewards": [1, 0]}


@pytest.mark.slow
def test_rows_that_teach_nothing_are_counted(workspace, tmp_path, capsys):
    equal, zero = TEXT | {"rewards": [0.1, 0.1]}, TEXT | {"rewards": None, "advantages": [0, 0]}
    one = TEXT | {"completions": [" reads"], "rewards": None, "advantages": [2]}

    def said(name: str, *rows: dict[str, Any]) -> list[str]:
        path = preferences.write(tmp_path / f"{name}.jsonl", list(rows))
        main(workspace.settings(name, task="grpo", data=path, steps=1))
        return [x for x in capsys.readouterr().out.splitlines() if "teach" in x]

    told = "rows have equal rewards or advantages of 0, which teach nothing"
    assert said("equal", TEXT, equal, one, zero) == [f"data: 2 of 4 {told}"]
    assert said("all", equal, equal) == [f"data: 2 of 2 {told}"]
    assert said("none", TEXT, one) == []
