"""The text model of a multimodal checkpoint: all its weights, of which transformers loads none."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import tigon
from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, UNSCALED, WRAPPED
from tigon.models import MODELS
from tigon.models.pretrained.convert import convert_pretrained
from tigon.models.pretrained.load import as_sequence_classifier, parse_any_config
from tigon.settings.config import Config
from tigon.train.distributed import World
from tigon.train.model import build_model
from tigon.weights import Repository

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 96, "num_position_embeddings": 16}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "llama4": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
    "mistral3": {"vision_config": PIXTRAL},
    "gemma4": {"vision_config": GEMMA4_VISION},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 16, "output_proj_dims": 16}},
    "qwen3_5": {"vision_config": QWEN_VISION},
    "qwen3_5_moe": {"vision_config": QWEN_VISION},
    **dict(WRAPPED.values()),
}
# The type of the whole, and of the text in it
PAIRS = [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")]
PAIRS += [("gemma4", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")]
PAIRS += [("mistral3", "mistral4"), ("muse_glimmer", "muse_glimmer_text")]
PAIRS += [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")]
PAIRS += [("llama4", "llama4_text")]
IDS = torch.arange(4, 44).view(2, 20)


def multimodal(kind: str, text_type: str, tie: bool, directory: Path) -> Any:
    torch.manual_seed(0)
    first = next(iter(CASES[text_type].values()))
    text = SIZES | first | {"model_type": text_type, "tie_word_embeddings": tie}
    config = AutoConfig.for_model(
        kind, text_config=text, tie_word_embeddings=tie, **WRAPPERS[kind], dtype=torch.float32
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    whole = kind == "llama4"  # the head is inside of it
    text_model = model.language_model if whole else model.model.language_model
    with torch.no_grad():
        for name, p in text_model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else 0.08 * torch.randn_like(p))
            if text_type in UNSCALED and name.endswith("q_norm.weight"):
                p.mul_(0.2)
        if not tie and not whole:
            model.lm_head.weight.copy_(0.08 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(directory)
    return model


def in_model(name: str) -> str:
    """Other versions of transformers nest the other way round."""
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@pytest.mark.parametrize("rename", [None, in_model])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("kind", "text_type"), PAIRS)
def test_its_logits(
    kind: str, text_type: str, tie: bool, rename: Callable[[str], str] | None, tmp_path: Path
) -> None:
    theirs = multimodal(kind, text_type, tie, tmp_path)
    path = tmp_path / "model.safetensors"
    if rename is not None:
        save_file({rename(k): v for k, v in load_file(path).items()}, path)
    ours = tigon.from_pretrained(tmp_path)
    assert ours.config.model_type == text_type
    with torch.no_grad():
        # Of Llama 4 without images the whole raises in transformers 5.24
        expected = (theirs.language_model if kind == "llama4" else theirs)(IDS).logits
        assert (ours(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    ours.save_pretrained(tmp_path / "text")
    again = tigon.from_pretrained(tmp_path / "text")
    assert torch.equal(again(IDS).logits, ours(IDS).logits)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4", "llama4"])
def test_an_export_goes_back_into_the_multimodal_model(kind: str, tmp_path: Path) -> None:
    """As docs/export.md says; whoever trains a text model is told that the rest is left out."""
    base, text, whole = (str(tmp_path / name) for name in ("base", "text", "whole"))
    multimodal(kind, dict(PAIRS)[kind], False, tmp_path / "base")
    config = Config(model=base, data=("x.jsonl",), run_dir=text)
    told = r"\d+ tensors for images or sound are skipped, '(model.)?(vis|embed_vis|multi_modal)"
    with pytest.warns(UserWarning, match=told):
        build_model(config, World(0, 1, torch.device("cpu")))
    with pytest.warns(UserWarning, match=told):
        convert_pretrained(Repository(base), text, MODELS)
    theirs = AutoModelForImageTextToText.from_pretrained(base)
    ours = AutoModelForCausalLM.from_pretrained(text)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(1.5)  # as if trained
    if kind == "llama4":
        theirs.language_model.load_state_dict(ours.state_dict())
    else:
        theirs.model.language_model.load_state_dict(ours.model.state_dict())
        theirs.lm_head.load_state_dict(ours.lm_head.state_dict())
    theirs.save_pretrained(whole)
    ours.save_pretrained(text)
    expected, again = (tigon.from_pretrained(path)(IDS).logits for path in (text, whole))
    assert torch.equal(again, expected)


def test_a_config_that_leaves_out_what_it_can(tmp_path: Path) -> None:
    multimodal("gemma3", "gemma3_text", True, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("model_type", "tie_word_embeddings", "dtype"):
        config["text_config"].pop(key, None)
    path.write_text(json.dumps(config))
    model = tigon.Gemma3.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", ["gemma4", "llama4", "qwen3_5"])
def test_a_text_config_with_the_type_of_the_whole(kind: str, same: bool) -> None:
    """Or with none: transformers reads the text's class from the multimodal config alone."""
    text = SIZES | next(iter(CASES[f"{kind}_text"].values()))
    whole = {"model_type": kind, "text_config": text | {"model_type": kind if same else None}}
    theirs = AutoConfig.for_model(**copy.deepcopy(whole)).text_config
    ours = parse_any_config(whole, MODELS)
    assert (ours.model_type, type(theirs).model_type) == (f"{kind}_text", f"{kind}_text")
    assert ours.hidden_size == theirs.hidden_size == SIZES["hidden_size"]


