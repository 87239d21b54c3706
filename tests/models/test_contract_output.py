"""What a forward pass returns: read as transformers' outputs are, exported, and without labels."""

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.support.contract import tokens
from tigon.models import CausalLM, CausalLMOutput

IDS, LABELS = tokens()


@pytest.mark.parametrize("given", ["loss", "logits", "loss logits", "logits past_key_values"])
def test_as_transformers_outputs(given: str) -> None:
    names = given.split()
    values: dict[str, Any] = {name: torch.rand(3) for name in names}
    ours, theirs = CausalLMOutput(**values), CausalLMOutputWithPast(**values)
    # From 5.24 on transformers calls it so, and takes the older name for it
    assert [name.replace("past_key_values", "cache") for name in ours] == list(theirs)
    assert list(ours) == list(ours.keys()) == names
    assert len(ours) == len(theirs)
    for i, name in enumerate(names):
        assert ours[name] is theirs[i] is ours[i] is values[name]
        assert name in ours and ours.to_tuple()[i] is values[name]
    assert ours[-1] is theirs[-1] and ours[:1] == theirs[:1]
    assert dict(ours) == values and dict(**ours) == values
    assert dict(ours.items()) == values and list(ours.values()) == list(values.values())
    assert ("loss" in ours) == ("loss" in theirs)
    with pytest.raises(KeyError, match="'aux_loss': this output has"):
        ours["aux_loss"]
    with pytest.raises(IndexError):
        ours[len(names)]


def test_unpacked(model: CausalLM) -> None:
    out = model(IDS, labels=LABELS, return_logits=True, metrics=("nll",))
    loss, logits = out[:2]
    assert loss is out.loss and logits is out.logits and out["metrics"] is out.metrics
    alone = model(IDS, labels=LABELS)
    assert alone.to_tuple() == alone[:2] == (alone.loss,)
    assert "past_key_values" not in out and "metrics" not in model(IDS)


def test_a_pytree(model: CausalLM) -> None:
    out = model(IDS, labels=LABELS, metrics=("nll", "z"))
    leaves, spec = torch.utils._pytree.tree_flatten(out)
    assert [x.shape for x in leaves if x is not None] == [(), IDS.shape, IDS.shape]
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, CausalLMOutput) and again.loss is out.loss
    assert again.metrics == out.metrics


@pytest.mark.parametrize("strict", [False, True])
def test_export(model: CausalLM, strict: bool) -> None:
    given = {"labels": LABELS, "return_logits": True}
    expected = model(IDS, **given)
    exported = torch.export.export(model, (IDS,), given, strict=strict)
    out = exported.module()(IDS, **given)
    assert isinstance(out, CausalLMOutput)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.logits, expected.logits)
    other, labels = tokens()
    out = exported.module()(other, **given | {"labels": labels})
    torch.testing.assert_close(out.loss, model(other, labels=labels).loss)


def test_one_name_for_metrics(model: CausalLM) -> None:
    out = model(IDS, labels=LABELS, metrics="accuracy")
    expected = model(IDS, labels=LABELS, metrics=("accuracy",))
    assert out.metrics == expected.metrics and len(out.metrics) == 1
    model.defaults.metrics = "accuracy"
    assert model(IDS, labels=LABELS).metrics == expected.metrics
