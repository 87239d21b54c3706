"""Models that score sequences: every family against transformers' class, both ways.

# B batch, T tokens
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST, reference, their_config
from tigon.models import MODELS, build, from_pretrained, load_weights, materialize
from tigon.weights import Repository

PAD = 3


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_scores_are_those_of_transformers(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case], tmp_path / "lm")
    repository = Repository(tmp_path / "lm")
    if MODELS[model_type].config_class.classifier() is None:
        with pytest.raises(ValueError, match="transformers has no class for scores of"):
            build(repository, MODELS, labels=1)
        return
    ours, weights = build(repository, MODELS, labels=1)
    materialize(ours, torch.device("cpu"))
    load_weights(ours, weights)
    head = ours.lm_head.weight
    assert head.shape == (1, 96) and head.std() > 0.2 * ours.config.initializer_range
    ours.eval().save_pretrained(tmp_path / "scores")
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scores", attn_implementation="eager"
    ).eval()
    assert theirs.config.num_labels == 1
    ids = torch.randint(4, 211, (3, 20))
    lengths = torch.tensor([20, 7, 13])
    mask = torch.arange(20) < lengths[:, None]
    ids = ids.where(mask, PAD)
    theirs.config.get_text_config().pad_token_id = PAD
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).logits
        scores = ours(ids, attention_mask=mask).logits
    assert scores.shape == (3, 20, 1)
    found = scores[torch.arange(3), lengths - 1]
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, scores)
    assert again.config.labels == 1


def test_several_labels_and_their_names_are_kept(tmp_path: Path) -> None:
    names = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}
    config = their_config("llama", **SIZES | names)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    ours = from_pretrained(tmp_path / "three")
    assert ours.config.labels == 3
    ours.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"}
    with pytest.raises(ValueError, match="the model has 3 scores of a sequence, not 1"):
        build(Repository(tmp_path / "three"), MODELS, labels=1)
