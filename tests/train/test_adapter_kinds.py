"""Every kind of adapter learns, resumes, and is exported as PEFT computes it."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tigon
from tests.support.small import EXPERTS, write_model
from tests.train import preferences
from tests.train.checkpoints import assert_equal
from tests.train.conftest import Workspace
from tests.train.layouts import ADAPTER, assert_same_metrics, assert_same_tensors
from tigon.cli import main as command
from tigon.layers import QuantizedWeight
from tigon.train import load, main, prepare, start
from tigon.train.export import load_checkpoint

ENDS = {"model": "untied", "lora.targets": "[q_proj, embed_tokens, lm_head]"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"lora.dora": "true"},
    "ends": ENDS,
    "ends-dora": ENDS | {"lora.dora": "true"},
    "experts": {
        "model": "mixture",
        "lora.targets": "[q_proj, experts.gate_up_proj, experts.down_proj]",
    },
    "nf4": {"lora.quantize": "nf4"},
    "dropout": {"lora.dropout": 0.3},
    "reward": {"task": "reward", "data": "reward.jsonl", "eval_data": "[]"},
}
IDS = torch.arange(3, 40)[None]
Make = Callable[..., list[str]]


@pytest.fixture(scope="module")
def settings(workspace: Workspace) -> Make:
    """Settings of a run of a kind; the run of that name is made when first asked for."""
    write_model(workspace.root / "untied", tie_word_embeddings=False)
    write_model(workspace.root / "mixture", **EXPERTS)
    rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(preferences.pairs(21, 5))]
    preferences.write(workspace.root / "reward.jsonl", rows)

    def make(kind: str, run: str, **changes: Any) -> list[str]:
        evaluates = {"eval_data": workspace.held_out, "eval_every": 4}
        given = evaluates | ADAPTER | KINDS[kind] | changes
        given |= {k: workspace.root / given[k] for k in ("model", "data") if k in KINDS[kind]}
        if not (workspace.root / kind).exists() and run != kind:
            main(make(kind, kind))
        return workspace.settings(run, **given)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_checkpoints_have_the_adapter_alone(workspace, settings, kind, capsys):
    main([*settings(kind, "planned"), "--dry-run"])
    stored = workspace.tensors(kind, 4)
    said = re.search(r"([\d,]+) parameters, ([\d,]+) of them frozen", capsys.readouterr().out)
    assert said is not None
    total, frozen = (int(number.replace(",", "")) for number in said.groups())
    assert total - frozen == sum(t.numel() for t in stored.values())
    # Of the same rows before and after; pairs have no held-out ones here
    losses = workspace.metrics(kind, "loss" if kind == "reward" else "eval_loss")
    assert losses[-1] < losses[0] - 0.05
    for name in (*stored, *workspace.tensors(kind, 4, "optimizer")):
        assert ".lora_" in name or ".modules_to_save." in name or "magnitude" in name, name
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in stored}
    if kind == "lora":
        assert len(stored) == 2 * 7 * 2  # A and B of seven projections in two layers
    if kind == "ends":
        assert modules == {"q_proj", "embed_tokens", "lm_head"}
    if kind == "experts":
        a = stored["model.layers.1.mlp.experts.base_layer.lora_A.default.weight"]
        assert a.shape == (5 * 4, 64)
    assert any("magnitude" in name for name in stored) == ("dora" in kind)
    assert ("score.modules_to_save.default.weight" in stored) == (kind == "reward")


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_bits(workspace, settings, kind):
    settings(kind, "first")
    main(settings(kind, f"{kind}-resumed", resume=workspace.checkpoint(kind, 2)))
    assert len(workspace.metrics(f"{kind}-resumed", "loss")) == 2
    assert_same_metrics(workspace, kind, f"{kind}-resumed", rel=0)
    found, expected = (workspace.tensors(run, 4) for run in (f"{kind}-resumed", kind))
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_export_equals_the_runs_export(workspace, settings, kind):
    settings(kind, "first")
    run = workspace.root / kind
    assert command(["export", str(run), str(run / "again")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / "again" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert command(["export", str(run), str(run / "merged"), "--merge"]) == 0
    assert_same_tensors(run / "hf", run / "merged")
    found, _ = load_checkpoint(workspace.checkpoint(kind, 4))
    assert any(isinstance(m, QuantizedWeight) for m in found.modules()) == (kind == "nf4")
    expected = tigon.from_pretrained(run / "hf")(IDS).logits
    torch.testing.assert_close(found(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "ends", "experts"])
def test_peft_computes_the_same(workspace, settings, kind):
    base = KINDS[kind].get("model", "model")
    settings(kind, "first")
    model = AutoModelForCausalLM.from_pretrained(workspace.root / base)
    adapter = workspace.root / kind / "adapter"
    theirs = PeftModel.from_pretrained(model, str(adapter)).eval()
    ours = tigon.from_pretrained(workspace.root / base)
    plain = ours(IDS).logits
    ours.load_adapter(adapter)
    for found in (ours, tigon.from_pretrained(workspace.root / kind / "hf")):
        torch.testing.assert_close(found(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
    assert (ours(IDS).logits - plain).abs().max() > 0.05
    assert tigon.Tokenizer.from_pretrained(adapter)


def test_dropout_is_of_training_alone(workspace, settings):
    """And drawn for rows, whatever micro-batches they are in."""
    settings("dropout", "first")
    changes = {"no dropout": {"lora.dropout": 0}, "seed": {"seed": 1}}
    changes["micro"] = {"micro_batch_size": 2}
    for run, changed in changes.items():
        main(settings("dropout", run, eval_every=1, **changed))
    plain, other, micro = (workspace.metrics(run, "loss") for run in changes)
    found = workspace.metrics("dropout", "loss")
    assert found[0] == plain[0] and found[1] not in (plain[1], other[1])  # B is 0 in the first step
    assert micro == pytest.approx(found, rel=1e-5)
    evaluated = [workspace.metrics(run, "eval_loss") for run in ("no dropout", "seed")]
    assert evaluated[0][0] == evaluated[1][0]
    adapter = workspace.root / "dropout/adapter/adapter_config.json"
    assert json.loads(adapter.read_text())["lora_dropout"] == 0.3
    with start("cpu") as world:
        run = prepare(load(None, settings("dropout", "prepared")), world)
        (batch, *_) = run.data.micro_batches(0)
        assert batch.dropout_keys is not None and run.eval_data is not None
        assert all(b.dropout_keys is None for b in run.eval_data.micro_batches(0))


def test_peft_scores_the_same(workspace, settings, tmp_path):
    """The head of a reward model trains whole, as PEFT's SEQ_CLS has it."""
    settings("reward", "first")
    run = workspace.root / "reward"
    ours = tigon.from_pretrained(run / "hf")
    assert ours.config.labels == 1
    base = AutoModelForSequenceClassification.from_pretrained(workspace.model, num_labels=1)
    base.save_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    theirs.config.pad_token_id = base.config.pad_token_id = ours.config.pad_token_id
    expected = theirs(IDS).logits
    torch.testing.assert_close(ours(IDS).logits[:, -1], expected, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = tigon.from_pretrained(tmp_path / "base")
    again.load_adapter(tmp_path / "theirs")
    torch.testing.assert_close(again(IDS).logits[:, -1], expected, rtol=1e-4, atol=1e-5)


def test_ranks_do_not_share_a_checkpoint(workspace, settings, capsys):
    settings("ends", "first")
    assert command(["generate", str(workspace.root / "ends"), "a", "--tp", "2"]) == 1
    said = "a checkpoint of an adapter, which ranks cannot share: `tigon export --merge` it"
    assert said in capsys.readouterr().err
