"""Runs that adapt embedding, head and what scores: ranks, resuming, exports, reward models."""

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tigon
from tests.small import write_model
from tests.train import preferences
from tests.train.ranks import train_on
from tests.train.test_lora import SETTINGS, step, tensors
from tigon.cli import main as command
from tigon.train import main

ENDS = {"lora.targets": "[q_proj, embed_tokens, lm_head]", "steps": 4}


def same(workspace: Any, run: str, other: str, *, first: int = 0) -> None:
    for key in ("loss", "grad_norm"):
        expected = workspace.metrics(other, key)[first:]
        assert workspace.metrics(run, key) == pytest.approx(expected, rel=1e-5), key


def same_files(workspace: Any, run: str, other: str) -> None:
    same(workspace, run, other)
    for name in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        one, two = (load_file(workspace.root / r / name) for r in (run, other))
        assert one.keys() == two.keys()
        for tensor in two:
            torch.testing.assert_close(one[tensor], two[tensor], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def settings(workspace):
    untied = write_model(workspace.root / "untied", tie_word_embeddings=False)

    def make(run: str, **changes: Any) -> list[str]:
        own = SETTINGS | ENDS | {"model": untied, "lora.merge": "true"} | changes
        return workspace.settings(run, **own)

    main(make("ends"))
    return make


def test_embedding_and_head(workspace, settings, capsys):
    losses = workspace.metrics("ends", "loss")
    assert losses[-1] < losses[0] - 0.1
    stored = tensors(step(workspace, "ends", 4))
    assert {n.rpartition(".lora_")[0].rpartition(".")[2] for n in stored} == {
        "q_proj", "embed_tokens", "lm_head",
    }  # fmt: skip
    run = workspace.root / "ends"
    untied, ids = workspace.root / "untied", torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(untied)
    expected = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(ids).logits
    found = tigon.from_pretrained(run / "hf")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - tigon.from_pretrained(untied)(ids).logits).abs().max() > 0.05
    assert command(["generate", str(run), "a", "--tp", "2"]) == 1
    assert (
        "a checkpoint of an adapter, which ranks cannot share: `tigon export --merge` it"
        in capsys.readouterr().err
    )
    assert command(["export", str(run), str(run / "merged"), "--merge"]) == 0
    merged, hf = (load_file(run / name / "model.safetensors") for name in ("merged", "hf"))
    assert all(torch.equal(merged[name], hf[name]) for name in hf)
    main([*settings("planned"), "--dry-run"])
    trained = sum(t.numel() for t in stored.values())
    assert f"{trained:,} of them trained" in capsys.readouterr().out


def test_resumed_and_on_two_ranks(workspace, settings):
    main(settings("ends-again", resume=step(workspace, "ends", 2)))
    same(workspace, "ends-again", "ends", first=2)
    last = tensors(step(workspace, "ends", 4))
    for name, values in tensors(step(workspace, "ends-again", 4)).items():
        assert torch.equal(values, last[name])
    train_on(2, settings("ends-two", activation_checkpointing="true"))
    same_files(workspace, "ends-two", "ends")


def test_lengths_on_two_ranks(workspace, settings):
    """Of an embedding's columns, which no rank has whole."""
    dora = {"lora.dora": "true", "steps": 2}
    main(settings("lengths", **dora))
    train_on(2, settings("lengths-two", **dora))
    same_files(workspace, "lengths-two", "lengths")
    one, plain = (
        load_file(workspace.root / run / "hf/model.safetensors") for run in ("lengths", "ends")
    )
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert (one[name] - plain[name]).abs().max() > 1e-4


@pytest.fixture(scope="module")
def reward(workspace):
    rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(preferences.pairs(21, 5))]
    data = preferences.write(workspace.root / "reward-rows.jsonl", rows)
    own = {"task": "reward", "data": data, "steps": 4, "lora.merge": "true"}

    def make(run: str, **changes: Any) -> list[str]:
        return workspace.settings(run, **SETTINGS | own | changes)

    main(make("reward"))
    return make


def test_reward_models(workspace, reward, tmp_path):
    """The head trains whole, as PEFT's SEQ_CLS has it."""
    stored = tensors(step(workspace, "reward", 4))
    assert "score.modules_to_save.default.weight" in stored
    run = workspace.root / "reward"
    written = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert written["task_type"] == "SEQ_CLS"
    assert written["modules_to_save"] == ["score"]
    ours = tigon.from_pretrained(run / "hf")
    assert ours.config.labels == 1
    base = AutoModelForSequenceClassification.from_pretrained(workspace.model, num_labels=1)
    base.save_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    ids = torch.arange(3, 40)[None]
    theirs.config.pad_token_id = base.config.pad_token_id = ours.config.pad_token_id
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids).logits[:, -1], expected, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = tigon.from_pretrained(tmp_path / "base")
    again.load_adapter(tmp_path / "theirs")
    torch.testing.assert_close(again(ids).logits[:, -1], expected, rtol=1e-4, atol=1e-5)
    assert command(["export", str(run), str(run / "merged"), "--merge"]) == 0
    merged, hf = (load_file(run / name / "model.safetensors") for name in ("merged", "hf"))
    assert "score.weight" in hf and all(torch.equal(merged[name], hf[name]) for name in hf)


def test_reward_models_resume_and_divide(workspace, reward):
    main(reward("reward-again", resume=step(workspace, "reward", 2)))
    same(workspace, "reward-again", "reward", first=2)
    train_on(2, reward("reward-two"))
    same(workspace, "reward-two", "reward")
