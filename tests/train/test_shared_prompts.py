"""A prompt that is computed once for both answers changes nothing but the number of tokens."""

import math
from typing import Any

import pytest
import torch

from tests.support.flash import played
from tests.support.small import EXPERTS, write_model
from tests.train import preferences
from tigon.train import load, main, prepare, start
from tigon.train.tasks.grpo import GRPO
from tigon.train.tasks.preference import PairTask
from tigon.train.tasks.reward import Reward
from tigon.train.trainer import forward_backward, open_task

__all__ = ["played"]
pytestmark = pytest.mark.usefixtures("empty_cache")
BOTH_SIDES = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
WINDOWED = {"model_type": "mistral", "sliding_window": 5}


def uneven_groups() -> list[dict[str, Any]]:
    """Of 2 to 7 answers, and one: some are longer than a row of 64 tokens with their prompt."""
    rows = [r for each in range(2, 8) for r in preferences.rewarded(2, each, each=each)]
    alone = {"prompt": [5, 6, 7], "completions": [[8, 9]], "advantages": [0.7]}
    rows += [{**alone, "old_logprobs": [[-5.0, -6.0]]}]
    return [row | {"prompt": row["prompt"] * 4} for row in rows]


@pytest.fixture
def settings(workspace):
    pairs = preferences.write(workspace.root / "pairs.jsonl", preferences.pairs(9, 5))

    rewarded = preferences.write(workspace.root / "rewarded.jsonl", uneven_groups())

    def settings(run: str, task: str = "dpo", **changes: Any) -> list[str]:
        if changes.get("weights"):
            few = preferences.write(workspace.root / "few.jsonl", uneven_groups()[:3])
            changes["data"] = f"[{{path: {rewarded}, weight: 3}}, {{path: {few}, weight: 1}}]"
            del changes["weights"]
        same = {
            "data": rewarded if task == "grpo" else pairs,
            "batch_size": 64,
            "steps": 2,
            "max_grad_norm": 0,
        }
        return workspace.settings(run, task=task, **same | changes)

    return settings


@pytest.fixture
def twice(monkeypatch):
    """Prompts are computed for each answer."""

    def choose(yes: bool) -> None:
        for objective in (PairTask, Reward, GRPO):
            monkeypatch.setattr(objective, "one_prompt", not yes)

    return choose


def one_step(settings: list[str]) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    """What is logged of a step whose model is not the reference any more, its gradients, and its
    tokens."""
    with start("cpu") as world:
        run = prepare(load(None, settings), world)
        open_task(run)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in run.model.parameters():
                p += 0.02 * p.requires_grad * torch.randn(p.shape, generator=draw)
        with run.prefetcher:
            values, _ = forward_backward(run, 0)
        gradients = {n: p.grad for n, p in run.model.named_parameters() if p.requires_grad}
        return values, gradients, run.data.counts(0)[0]


CASES: dict[str, dict[str, Any]] = {
    **{task: {"task": task} for task in ("dpo", "ipo", "simpo", "orpo", "cpo", "reward")},
    "adapters": {"lora.rank": 3},
    "another reference": {"reference": {"num_hidden_layers": 1}},
    "stream": {"streaming": "true", "shuffle_window": 64},
    "recomputed": {"activation_checkpointing": "true", "micro_batch_size": 2},
    "window": {"model": WINDOWED},
    "gradients alone": {"sharding": "gradients", "accumulate_fp32": "true"},
    "fa4": {"attention": "fa4", "model": WINDOWED},
    "flash": {"attention": "flash"},
}
GROUPS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.28, "micro_batch_size": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 9, "delta": 1.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5, "importance_sampling_level": "sequence"},
    "reference": {"beta": 0.1},
    "another": {"beta": 0.1, "reference": {"num_hidden_layers": 1}},
    "its base": {"beta": 0.1, "lora.rank": 3},
    "streams": {"beta": 0.1, "streaming": "true", "shuffle_window": 64},
    "mixture": {"weights": True, "shuffle_window": 40},
    "cut": {"max_length": 20, "beta": 0.1},
    "left out": {"max_length": 25, "truncate": "false", "beta": 0.1},
    "groups in windows": {"model": WINDOWED},
    "groups of fa4": {"attention": "fa4", "model": WINDOWED},
    "groups of flash": {"attention": "flash"},
}
CASES |= {name: {"task": "grpo", "seq_len": 64, **own} for name, own in GROUPS.items()}


