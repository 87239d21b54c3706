"""Policy gradients in the trainer: the loss with a reference, and what is logged of rewards.

Without a reference, test_preference_curves.py has TRL's curves of all losses.
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

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_loss_with_a_reference_is_the_definition(workspace, tmp_path):
    """Of the untrained model, an answer at a time, in fp64."""
    rows, losses = preferences.rewarded(14), []
    other = write_model(tmp_path / "other", num_hidden_layers=1)
    models = [tigon.from_pretrained(path) for path in (workspace.model, other)]
    for row in rows:
        rewards, first = np.array(row["rewards"]), len(row["prompt"])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        answers = zip(row["completions"], row["old_logprobs"], advantages, strict=True)
        for ids, old, advantage in answers:
            whole = torch.tensor([*row["prompt"], *ids])
            with torch.no_grad():
                logits = [model(whole[None]).logits[0, first - 1 : -1].double() for model in models]
            own, reference = (
                x.log_softmax(-1).gather(1, whole[first:, None])[:, 0] for x in logits
            )
            ratio = (own - torch.tensor(old, dtype=torch.float64)).exp()
            each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses.append(each + 0.1 * ((reference - own).exp() - (reference - own) - 1))
    data = preferences.write(tmp_path / "rewarded.jsonl", rows)
    changes = {"steps": 1, "batch_size": 64, "beta": 0.1, "reference": other}
    main(workspace.settings("first", task="grpo", data=data, **changes))
    (found,) = workspace.metrics("first", "loss")
    assert found == pytest.approx(torch.cat(losses).mean().item(), rel=2e-5, abs=1e-6)


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
