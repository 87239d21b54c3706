"""A prompt that is computed once for both answers changes nothing but the number of tokens."""

import math
from typing import Any

import pytest
import torch

from tests.flash import played
from tests.small import EXPERTS, write_model
from tests.train import preferences
from tests.train.ranks import train_on
from tigon.train import load, main, prepare, start
from tigon.train.loop import open_objective
from tigon.train.objectives.pairs import Pairs
from tigon.train.objectives.reward import Reward
from tigon.train.step import backward

__all__ = ["played"]
BOTH_SIDES = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
WINDOWED = {"model_type": "mistral", "sliding_window": 5}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def settings(workspace):
    pairs = preferences.write(workspace.root / "pairs.jsonl", preferences.pairs(9, 5))

    def settings(run: str, task: str = "dpo", **changes: Any) -> list[str]:
        same = {"data": pairs, "batch_size": 64, "steps": 2, "max_grad_norm": 0}
        return workspace.settings(run, task=task, **same | changes)

    return settings


@pytest.fixture
def twice(monkeypatch):
    """Prompts are computed for each answer."""

    def choose(yes: bool) -> None:
        for objective in (Pairs, Reward):
            monkeypatch.setattr(objective, "one_prompt", not yes)

    return choose


def one_step(settings: list[str]) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    """What is logged of a step whose model is not the reference any more, its gradients, and its
    tokens."""
    with start("cpu") as world:
        run = prepare(load(None, settings), world)
        open_objective(run)
        run.objective.begin(run.model)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in run.model.parameters():
                p += 0.02 * p.requires_grad * torch.randn(p.shape, generator=draw)
        with run.feed:
            values = backward(run, 0)
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


@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_gradients_are_the_same(
    settings, twice, monkeypatch, tmp_path, request, case
):
    changes = dict(CASES[case])
    for name in ("model", "reference"):
        if name in changes:
            changes[name] = write_model(tmp_path / name, **changes[name])
    if "attention" in changes:
        request.getfixturevalue("played")
        monkeypatch.setattr("tigon.train.build.check_machine", lambda *_: None)
        monkeypatch.setattr("tigon.models._model.check_backend", lambda _: None)
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


def test_what_a_run_says_and_when_it_does_not_share(workspace, settings, tmp_path, capsys):
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


def test_a_resumed_run_does_as_it_began(workspace, settings, twice, capsys):
    same = {"batch_size": 2, "save_every": 2, "steps": 4}
    main(settings("began", **same))
    source = workspace.root / "began/checkpoints/step-00000002"
    main(settings("resumed", **same, resume=source))
    losses = workspace.metrics("began", "loss")
    assert workspace.metrics("resumed", "loss") == losses[2:]
    with pytest.raises(SystemExit, match="computed each prompt once, which now cannot be"):
        main(settings("refused", **same, resume=source, packing="false"))
    adapter = {"lora.rank": 2, **same}
    main(settings("adapter", **adapter))
    other = {"resume": workspace.root / "adapter/checkpoints/step-00000002", "lora.dropout": 0.1}
    with pytest.raises(SystemExit, match=r"adapter or model: lora.dropout 0.0 -> 0.1; give the"):
        main(settings("other-adapter", **adapter, **other))
    twice(True)
    main(settings("before", **same))  # as an earlier version did
    twice(False)
    capsys.readouterr()
    source = workspace.root / "before/checkpoints/step-00000002"
    main(settings("after", **same, resume=source))
    assert "is of a run that did not" in capsys.readouterr().out
    assert workspace.metrics("after", "loss") == workspace.metrics("before", "loss")[2:]


def test_a_reference_knows_answers_that_fit_where_windows_share_alone(workspace, settings):
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


@pytest.mark.timeout(300)
def test_two_ranks(workspace, settings):
    main(settings("one", batch_size=2))
    train_on(2, settings("two", batch_size=2))
    for key in ("loss", "grad_norm", "rewards/margins"):
        expected = workspace.metrics("one", key)
        assert workspace.metrics("two", key) == pytest.approx(expected, rel=2e-4, abs=1e-6), key