@pytest.mark.parametrize(("kind", "text_type"), PAIRS)
def test_which_config_ties_the_head(kind: str, text_type: str) -> None:
    """The multimodal one, or the text's; and what a config that says nothing means."""
    text = SIZES | next(iter(CASES[text_type].values())) | {"model_type": text_type}
    for outer, inner in ((True, False), (False, True), (None, False), (None, None)):
        given = {} if outer is None else {"tie_word_embeddings": outer}
        text_config = text if inner is None else text | {"tie_word_embeddings": inner}
        raw = {"text_config": text_config, **WRAPPERS[kind], **given}
        config = AutoConfig.for_model(kind, **copy.deepcopy(raw))
        with torch.device("meta"):
            theirs = AutoModelForImageTextToText.from_config(config)
        model = theirs.language_model if kind == "llama4" else theirs
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ours = MODELS[text_type].from_config({"model_type": kind, **raw}, device="meta")
        assert ours.ties_head == tied, (outer, inner)


def test_an_export_without_a_text_class(tmp_path: Path) -> None:
    """The config around the text stays as it was, and transformers loads all but the images'."""
    theirs = multimodal("muse_glimmer", "muse_glimmer_text", False, tmp_path / "a")
    ours = tigon.MuseGlimmer.from_pretrained(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in "ab")
    assert after["vision_config"] == before["vision_config"]
    assert after["architectures"] == before["architectures"]
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "b", attn_implementation="eager", output_loading_info=True
    )
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    others = ("vision_tower.", "vision_adapter.", "vision_projection.")
    missing = [name.removeprefix("model.") for name in info["missing_keys"]]
    assert missing and all(name.startswith(others) for name in missing)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, theirs(IDS).logits)
    # The text's own tie counts for nothing, and no text is tied where nothing says so
    alone = {k: v for k, v in after.items() if k != "tie_word_embeddings"}
    alone["text_config"] = after["text_config"] | {"tie_word_embeddings": True}
    assert not tigon.MuseGlimmer.from_config(alone, device="meta").ties_head
    made = tigon.MuseGlimmer.from_config(after)  # and of its config alone
    made.save_pretrained(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == after


def test_keys_and_values_of_layers_that_read_others_are_left_out(tmp_path: Path) -> None:
    theirs = multimodal("gemma4", "gemma4_text", True, tmp_path)
    path = tmp_path / "model.safetensors"
    content = load_file(path)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        own, unread = (f"model.language_model.layers.{i}.self_attn.{name}" for i in (2, 5))
        content[unread] = torch.randn_like(content[own])
    save_file(content, path)
    with torch.no_grad():
        expected = theirs(IDS).logits
        found = tigon.from_pretrained(tmp_path)(IDS).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize(
    ("kind", "text_type", "whole"),
    [
        ("gemma4", "gemma4_text", True),
        ("mistral3", "mistral", True),
        ("muse_glimmer", "muse_glimmer_text", True),
        ("qwen3_5_moe", "qwen3_5_moe_text", False),
        ("llama4", "llama4_text", False),
    ],
)
def test_adapters_in_the_model_that_transformers_makes(
    kind: str, text_type: str, whole: bool, tmp_path: Path
) -> None:
    """The text model alone, or all of it: its names, and no adapters in the vision tower."""
    multimodal(kind, text_type, True, tmp_path / "base")
    auto = AutoModelForImageTextToText if kind in ("mistral3", "muse_glimmer") else None
    auto = auto or AutoModelForCausalLM

    def base() -> Any:
        return auto.from_pretrained(tmp_path / "base", attn_implementation="eager")

    decoder = "model.language_model.layers" if whole else "model.layers"
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=rf"{decoder}\..+\.(q_proj|o_proj|down_proj)",
        exclude_modules=r".+\.experts\..+",
        rank_pattern={rf"{decoder}\..+\.q_proj": 3},
        alpha_pattern={f"{decoder}.1.self_attn.o_proj": 50},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(base(), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = tigon.from_pretrained(tmp_path / "base")
    ours.load_adapter(tmp_path / "theirs")
    ours.save_adapter(tmp_path / "ours")
    again = PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
        assert (expected - base()(input_ids=IDS).logits).abs().max() > 0.1 * expected.abs().max()
        for model in (ours, again):
            found = model(input_ids=IDS).logits
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    before, after = (
        set(load_file(tmp_path / d / "adapter_model.safetensors")) for d in ("theirs", "ours")
    )
    assert after == before


@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize(("kind", "text_type"), [PAIRS[0], ("qwen3_5", "qwen3_5_text")])
def test_adapters_that_score(kind: str, text_type: str, tmp_path: Path) -> None:
    """transformers' classifiers have the whole of a multimodal model."""
    multimodal(kind, text_type, True, tmp_path / "base")
    config = tigon.from_pretrained(tmp_path / "base").config
    ours = MODELS[text_type].from_config(as_sequence_classifier(config, 1))
    targets = {"targets": ("q_proj",), "modules_to_save": ("score",)}
    ours.add_adapter(tigon.LoraConfig(rank=4, **targets))
    ours.save_adapter(tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapted = {
        n for n, m in theirs.named_modules() if n.endswith("q_proj") and hasattr(m, "lora_A")
    }
    assert adapted and all(".language_model." in name for name in adapted)
