"""Reward models: TRL's curve, what transformers makes of the export, ranks, refusals."""

from typing import Any

import pytest
import torch

import tigon
from tests.support.small import write_model
from tests.train import preferences
from tests.train.test_preference_curves import ROWS, assert_same, ours, theirs
from tigon.cli import main as cli
from tigon.models import MODELS, build, load_weights, materialize
from tigon.train import main
from tigon.weights import Repository

KEYS = ("loss", "grad_norm", "accuracy", "margin", "mean_reward")


@pytest.fixture(scope="module")
def data(workspace) -> Any:
    rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(preferences.pairs(13, 5))]
    return preferences.write(workspace.root / "reward-pairs.jsonl", rows)


@pytest.fixture(scope="module")
def classifier(workspace) -> Any:
    """The workspace's model with the head that a run of seed 0 begins with."""
    model, weights = build(Repository(workspace.model), MODELS, labels=1)
    materialize(model, torch.device("cpu"))
    load_weights(model, weights)
    directory = workspace.root / "classifier"
    model.save_pretrained(directory, tokenizer=tigon.Tokenizer.from_pretrained(workspace.model))
    return directory


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_trl(workspace, classifier, center):
    trl = pytest.importorskip("trl")
    rows = [row | {"margin": i % 3 / 2} for i, row in enumerate(preferences.pairs(ROWS, 4))]
    own = {"task": "reward", "center_rewards_coefficient": center}
    run = ours(workspace, f"reward-{center}", rows, **own)
    options = {"center_rewards_coefficient": center or None}
    found = theirs(workspace, trl.RewardTrainer, trl.RewardConfig, rows, classifier, **options)
    assert_same(workspace, run, found, "accuracy", "margin", "mean_reward")


def test_transformers_scores_of_the_export(workspace, data, capsys):
    transformers = pytest.importorskip("transformers")
    main(workspace.settings("exported", task="reward", data=data, steps=4, export="true"))
    path = workspace.root / "exported/hf"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    assert theirs.config.num_labels == 1 and theirs.score.weight.shape == (1, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.pad_token_id == theirs.config.pad_token_id != tokenizer.eos_token_id
    texts = [
        tokenizer.apply_chat_template([*row["prompt"], *row["chosen"]], tokenize=False)
        for row in preferences.pairs(5, 8)
    ]
    texts.append("the model says<|endoftext|>")
    cli(["info", str(path)])
    said = capsys.readouterr().out
    assert "LlamaForSequenceClassification (llama)" in said and "a head of 1 scores" in said
    model = tigon.from_pretrained(path)
    assert model.config.labels == 1
    expected = []
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            expected.append(model(ids[None]).logits[0, -1])
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            scores = theirs(**batch).logits
        torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
    again = workspace.root / "again"
    model.save_pretrained(again)
    main(workspace.settings("goes-on", task="reward", data=data, steps=1, model=path))


@pytest.mark.timeout(300)
def test_sequences_without_a_prompt_in_common(workspace, tmp_path):
    """Alone in a row and packed; pairs of other tasks must have one."""
    rows = [
        {"chosen": f"{chosen} {prompt}", "rejected": rejected}
        for prompt, chosen, rejected in preferences.answers(12, 6)
        if chosen.split()[0] != rejected.split()[0]
    ]
    data = preferences.write(tmp_path / "whole.jsonl", rows)
    same = {"task": "reward", "data": data, "steps": 2, "batch_size": 64}
    main(workspace.settings("whole-packed", **same))
    main(workspace.settings("whole-padded", **same, packing="false"))
    for key in KEYS:
        packed, padded = (workspace.metrics(f"whole-{name}", key) for name in ("packed", "padded"))
        assert packed == pytest.approx(padded, rel=2e-4, abs=1e-6), key
    with pytest.raises(SystemExit, match="chosen and rejected answer different prompts"):
        main(workspace.settings("whole-dpo", **same | {"task": "dpo"}))


def test_classes_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for kind, family in MODELS.items():
        name = family.config_class.classifier()
        assert name is None or hasattr(transformers, name), kind
        architecture = family.config_class.architecture
        plain = architecture.replace("ForCausalLM", "ForSequenceClassification")
        assert name is not None or plain == architecture or not hasattr(transformers, plain), kind


def test_what_cannot_be_is_refused(workspace, data, classifier, tmp_path, capsys):
    granite = write_model(tmp_path / "granite", model_type="granite")
    settings = {"task": "reward", "data": data}
    with pytest.raises(SystemExit, match="transformers has no class for scores of 'granite'"):
        main(workspace.settings("granite", **settings, model=granite))
    with pytest.raises(SystemExit, match="task=reward trains it, and task=sft a language model"):
        main(workspace.settings("sft", model=classifier))
    main(workspace.settings("cpo", task="cpo", data=data, steps=1))
    with pytest.raises(SystemExit, match="goes on with a model that predicts tokens, and task=rew"):
        main(workspace.settings("cpo", **settings, steps=2, resume="auto"))
    assert cli(["eval", "perplexity", str(classifier), str(data), "--device", "cpu"]) == 1
    said = (
        f"{classifier} is a reward model: it scores sequences and predicts no token, so it has no"
    )
    assert said in capsys.readouterr().err
    model = tigon.from_pretrained(classifier)
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="scores sequences and predicts no token"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="cannot write any"):
        model.generate(ids)
