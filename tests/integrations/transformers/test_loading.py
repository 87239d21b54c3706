"""A PreTrainedModel of Tigon from a checkpoint: auto classes, and the keywords of loading."""

import importlib
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tigon
from tests.integrations.transformers.peers import assert_near, checkpoint, inputs, pair
from tests.models.test_multimodal import multimodal
from tests.models.tiny import CASES, WRAPPED, reference
from tigon.integrations import transformers as integration
from tigon.integrations.transformers import from_pretrained, register, unregister
from tigon.models.pretrained.names import MULTIMODAL, TEXT_ALONE


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


def load(directory: Path) -> Any:
    """transformers' model of a directory."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


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


@pytest.mark.parametrize("model_type", WRAPPED)
def test_families_without_a_class(model_type: str, tmp_path: Path) -> None:
    reference(model_type, next(iter(CASES[model_type].values())), tmp_path)
    with pytest.raises(ValueError, match="transformers has no class for text alone"):
        from_pretrained(tmp_path)
