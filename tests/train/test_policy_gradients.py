"""Policy gradients in the trainer: against the definition, ranks, packing, rows.

# G answers of a prompt
"""

from typing import Any

import numpy as np
import pytest
import torch

import tigon
from tests.small import write_model
from tests.train import preferences
from tigon.data import encode
from tigon.data.encode import RewardedEncoder, compute_advantages
from tigon.data.examples import Example
from tigon.train import load, main
from tigon.train.tasks import find_task

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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_ranks_packing_and_resuming_change_nothing(workspace, data, kind):
    same = {"task": "grpo", "data": data, "loss_type": kind, "steps": 4, "max_grad_norm": 0}
    same |= {"beta": 0.1, "importance_sampling_level": "sequence", "seq_len": 64}

    def make(run: str, **changes: Any) -> list[str]:
        return workspace.settings(run, **same | changes)

    keys = ("loss", "grad_norm", "kl", "clip_ratio/region_mean", "reward", "reward_std")
    preferences.assert_same_in_every_layout(workspace, make, kind, keys, rel=5e-4)
    for key in ("reward", "reward_std"):  # summed in float64
        expected = pytest.approx(workspace.metrics(kind, key), rel=1e-12)
        assert workspace.metrics(f"{kind}-two", key) == expected


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


def test_data_without_a_column_of_rewards_still_train(workspace, monkeypatch, tmp_path, capsys):
    """As an earlier version has cached them."""
    data = preferences.write(tmp_path / "old.jsonl", preferences.rewarded(6))
    run = {"task": "grpo", "data": data, "steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(RewardedEncoder, "per_example", {"advantage": np.float32})
        patch.setattr(
            encode, "Example", lambda i, t, e: Example(i, t, {"advantage": e["advantage"]})
        )
        main(workspace.settings("earlier", **run))
    capsys.readouterr()
    main(workspace.settings("later", **run))
    assert "data: reward is not logged: an earlier version" in capsys.readouterr().out
    assert workspace.metrics("later", "loss") == workspace.metrics("earlier", "loss")
    assert not workspace.metrics("later", "reward")


def test_advantages_are_those_of_trl():
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = torch.tensor([0.1, 0.7, 0.2, 1.5])
    expected = (rewards - rewards.mean()) / (utils.nanstd(rewards) + 1e-4)
    assert compute_advantages(rewards.numpy()) == pytest.approx(expected.numpy(), rel=1e-5)
    assert compute_advantages(np.full(3, 0.1)).tolist() == [0.0] * 3  # whose mean is not quite 0.1


TEXT = {"prompt": "the model", "completions": [" reads", " says"], "rewards": [1, 0]}


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1]}, "'rewards' must be a list of numbers, 2 of them"),
        ({"rewards": [1, "x"]}, "'rewards' has 'x' in it, which is no finite number"),
        (
            {"completions": [" reads"], "rewards": [1]},
            "'rewards' of one answer teach nothing, as its advantage is 0: give 'advantages', or "
            "at least two 'completions'",
        ),
        ({"advantages": [1, 0]}, "needs either 'rewards' or 'advantages', and has both"),
        ({"rewards": None}, "needs either 'rewards' or 'advantages', and has neither"),
        ({"completions": []}, "'completions' must be a list of answers"),
        ({"completions": [" reads", ""]}, "'completions' has no answer: it is empty"),
        ({"completions": [" reads", 3]}, "'completions' has int in it"),
        ({"old_logprobs": [[-1.0]]}, "'old_logprobs' must have a list for each of the 2 answers"),
        ({"old_logprobs": [[-1.0], [-1.0]]}, "'old_logprobs' has 1 numbers for the"),
        ({"prompt": [3, 4]}, "'prompt' is a list of tokens, and so must each answer be one"),
    ],
)
def test_bad_rows_are_refused(workspace, tmp_path, changes, message):
    path = preferences.write(tmp_path / "bad.jsonl", [TEXT, TEXT | changes])
    with pytest.raises(SystemExit, match=f"bad.jsonl:2: .*{message}"):
        main(workspace.settings("bad", task="grpo", data=path, steps=1))


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("loss_type=dr_grpo", "max_completion_length=None with loss_type=dr_grpo"),
        ("max_completion_length=9", "max_completion_length=9 with loss_type=dapo"),
        ("reference=x", "reference=x with beta=0 has no effect"),
        ("loss_type=hinge", "loss_type=hinge of task=grpo is not one of dapo, grpo"),
        ("desirable_weight=2", "desirable_weight=2: task=grpo has no use for it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(world, given, message):
    config = load(None, ["run_dir=a", "model=m", "data=a.jsonl", "task=grpo", *given.split()])
    with pytest.raises(ValueError, match=message):
        find_task("grpo")(config, world)
