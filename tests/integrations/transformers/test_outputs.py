"""What a call of Tigon's PreTrainedModel returns: transformers' outputs, losses and fields."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.integrations.transformers.peers import (
    FAMILIES,
    MODELS,
    B,
    T,
    assert_near,
    checkpoint,
    inputs,
    pair,
    score_pair,
)
from tests.models.tiny import CASES, reference
from tigon.integrations.transformers import from_pretrained


@pytest.mark.slow(first=12)
@pytest.mark.parametrize("model_type, case", FAMILIES)
def test_families(model_type: str, case: str, tmp_path: Path) -> None:
    theirs = reference(model_type, CASES[model_type][case], tmp_path)
    ours = from_pretrained(tmp_path)
    assert isinstance(ours, PreTrainedModel)
    assert type(ours).__name__ == type(theirs).__name__
    assert type(ours.config) is type(theirs.config)
    # Order too, by which optimizer.pt goes
    shapes = [[(n, p.shape) for n, p in m.named_parameters()] for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(
        exclude_embeddings=True
    )
    padded = inputs() | {"attention_mask": (torch.arange(T) < 8).expand(B, T).clone()}
    padded["labels"][:, 8:] = -100
    for given in (inputs(), padded):
        expected, actual = theirs(**given, use_cache=False), ours(**given)
        assert_near(actual.loss, expected.loss)
        known = given.get("attention_mask", torch.ones(B, T)).bool()
        assert_near(actual.logits[known], expected.logits[known])
    hidden = theirs.model(given["input_ids"]).last_hidden_state
    assert_near(ours.base_model(given["input_ids"]).last_hidden_state, hidden)


@pytest.mark.parametrize("model_type", MODELS)
def test_outputs_of_transformers(model_type: str) -> None:
    theirs, ours = pair(model_type)
    moe = model_type == "qwen3_moe"
    flags: dict[str, Any] = {"output_hidden_states": True}
    flags |= {"output_router_logits": True} if moe else {}
    given = inputs() | flags
    expected, actual = theirs(**given, use_cache=False), ours(**given)
    assert list(actual.keys()) == list(expected.keys())
    for name, value in expected.items():
        if isinstance(value, tuple):
            assert len(value) == len(actual[name])
            for mine, other in zip(actual[name], value, strict=True):
                assert_near(mine, other)
        else:
            assert_near(actual[name], value)
    loss, *rest = ours(**given, return_dict=False)
    assert torch.equal(loss, actual.loss) and len(rest) == len(actual.keys()) - 1
    base = {key: value for key, value in given.items() if key != "labels"}
    expected, actual = (model.base_model(**base) for model in (theirs, ours))
    for mine, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_near(mine, other)
    assert ("router_logits" in actual) == moe


@pytest.mark.parametrize(
    "training, options, given, names",
    [
        (True, {}, {}, ["loss", "logits"]),
        (True, {}, {"skip_logits": True}, ["loss"]),
        (True, {"return_logits": False}, {}, ["loss"]),
        (True, {}, {"return_logits": True}, ["loss", "logits"]),
        (True, {}, {"skip_logits": False}, ["loss", "logits"]),
        (False, {}, {}, ["loss", "logits"]),
        (False, {}, {"skip_logits": True}, ["loss"]),
        (False, {"return_logits": False}, {}, ["loss"]),
        (False, {"return_logits": False}, {"return_logits": True}, ["loss", "logits"]),
        (True, {"metrics": ("entropy",)}, {}, ["loss", "logits", "entropy"]),
        (True, {"metrics": ("entropy",)}, {"metrics": ("nll",)}, ["loss", "logits", "nll"]),
        (True, {"metrics": "entropy"}, {"labels": None}, ["logits"]),
        (True, {"label_smoothing": 0.1}, {"labels": None, "num_items_in_batch": 7}, ["logits"]),
    ],
    ids=str,
)
def test_fields(
    training: bool, options: dict[str, Any], given: dict[str, Any], names: list[str]
) -> None:
    model = from_pretrained(checkpoint("llama"), tigon_options=options).train(training)
    out = model(**inputs() | given)
    assert list(out.keys()) == names


def test_logits_are_there_when_they_are_read() -> None:
    """In training mode with labels: the values and gradients of transformers' model."""
    ids, gradients = inputs()["input_ids"], []
    for model in pair("gemma2", "small caps"):
        model.train()
        out = model(ids, labels=ids)
        entropy = torch.distributions.Categorical(logits=out[1]).entropy().mean()
        assert out.logits is out["logits"] is out.get("logits")
        (out.loss + entropy).backward()
        gradients.append([out.logits.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_other_items_are_read_without_logits() -> None:
    """By number and slice, as those of the tuple."""
    model = from_pretrained(checkpoint("llama")).train()
    out = model(**inputs(), output_hidden_states=True, metrics=("nll",))
    assert list(out.keys()) == ["loss", "logits", "hidden_states", "nll"]
    read = [*(out[i] for i in (0, 2, 3, -4, -2, -1)), *out[:1], *out[2:]]
    with pytest.raises(IndexError, match="tuple index out of range"):
        _ = out[len(out)]
    assert callable(vars(out)["logits"])
    whole = out.to_tuple()
    expected = [*[whole[i] for i in (0, 2, 3)] * 2, *whole[:1], *whole[2:]]
    assert all(a is b for a, b in zip(read, expected, strict=True))
    assert out[1] is out[-3] is out[0:2][1] is out[::-1][2] is out.logits


def change_in_place(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def replace_head(model: Any) -> None:
    model.set_output_embeddings(nn.Linear(96, 211))


@pytest.mark.parametrize("change", [change_in_place, replace_head])
def test_logits_are_not_those_of_changed_weights(change: Callable[[Any], None]) -> None:
    model = from_pretrained(checkpoint("llama")).train()
    out, read = model(**inputs()), model(**inputs())
    logits = read.logits
    out.loss.backward()
    change(model)
    with pytest.raises(ValueError, match=r"lm_head has been changed since: .* return_logits=True"):
        _ = out.logits
    assert read.logits is logits


def test_logits_that_nobody_reads_are_never_made() -> None:
    model, ids = from_pretrained(checkpoint("qwen3_moe")).train(), inputs()["input_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    copied = type(out)(dict(out.items()))  # as accelerate makes it
    assert all(callable(vars(x)["logits"]) for x in (out, copied))
    assert copied.logits.shape == (B, T, 211)
    assert copied.logits.dtype == torch.float32 and copied.logits.requires_grad
    assert callable(vars(out)["logits"])
    with torch.no_grad():
        out = model(ids, labels=ids)
    assert not out.logits.requires_grad


@pytest.mark.parametrize("value", [0.2, 0.0])
def test_options_of_the_loss(value: float) -> None:
    theirs, ours = pair("llama", tigon_options={"label_smoothing": value})
    given = inputs()
    logits = theirs(given["input_ids"]).logits
    targets = given["labels"][:, 1:].flatten()
    losses = nn.CrossEntropyLoss(reduction="none", label_smoothing=value)(
        logits[:, :-1].flatten(0, 1), targets
    )
    assert_near(ours(**given).loss, losses.sum() / (targets != -100).sum())
    assert_near(ours(**given, num_items_in_batch=40).loss, losses.sum() / 40)
    shifted = torch.cat([given["labels"][:, 1:], torch.full((B, 1), -100)], 1)
    assert_near(
        ours(given["input_ids"], shift_labels=shifted).loss, losses.sum() / (targets != -100).sum()
    )
    weights = torch.rand(B, T)
    weighted = (losses * weights[:, 1:].flatten()).sum() / (targets != -100).sum()
    assert_near(ours(**given, loss_weights=weights).loss, weighted)


def test_sequence_reduction_is_scaled_by_trainer() -> None:
    options = {"loss_reduction": "sequence"}
    assert not from_pretrained(checkpoint("llama"), tigon_options=options).accepts_loss_kwargs
    assert from_pretrained(checkpoint("llama")).accepts_loss_kwargs


def test_packed_sequences() -> None:
    _, ours = pair("llama")
    rows = [torch.randint(4, 200, (1, n)) for n in (5, 3, 4)]
    apart = torch.cat([ours(row).logits for row in rows], 1)
    ids = torch.cat(rows, 1)
    seq_idx = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])
    bounds = torch.tensor([0, 5, 8, 12])
    for given in ({"seq_idx": seq_idx}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        assert_near(ours(ids, **given).logits, apart)
        hidden = ours.base_model(ids, **given).last_hidden_state
        assert_near(ours.lm_head(hidden), apart)
    # Two sequences in each of two rows
    both = torch.cat([torch.cat(rows[:2], 1)] * 2)
    again = ours(both, seq_idx=seq_idx[:, :8].repeat(2, 1)).logits
    assert_near(again, apart[:, :8].expand(2, -1, -1))


def test_left_padding() -> None:
    """Equal but for what is predicted from padding, which is another in each attention."""
    _, ours = pair("qwen3")
    eager, sdpa = (
        AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), attn_implementation=kind).eval()
        for kind in ("eager", "sdpa")
    )
    given = inputs(0) | {"attention_mask": torch.ones(B, T, dtype=torch.int64)}
    given["attention_mask"][0, :4], given["labels"][0, :4] = 0, -100
    assert abs(eager(**given).loss - sdpa(**given).loss) > 1e-3
    given["labels"][0, 4] = -100
    assert_near(sdpa(**given).loss, eager(**given).loss)
    assert_near(ours(**given).loss, eager(**given).loss)


def test_router_coefficient_follows_the_config() -> None:
    theirs, ours = pair("qwen3_moe")
    given, losses = inputs(), []
    for model in (theirs, ours):
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    theirs.router_aux_loss_coef = 0.5  # transformers keeps a copy
    for items in (None, 40):
        for model in (theirs, ours):
            losses.append(model(**given, num_items_in_batch=items).loss)
        assert_near(losses[-1], losses[-2])
    assert ours(**given, output_router_logits=False).loss < losses[1] - 0.1


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_scores(model_type: str, labels: int) -> None:
    theirs, ours = score_pair(model_type, labels)
    ids = torch.randint(4, 200, (4, 9))
    ids[0, 5:], ids[1, :3] = 3, 3  # padding on both sides
    targets = torch.tensor([0.5, 0.1, 2.0, 1.0]) if labels == 1 else torch.tensor([0, 2, 1, 1])
    given = {"input_ids": ids, "attention_mask": (ids != 3).long(), "labels": targets}
    expected, actual = theirs(**given, use_cache=False), ours(**given)
    assert list(actual.keys()) == list(expected.keys())
    assert_near(actual.loss, expected.loss)
    assert_near(actual.logits, expected.logits)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"4 rows and no config\.pad_token_id"):
        ours(ids)


def test_compiled_models_refuse_logits_that_were_not_asked_for() -> None:
    model, given = from_pretrained(checkpoint("llama")).train(), inputs()
    compiled = torch.compile(model, backend="eager")
    out = compiled(**given)
    out.loss.backward()
    with pytest.raises(ValueError, match="return_logits=True"):
        _ = out.logits
    assert compiled(**given, return_logits=True).logits.shape == (B, T, 211)


@pytest.mark.parametrize("call", ["model", "base_model"])
def test_calls(call: str) -> None:
    _, model = pair("llama")
    ids = inputs()["input_ids"]
    called = model if call == "model" else model.base_model
    with pytest.raises(ValueError, match="output_attentions=True: Tigon's attention kernels"):
        called(ids, output_attentions=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labls'"):
        called(ids, labls=ids)
    loaded = from_pretrained(checkpoint("llama"), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions=True"):
        (loaded if call == "model" else loaded.base_model)(ids)
    called(ids, token_type_ids=torch.zeros_like(ids))
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True"):
        called(ids)
