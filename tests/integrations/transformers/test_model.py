"""A Tigon model as transformers' PreTrainedModel: an object with modules, copies and a new head."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tigon
from tests.integrations.transformers.peers import (
    FAMILIES,
    B,
    T,
    assert_near,
    checkpoint,
    inputs,
    pair,
)
from tests.integrations.transformers.words import make_tokenizer
from tests.support.contract import tiny_llama
from tigon.integrations.transformers import as_transformers, from_pretrained, register, unregister


def test_modules_are_shared() -> None:
    native = tiny_llama()
    model = as_transformers(native)
    assert model.model is native.model and model.lm_head is native.lm_head
    assert model.get_decoder() is model.base_model is native.model
    assert dict(model.named_parameters()) == dict(native.named_parameters())
    ids = torch.randint(0, 97, (1, 7))
    with torch.no_grad():
        native.model.norm.weight.mul_(2)
    assert torch.equal(model(ids).logits, native(ids).logits)
    model.eval()
    assert not native.training
    again = as_transformers(native)
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("model_type, case", FAMILIES)
def test_decoder_may_be_made_alone(model_type: str, case: str) -> None:
    """By its class and a config, as transformers' may."""
    theirs, ours = pair(model_type, case)
    alone = type(ours.model)(ours.config)
    assert [*alone.state_dict()] == [*theirs.model.state_dict()]
    alone.load_state_dict(theirs.model.state_dict())
    ids = inputs()["input_ids"]
    states = [model(ids).last_hidden_state for model in (alone.eval(), theirs.model)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-4)
    assert alone(ids).cache is not None and alone.train()(ids).cache is None


def test_copies_and_pickles() -> None:
    _, model = pair("qwen3")
    given = inputs()
    expected = model(**given).logits
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(**given).logits, expected)
        with torch.no_grad():
            made.model.norm.weight.zero_()
        assert not made(**given).logits.any() and torch.equal(model(**given).logits, expected)
        assert made._modules is made.native._modules


def test_random_weights_of_a_config() -> None:
    theirs, _ = pair("llama")
    register()
    try:
        model = AutoModelForCausalLM.from_config(theirs.config)
    finally:
        unregister()
    assert isinstance(model.native, tigon.Llama)
    assert model.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("model_type, case", [("llama", ""), ("gemma4_text", "shared")])
def test_resizing(model_type: str, case: str, tmp_path: Path) -> None:
    theirs, ours = pair(model_type, case)
    for model in (theirs, ours):
        embedding = model.resize_token_embeddings(220, mean_resizing=True)
        assert embedding is model.get_input_embeddings() and len(embedding.weight) == 220
        assert model.config.vocab_size == 220
    assert ours.native.config.vocab_size == 220
    given = inputs()
    assert_near(ours(**given).logits[..., :211], theirs(**given).logits[..., :211])
    given["input_ids"][0, 0] = 219
    logits = ours(**given).logits
    assert logits.shape == (B, T, 220)
    ours.save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, from_pretrained):
        assert_near(load(tmp_path)(**given).logits, logits)


def test_head_is_a_linear_layer() -> None:
    theirs, ours = pair("gemma3_text", "softcap")
    hidden = torch.randn(2, 3, 96)
    assert isinstance(ours.get_output_embeddings(), nn.Linear)
    assert ours.lm_head.bias is None and ours.lm_head.out_features == 211
    assert_near(ours.lm_head(hidden), theirs.lm_head(hidden))  # without the softcap
    given = inputs()
    for model in (theirs, ours):
        head = nn.Linear(96, 211)
        torch.manual_seed(2)
        nn.init.normal_(head.weight, std=0.2)
        nn.init.normal_(head.bias)
        model.set_output_embeddings(head)
    assert_near(ours(**given).logits, theirs(**given).logits)
    assert_near(ours.train()(**given).loss, theirs(**given).loss)


def test_checkpointing() -> None:
    _, model = pair("llama")
    model.activation_checkpointing_enable(every_n_layers=2, offload=True)
    assert (model.native.activation_checkpointing, model.native.activation_offload) == (2, True)
    assert model.is_activation_checkpointing
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing and not model.native.activation_offload
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model.native.activation_checkpointing == 1
    with pytest.raises(ValueError, match=r"activation_checkpointing_kwargs=\{'context_fn"):
        model.activation_checkpointing_enable({"context_fn": None})


USES: dict[str, Callable[[Any], Any]] = {
    "Trainer": lambda model: transformers.Trainer(model),
    "PEFT": lambda model: peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"])
    ),
    "pipeline": lambda model: transformers.pipeline(
        "text-generation", model=model, tokenizer=make_tokenizer()
    ),
    "TRL": lambda model: model.config.get_text_config(),
}


@pytest.mark.parametrize("use", USES)
def test_neighbours_are_not_given_native_models(use: str) -> None:
    model = tigon.from_pretrained(checkpoint("llama"))
    with pytest.raises((TypeError, AttributeError), match=r"as_transformers\(model\)"):
        USES[use](model)
    assert not hasattr(model.config, "get_text_config")


def test_native_models_can_be_inspected() -> None:
    """As debuggers, completion and documentation tools do."""
    model = tiny_llama()
    names = dict(inspect.getmembers(model)).keys()
    assert {"generate", "lm_head"} < names and "can_generate" not in names
    assert not hasattr(model, "can_generate")
    assert not hasattr(model, "prepare_inputs_for_generation")
    with pytest.raises(AttributeError, match="'Llama' object has no attribute 'nothing'"):
        _ = model.nothing


def test_other_models() -> None:
    theirs, _ = pair("llama")
    with pytest.raises(TypeError, match="LlamaForCausalLM is no model of Tigon"):
        as_transformers(theirs)
    native = tiny_llama()
    native.add_adapter(tigon.LoraConfig(rank=2))
    with pytest.raises(ValueError, match="adapters"):
        as_transformers(native)


def test_liger() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    _, model = pair("llama")
    with pytest.raises(ValueError, match="use_liger_kernel=True"):
        model.forward = forward.__get__(model)
    norm = model.model.norm
    norm.__dict__["forward"] = forward.__get__(norm)
    with pytest.raises(ValueError, match="use_liger_kernel=True"):
        model(**inputs())
