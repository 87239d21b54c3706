"""config.json of both generations, in and out, against transformers' own reading."""

import json
import warnings
from dataclasses import dataclass, fields

import pytest
from transformers import AutoConfig, LlamaConfig

from tests.models.dense_cases import ROPES, SIZES
from tests.models.tiny import on_meta, windows
from tigon.models import MODELS, Llama
from tigon.models.config import ACTIVATIONS, ConfigError, ModelConfig

OURS = Llama.config_class


def test_dtype_under_either_name() -> None:
    for raw in (
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "float16"},
        {"dtype": None, "torch_dtype": "bfloat16"},
    ):
        assert OURS.from_dict(raw).dtype == "bfloat16"


@pytest.mark.parametrize("rope", ROPES)
def test_what_is_written_reads_back(rope: str) -> None:
    raw = {"model_type": "llama", **SIZES, "dtype": "bfloat16", "rope_parameters": ROPES[rope]}
    raw |= {"pad_token_id": 3, "eos_token_id": [2, 5], "transformers_version": "4.40.0"}
    raw |= {"attention_bias": True, "_name_or_path": "x", "auto_map": {"AutoConfig": "a--b.C"}}
    ours = OURS.from_dict(raw)
    written = json.loads(json.dumps(ours.to_dict()))
    assert OURS.from_dict(written) == ours

    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw))).to_dict()
    again = AutoConfig.for_model(**json.loads(json.dumps(written))).to_dict()
    kept = theirs["rope_parameters"]
    for key, value in kept.items():
        assert again["rope_parameters"][key] == value or (key == "factor" and value is None)
    changed = {k for k in theirs if theirs[k] != again.get(k)}
    assert changed <= {"rope_parameters", "architectures", "_name_or_path", "auto_map"}
    assert again["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in written  # the code it names is not exported

    # and what transformers 4 and vLLM look for
    parameters = written["rope_parameters"]
    assert written["rope_theta"] == parameters["rope_theta"]
    assert written["rope_scaling"] == (None if rope == "default" else parameters)
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["head_dim"] == 20
    if parameters["rope_type"] == "longrope":
        original = parameters["original_max_position_embeddings"]
        assert written["original_max_position_embeddings"] == original


def test_a_required_key() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(ModelConfig):
        model_type = "other"
        architecture = "OtherForCausalLM"

    sizes = {k: v for k, v in SIZES.items() if k not in ("hidden_size", "vocab_size")}
    with pytest.raises(ConfigError, match="the config lacks vocab_size, hidden_size"):
        Other.from_dict(sizes)


def test_unknown_keys_warn_once_together() -> None:
    raw = {"rms_norm_epsilon": 1, "my_note": [1], "use_cache": True, "sliding_window": None}
    with pytest.warns(UserWarning) as caught:
        OURS.from_dict(raw)
    assert [str(w.message) for w in caught] == [
        "config keys not understood and ignored: {'rms_norm_epsilon': 1, 'my_note': [1]}; "
        "did you mean 'rms_norm_eps'?"
    ]


def test_what_transformers_writes_never_warns() -> None:
    """Of this version and of earlier ones: tokens and notes that no decoder computes with."""
    raw = LlamaConfig(attention_dropout=0.0).to_dict() | {"auto_map": {}, "unk_token_id": 0}
    raw |= {"tokenizer_class": "LlamaTokenizer", "finetuning_task": None, "prefix": None}
    raw |= {"torchscript": False, "_attn_implementation": "sdpa", "tf_legacy_loss": False}
    raw |= {"pruned_heads": {}, "add_cross_attention": False, "tie_encoder_decoder": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OURS.from_dict(raw)
    with pytest.raises(ConfigError, match="add_cross_attention=True changes what the model"):
        OURS.from_dict(raw | {"add_cross_attention": True})


def test_dropout_is_announced() -> None:
    with pytest.warns(UserWarning, match="attention_dropout=0.1 is not applied"):
        OURS.from_dict({"attention_dropout": 0.1})


@pytest.mark.parametrize("model_type", MODELS)
def test_defaults_of_every_family(model_type: str) -> None:
    """What a config.json leaves out, and hub configs leave out a lot."""
    given = {"layer_types": ["conv", "full_attention"] * 16} if model_type == "lfm2_moe" else {}
    theirs = AutoConfig.for_model(model_type, **given)  # which builds no model without
    ours = MODELS[model_type].config_class.from_dict({"model_type": model_type, **given})
    aside = {"source", "dtype", "rope_parameters", "layer_types", "sliding_window", "hidden_act"}
    aside |= {"no_rope_layers", "layer_rope_theta", "full_attn_idxs"}  # None here means its rule
    aside |= {"moe_layers"}
    compared = {f.name for f in fields(ours)} - aside
    assert len(compared) > 12
    for name, value in theirs.to_dict().items():
        if name == "per_layer_config":
            value = {str(int(layer)): sizes for layer, sizes in value.items()}
        if name in compared and name != "head_dim":
            assert getattr(ours, name) == value, name
    heads = theirs.num_attention_heads
    theirs.allow_global_per_layer_attribute_access = True  # to what some layers change
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    layers = range(theirs.num_hidden_layers)
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if types is None:
        expected = [window for _ in layers]
    else:
        expected = [window if kind == "sliding_attention" else None for kind in types]
    assert windows(ours) == expected
    ropes = theirs.rope_parameters
    if "rope_type" in ropes:
        assert {k: ours.rope_parameters[k] for k in ("rope_type", "rope_theta")} == {
            k: ropes[k] for k in ("rope_type", "rope_theta")
        }
    else:
        assert ours.rope_parameters == ropes
    null = {"model_type": model_type, "rope_parameters": None, **given}
    assert MODELS[model_type].config_class.from_dict(null) == ours
    if hasattr(theirs, "hidden_activation"):
        act = ACTIVATIONS[theirs.hidden_activation or "gelu_pytorch_tanh"]
        assert on_meta(ours).model.layers[0].mlp.gate_up_proj.act == act
    else:
        assert ours.hidden_act == getattr(theirs, "hidden_act", "silu")
