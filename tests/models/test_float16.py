"""Families whose published models overflow float16 say so; others load in it without a word."""

import warnings
from pathlib import Path

import pytest
import torch

import tigon
from tests.models.tiny import CASES, reference
from tigon.models import MODELS

GEMMAS = ("gemma", "gemma2", "gemma3_text")
MESSAGE = "exceed the range of float16"


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_who_says_it(model_type: str, tmp_path: Path) -> None:
    sizes = next(iter(CASES[model_type].values()))
    reference(model_type, sizes | {"pad_token_id": None}, tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = tigon.from_pretrained(tmp_path, dtype="bfloat16")
        assert MESSAGE not in str([str(w.message) for w in said])
        tigon.from_pretrained(tmp_path, dtype="float16")
        loaded = [str(w.message) for w in said if MESSAGE in str(w.message)]
        model.half()
        model.half()  # which changes nothing
    cast = [str(w.message) for w in said if MESSAGE in str(w.message)][len(loaded) :]
    assert len(loaded) == len(cast) == (model_type in GEMMAS)
    assert all("use bfloat16 or float32" in text for text in loaded + cast)


def test_what_it_warns_of(tmp_path: Path) -> None:
    reference("gemma3_text", {}, tmp_path)
    model = tigon.from_pretrained(tmp_path, dtype="float32")
    ids = torch.arange(5)[None]
    with torch.no_grad():  # as wide as published models are at some tokens
        model.model.embed_tokens.weight.mul_(1e5 / model.model.embed_tokens(ids).abs().max())
        assert model(ids).logits.isfinite().all()
        assert model.bfloat16()(ids).logits.isfinite().all()
        with pytest.warns(UserWarning, match=MESSAGE):
            model.half()
        assert model(ids).logits.isnan().any()