FAST = {"dpo", "reward", "adapters", "window", "dapo", "groups in windows"}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in CASES]
)
def test_losses_metrics_and_gradients_are_the_same(
    settings, twice, monkeypatch, tmp_path, request, case
):
    changes = dict(CASES[case])
    for name in ("model", "reference"):
        if name in changes:
            changes[name] = write_model(tmp_path / name, **changes[name])
    if "attention" in changes:
        request.getfixturevalue("played")
        monkeypatch.setattr("tigon.train.build.check_training", lambda *_, **__: None)
        monkeypatch.setattr("tigon.models.base.check_backend", lambda _: None)
    found = []
    for name in ("once", "twice"):
        twice(name == "twice")
        found.append(one_step(settings(f"{case}-{name}", **changes)))
    (values, gradients, tokens), (expected, exact, before) = found
    assert tokens < 0.9 * before
    assert values == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        error = (gradient - exact[name]).norm() / exact[name].norm()
        assert error < 1e-5, name
        assert exact[name].norm() > 0


@pytest.mark.slow
def test_run_says_why_prompts_are_not_shared(workspace, settings, tmp_path, capsys):
    experts = write_model(tmp_path / "experts", **EXPERTS, output_router_logits=True)
    both_sides = write_model(tmp_path / "both-sides", **BOTH_SIDES)

    def said(name: str, **changes: Any) -> str:
        main(settings(name, steps=1, **changes))
        return next(x for x in capsys.readouterr().out.splitlines() if "each " in x)

    assert "data: each prompt is computed once for its answers" in said("said")
    for name, changes, why in (
        ("lines", {"packing": "false"}, "packing=false"),
        ("dropout", {"lora.rank": 2, "lora.dropout": 0.1}, "lora.dropout=0.1 is drawn for"),
        ("sides", {"reference": both_sides}, "not all layers of Gemma3 are causal attention"),
        ("experts", {"model": experts}, "the balance of experts, which is part of the loss"),
    ):
        assert f"prompts are computed for each answer: {why}" in said(name, **changes)
    balanced = {"model": experts, "router_aux_loss_coef": 0}
    assert "computed once" in said("unbalanced", **balanced)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_a_resumed_run_does_as_it_began(workspace, settings, twice, capsys, task):
    same = {"task": task, "beta": 0.1, "batch_size": 2, "save_every": 2, "steps": 4}

    def run(name: str, began: str = "", **changes: Any) -> list[float]:
        if began:
            changes["resume"] = workspace.checkpoint(f"{task}-{began}", 2)
        main(settings(f"{task}-{name}", **same, **changes))
        return workspace.metrics(f"{task}-{name}", "loss")

    assert run("began")[2:] == run("resumed", "began")
    with pytest.raises(SystemExit, match="computed each prompt once, which now cannot be"):
        run("refused", "began", packing="false")
    adapter = {"lora.rank": 2}
    run("adapter", **adapter)
    with pytest.raises(SystemExit, match=r"adapter or model: lora.dropout 0.0 -> 0.1; give the"):
        run("other-adapter", "adapter", **adapter, **{"lora.dropout": 0.1})
    twice(True)
    losses = run("before")  # as an earlier version did
    twice(False)
    capsys.readouterr()
    assert run("after", "before") == losses[2:]
    assert "is of a run that did not" in capsys.readouterr().out


def test_reference_of_windows_that_share_alone(workspace, settings):
    """What all pairs share together is too little to pay; in the window of a long one it is not."""
    words = "the model reads some words"
    long = {"prompt": f"{words} " * 6, "chosen": words * 2, "rejected": f"{words} {words}:" * 2}
    short = [
        {"prompt": "a", "chosen": f"{words} {i}" * 4, "rejected": f"{i} {words}" * 4}
        for i in range(60)
    ]
    data = preferences.write(workspace.root / "uneven.jsonl", [long, *short])
    same = {"data": data, "shuffle_window": 3, "batch_size": 8, "steps": 1, "lr": 0}
    main(settings("uneven", **same))
    assert workspace.metrics("uneven", "loss") == pytest.approx([math.log(2)], abs=1e-6)


KEYS = {
    "dpo": ("loss", "grad_norm", "rewards/margins"),
    "grpo": ("loss", "grad_norm", "kl", "clip_ratio/region_mean", "reward", "reward_std"),
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", KEYS)
def test_held_out_rows(workspace, settings, twice, task):
    for name in ("once", "twice"):
        twice(name == "twice")
        own = settings(f"{task}-held-{name}", task=task, beta=0.1, seq_len=64, steps=1, lr=0)
        (data,) = (x.removeprefix("data=") for x in own if x.startswith("data="))
        main([*own, f"eval_data={data}"])
    for key in (f"eval_{key}" for key in KEYS[task] if key != "grad_norm"):
        (expected,) = workspace.metrics(f"{task}-held-twice", key)
        (found,) = workspace.metrics(f"{task}-held-once", key)
        assert found == pytest.approx(expected, rel=1e-5, abs=2e-6), key
