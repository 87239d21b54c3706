"""Batch and Targets: the arguments of a forward pass, resolved once and ahead of it."""

import inspect
from typing import Any

import pytest
import torch

from tests.support.contract import assert_same_gradients, gradients, tiny_llama, tokens
from tigon.layers import KVCache
from tigon.models import Batch, CausalLM, Targets

B, T = 2, 13
PAD = torch.tensor([[1] * 9 + [0] * 4, [1] * T])
BATCHES: dict[str, dict[str, Any]] = {
    "rows": {},
    "padded": {"attention_mask": PAD},
    "packed": {"cu_seq_lens": torch.tensor([0, 4, 13, 26]), "max_length_q": 13},
    "restarting": {"position_ids": torch.tensor([[*range(6), *range(7)]] * 2)},
    "cached": {"use_cache": True},
}
TARGETS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {"labels": tokens(B, T)[1]},
    "sequence": {
        "shift_labels": tokens(B, T)[1],
        "loss_weights": torch.rand(B, T),
        "loss_reduction": "sequence",
        "num_items_in_batch": 7,
    },
    "kept": {"labels": tokens(B, T)[1], "loss_reduction": "none", "logits_to_keep": 5},
}


@pytest.mark.parametrize("of_targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("of_batch", BATCHES.values(), ids=BATCHES)
def test_equal_to_the_keywords(
    model: CausalLM, of_batch: dict[str, Any], of_targets: dict[str, Any]
) -> None:
    ids, _ = tokens(B, T)
    expected = model(ids, **of_batch, **of_targets)
    batch = Batch.of(model, ids, **of_batch)
    targets = Targets.of(batch, **of_targets)
    out = model(batch=batch, targets=targets)
    value, truth = (x.logits if x.loss is None else x.loss for x in (out, expected))
    assert torch.equal(value, truth)
    found, grads = gradients(value.sum(), model), gradients(truth.sum(), model)
    assert [name for name in grads if not torch.equal(found[name], grads[name])] == []
    if of_targets:
        assert torch.equal(targets.items, model.num_items(**of_batch, **of_targets))


def test_a_batch_with_keywords_of_targets(model: CausalLM) -> None:
    ids, labels = tokens(B, T)
    loss = model(batch=Batch.of(model, ids, attention_mask=PAD), labels=labels).loss
    assert torch.equal(loss, model(ids, attention_mask=PAD, labels=labels).loss)


def test_resolved_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, labels = tokens(B, T)
    batch = Batch.of(model, ids, attention_mask=PAD)
    targets = Targets.of(batch, labels=labels)
    for resolver in (Batch, Targets):
        monkeypatch.setattr(resolver, "of", None)
    assert model(batch=batch, targets=targets).loss.isfinite()


def test_one_declaration() -> None:
    """Whoever inspects `forward`, as help() and transformers' Trainer do, finds the keywords."""
    names = inspect.signature(tiny_llama().forward).parameters
    assert [n for n in names][:3] == ["input_ids", "batch", "targets"]
    assert all(p.kind != p.VAR_KEYWORD for p in names.values())
    parts = inspect.signature(Batch.of).parameters, inspect.signature(Targets.of).parameters
    resolved = {*parts[0], *parts[1]} - {"model"}
    outputs = {"metrics", "return_logits", "return_hidden", "criteria", "logits_at", "logits_bytes"}
    assert resolved | outputs == set(names) - {"targets"}
    assert names["labels"].default is None and "labels" not in parts[0]
    counted = inspect.signature(CausalLM.num_items).parameters
    assert set(counted) - {"self"} == set(names) - {"batch", "targets"}


@pytest.mark.slow
def test_in_one_graph() -> None:
    """Of packed sequences; test_contract_compile.py has the others, which are resolved inside."""
    model = tiny_llama(num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        torch.manual_seed(seed)
        ids, labels = tokens(B, T)
        batch = Batch.of(model, ids, **BATCHES["packed"])
        targets = Targets.of(batch, labels=labels).with_num_items(torch.tensor(9 + seed))
        loss = compiled(batch=batch, targets=targets).loss
        plain = model(batch=batch, targets=targets).loss
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
        assert_same_gradients(gradients(loss, model), gradients(plain, model))
    torch._dynamo.reset()


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_batch_serves_its_cache_once(model: CausalLM, static: bool) -> None:
    ids, _ = tokens(B, T)
    cache = model.static_cache(B, T) if static else KVCache()
    stale = Batch.of(model, ids[:, :5], past_key_values=cache)
    first = Batch.of(model, ids[:, :5], past_key_values=cache)
    with pytest.raises(ValueError, match="make each batch after"):
        model(batch=stale)
    model(batch=first)
    with pytest.raises(ValueError, match="make each batch after"):
        model(batch=first)
    out = model(batch=Batch.of(model, ids[:, 5:], past_key_values=cache))
    torch.testing.assert_close(out.logits, model(ids).logits[:, 5:])
