"""transformers' Trainer with Tigon's models: every number is that of transformers' own model."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.integrations.transformers.peers import (
    MODELS,
    checkpoint,
    exported,
    losses,
    make_rows,
    pair,
    train,
)
from tests.models.tiny import load_reference
from tests.train.ranks import Ranks
from tigon.integrations.transformers import from_pretrained

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"every_n_layers": 2},
    },
    "neftune": {"neftune_noise_alpha": 5.0},
}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float) -> None:
    """The same tensors, with values within `most`."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= most, name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_curves(model_type: str, variant: str, tmp_path: Path) -> None:
    theirs, ours = pair(model_type)
    for model in (theirs, ours):
        model.config.output_router_logits = model_type == "qwen3_moe"
    expected = train(theirs, tmp_path / "theirs", **VARIANTS[variant])
    actual = train(ours, tmp_path / "ours", **VARIANTS[variant])
    if variant == "checkpointing":
        assert ours.is_activation_checkpointing
    assert len(losses(actual)) == 12 and losses(actual)[0] > losses(actual)[-1] + 0.5
    np.testing.assert_allclose(losses(actual), losses(expected), rtol=0, atol=1e-5)
    assert_same(exported(ours, tmp_path / "o"), exported(theirs, tmp_path / "t"), 2e-3)


def train_both(directory: Path, target: Path) -> None:
    """Writes the losses of transformers' model and Tigon's, trained on the ranks there are."""
    both = []
    for load in (load_reference, from_pretrained):
        model = load(directory)
        model.config.output_router_logits = True
        settings = {"ddp_backend": "gloo", "max_steps": 6, "activation_checkpointing": True}
        both.append(losses(train(model, target / load.__name__, **settings)))
    if os.environ["RANK"] == "0":
        (target / "losses.json").write_text(json.dumps(both))


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    Ranks(2, train_both, checkpoint("qwen3_moe"), tmp_path).finish()
    theirs, ours = json.loads((tmp_path / "losses.json").read_text())
    assert len(theirs) == 6
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


# Evaluation


def count_right(prediction: Any) -> dict[str, float]:
    """How many of the labels are the most likely tokens, and the sum of logits."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    known = labels != -100
    return {
        "right": float((logits.argmax(-1) == labels)[known].mean()),
        "sum": float(np.abs(logits[known]).mean()),
    }


def take_first(logits: Any, labels: Tensor) -> Tensor:
    """The logits of the first 50 tokens."""
    assert isinstance(logits, Tensor)
    return logits[..., :50]


@pytest.mark.parametrize("settings", [{}, {"preprocess_logits_for_metrics": take_first}])
def test_compute_metrics(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"compute_metrics": count_right, "eval_dataset": make_rows((9, 9, 9, 9, 9))}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    found = []
    for model, name in zip(pair("llama"), ("theirs", "ours"), strict=True):
        trainer = train(model, tmp_path / name, max_steps=4, **settings)
        rows = [r for r in trainer.state.log_history if "eval_loss" in r]
        found.append([[r[f"eval_{key}"] for key in ("loss", "right", "sum")] for r in rows])
    assert len(found[0]) == 2
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


def test_metrics_without_logits(tmp_path: Path) -> None:
    theirs, _ = pair("llama")
    directory = checkpoint("llama")
    options = {"metrics": ("predicted_tokens",), "return_logits": False}
    ours = from_pretrained(directory, tigon_options=options)
    shapes = []

    def right(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        chosen, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        return {"right": float((chosen == labels)[labels != -100].mean())}

    rows = make_rows((9, 9, 9, 9))
    both = []
    for model, metric in ((theirs, count_right), (ours, right)):
        settings = {"eval_dataset": rows, "compute_metrics": metric}
        trainer = train(model, tmp_path / "run", max_steps=12, **settings)
        both.append(trainer.evaluate(make_rows((11, 11, 11, 11)[:2])))
    assert shapes == [(2, 11)]
    assert both[1]["eval_right"] == both[0]["eval_right"]
    assert both[1]["eval_loss"] == pytest.approx(both[0]["eval_loss"], abs=1e-5)


# Files and resuming

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6, "max_steps": 12}


@pytest.mark.parametrize("model_type", MODELS)
def test_resume_equals_a_run_without_a_break(model_type: str, tmp_path: Path) -> None:
    directory = checkpoint(model_type)
    whole = train(from_pretrained(directory), tmp_path, **SAVING)
    resumed = from_pretrained(directory)
    again = train(resumed, tmp_path / "2", resume=str(tmp_path / "checkpoint-6"), **SAVING)
    assert losses(again) == losses(whole)
    for name, p in whole.model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], p), name


# transformers itself finds no experts in the checkpoints that it writes of a mixture
@pytest.mark.parametrize(
    "first, model_type",
    [("transformers", m) for m in MODELS] + [("Tigon", m) for m in MODELS if m != "qwen3_moe"],
)
def test_resume_across_libraries(first: str, model_type: str, tmp_path: Path) -> None:
    theirs, ours = pair(model_type)
    begin, end = (theirs, ours) if first == "transformers" else (ours, theirs)
    whole = train(begin, tmp_path / "whole", **SAVING)
    resumed = train(
        end, tmp_path / "resumed", resume=str(tmp_path / "whole/checkpoint-6"), **SAVING
    )
    np.testing.assert_allclose(losses(resumed), losses(whole), rtol=0, atol=1e-5)
    assert_same(exported(end, tmp_path / "o"), exported(begin, tmp_path / "t"), 2e-3)


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    model = from_pretrained(checkpoint("llama"))
    settings = {**SAVING, "eval_strategy": "steps", "eval_steps": 6, "greater_is_better": True}
    # The worst, since both are better than the first, and the last would be loaded by chance
    settings |= {"load_best_model_at_end": True, "eval_dataset": make_rows((9, 9, 9, 9))}
    trainer = train(model, tmp_path, **settings)
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert evaluated[0] > evaluated[1]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    best = from_pretrained(tmp_path / "checkpoint-6")
    for name, p in best.state_dict().items():
        assert torch.equal(model.state_dict()[name], p), name


def test_a_full_disk_leaves_no_new_directory(tmp_path: Path, monkeypatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    _, model = pair("llama")
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    for existing in (True, False):
        if existing:
            (tmp_path / "True").mkdir()
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained(tmp_path / str(existing))
    assert [path.name for path in tmp_path.iterdir()] == ["True"]


@pytest.mark.parametrize("model_type", MODELS)
def test_saved_files(model_type: str, tmp_path: Path) -> None:
    theirs, ours = pair(model_type)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    ours.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert len(set(index["weight_map"].values())) > 1
    ids = torch.randint(4, 200, (2, 9))
    expected = theirs(ids).logits
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(read.eval()(ids).logits, expected)
    assert_same(exported(ours, tmp_path / "o"), exported(ours.native, tmp_path / "native"), 0)
