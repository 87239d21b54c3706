"""A Tigon model as transformers' PreTrainedModel: names, outputs and what is refused."""

import copy
import importlib
import inspect
import pickle
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import tigon
from tests.integrations.transformers.peers import MODELS, checkpoint, pair, score_pair
from tests.integrations.transformers.words import make_tokenizer
from tests.models.test_multimodal import multimodal
from tests.models.tiny import CASES, FIRST, WRAPPED, reference
from tests.support.contract import tiny_llama
from tigon.integrations import transformers as integration
from tigon.integrations.transformers import as_transformers, from_pretrained, register, unregister
from tigon.models.pretrained.names import MULTIMODAL, TEXT_ALONE

B, T = 2, 11


def inputs(ignored: int = 3) -> dict[str, Tensor]:
    """Random ids, and labels of which the first are ignored."""
    ids = torch.randint(4, 200, (B, T))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def assert_near(actual: Any, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


FAMILIES = [(m, case) for m, case in FIRST if m not in WRAPPED]


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


@pytest.mark.parametrize("version", ["5.17.0", "5.23.0.dev0", "4.57.1", None])
def test_an_older_transformers_is_named(version: str | None, monkeypatch: Any) -> None:
    def read(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["transformers"] == ["transformers>=5.24"]
    monkeypatch.setattr(metadata, "version", read)
    with pytest.raises(ImportError) as error:
        importlib.reload(integration)
    assert str(error.value) == (
        "tigon.integrations.transformers needs transformers 5.24 or newer, and "
        f"{version or 'none'} is installed: pip install 'tigon[transformers]'"
    )


# What a call returns


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


# The model as an object


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


def load(directory: Path) -> Any:
    """transformers' model of a directory."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


# Loading


def test_auto_classes() -> None:
    directory = checkpoint("llama")
    register()
    register()
    try:
        for kind in (None, "sdpa", "flash_attention_2"):
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.bfloat16, attn_implementation=kind
            )
            assert isinstance(model.native, tigon.Llama) and model.dtype == torch.bfloat16
        scorer = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
        assert scorer.native.config.labels == scorer.config.num_labels == 3
        with pytest.raises(ValueError, match=r"config\.rms_norm_eps is 0\.1, but the check"):
            AutoModelForCausalLM.from_pretrained(directory, rms_norm_eps=0.1)
    finally:
        unregister()
    assert type(load(directory)) is transformers.LlamaForCausalLM
    unregister()


@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_auto_classes_of_multimodal_checkpoints(kind: str, tmp_path: Path) -> None:
    multimodal(kind, MULTIMODAL[kind], False, tmp_path)
    ids = inputs()["input_ids"]
    theirs = load(tmp_path)
    register()
    try:
        ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        unregister()
    assert isinstance(ours.native, tigon.models.MODELS[MULTIMODAL[kind]])
    assert type(ours).__name__ == type(theirs).__name__
    assert ours.config.name_or_path == theirs.config.name_or_path == str(tmp_path)
    assert_near(ours(ids).logits, theirs(ids).logits)
    assert type(load(tmp_path)) is type(theirs)


def test_generation_config_of_the_checkpoint(tmp_path: Path) -> None:
    theirs, _ = pair("llama")
    theirs.generation_config.update(temperature=0.7, do_sample=True, eos_token_id=[5, 7])
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


# What is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"load_in_4bit": True}, "load_in_4bit: transformers' models of Tigon are not quant"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: "),
        ({"quantize": "nf4"}, "quantize: "),
        ({"num_labels": 0}, "num_labels=0 is no number of labels"),
        ({"num_labels": "2"}, "num_labels='2' is no number of labels"),
        ({"device_map": {"a": 0, "b": 1}}, r"device_map=\{'a': 0, 'b': 1\} may spread"),
        ({"device_map": "cuda:77"}, "device 'cuda:77' cannot be used here"),
        ({"device_map": "gpu0"}, "device 'gpu0' cannot be used here"),
        ({"device_map": {"": "gpu0"}}, "device 'gpu0' cannot be used here"),
        ({"tigon_options": {"loss_reduction": "sum"}}, "loss_reduction='sum' is not one of"),
    ],
    ids=str,
)
def test_values_of_loading(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_pretrained(checkpoint("llama"), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtyp": "float32"}, "unexpected keyword argument 'dtyp'"),
        ({"tigon_options": {"metric": "nll"}}, "tigon_options has 'metric', .* 'metrics'"),
        ({"tigon_options": {"z_loss": "much"}}, "z_loss='much' has another type"),
        ({"tigon_options": ("nll",)}, r"tigon_options=\('nll',\) is no mapping"),
    ],
    ids=str,
)
def test_names_of_loading(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_pretrained(checkpoint("llama"), **options)


def test_keywords_of_configs() -> None:
    """Those of scripts that load transformers' model."""
    path = checkpoint("qwen3_moe")
    options = {"use_cache": False, "attn_implementation": "sdpa", "router_aux_loss_coef": 0.5}
    model = from_pretrained(path, **options)
    assert (model.config.use_cache, model.config.router_aux_loss_coef) == (False, 0.5)
    assert model(inputs()["input_ids"]).cache is None
    config = transformers.AutoConfig.from_pretrained(path)
    assert from_pretrained(path, config=config).config is config
    config.rms_norm_eps = 1e-2
    with pytest.raises(ValueError, match=r"config.rms_norm_eps is 0.01, but the checkpoint's is"):
        from_pretrained(path, config=config)


def test_keywords_that_ask_for_nothing() -> None:
    """Scripts of transformers, TRL and lm-eval hand on the defaults of their own arguments."""
    path = checkpoint("llama")
    names = "from_tf", "force_download", "ignore_mismatched_sizes", "output_attentions"
    flags = dict.fromkeys(names, False)
    names = "max_memory", "quantization_config", "tp_plan", "variant", "state_dict"
    unset = dict.fromkeys((*names, "experts_implementation"))
    options = {**flags, **unset, "revision": "main", "weights_only": True}
    assert from_pretrained(path, **options).config.name_or_path == str(path)
    for name in ("tp_plan", "state_dict"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            from_pretrained(path, **{name: {"model": 1}})


@pytest.mark.parametrize("auto", [False, True])
def test_attention_of_transformers_is_said_to_have_no_effect(auto: bool, recwarn: Any) -> None:
    make = AutoModelForCausalLM.from_pretrained if auto else from_pretrained
    if auto:
        register()
    try:
        for kind in ("flash_attention_2", "sdpa", "eager", None):
            model = make(checkpoint("llama"), attn_implementation=kind)
    finally:
        unregister()
    for kind in ("sdpa", "eager", "flash_attention_2"):
        model.set_attn_implementation(kind)
    said = [str(w.message) for w in recwarn if "attn_implementation" in str(w.message)]
    assert said == 2 * [
        "attn_implementation='flash_attention_2' has no effect: attention= chooses Tigon's kernels"
    ]


def test_compiled_models_refuse_logits_that_were_not_asked_for() -> None:
    model, given = from_pretrained(checkpoint("llama")).train(), inputs()
    compiled = torch.compile(model, backend="eager")
    out = compiled(**given)
    out.loss.backward()
    with pytest.raises(ValueError, match="return_logits=True"):
        _ = out.logits
    assert compiled(**given, return_logits=True).logits.shape == (B, T, 211)


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


@pytest.mark.parametrize("model_type", WRAPPED)
def test_families_without_a_class(model_type: str, tmp_path: Path) -> None:
    reference(model_type, next(iter(CASES[model_type].values())), tmp_path)
    with pytest.raises(ValueError, match="transformers has no class for text alone"):
        from_pretrained(tmp_path)


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


def test_checkpointing_options() -> None:
    _, model = pair("llama")
    with pytest.raises(ValueError, match=r"activation_checkpointing_kwargs=\{'context_fn"):
        model.activation_checkpointing_enable({"context_fn": None})


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
