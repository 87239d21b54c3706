"""tigon info: what a model is, from headers alone, and what loading it would do."""

import json
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.models.dense_cases import ROPES, SIZES
from tests.models.fp8_checkpoints import DYNAMIC, STATIC, to_fp8
from tests.models.mxfp4_checkpoints import to_mxfp4
from tests.models.tiny import CASES, FIRST, reference, their_config
from tests.support.hub_server import HubServer, hub
from tests.support.small import EXPERTS, LLAMA, write_chats, write_model
from tigon.cli import main, summary
from tigon.cli.info import describe, describe_model
from tigon.cli.summary import describe_config, summarize, supported_class
from tigon.models import MODELS, from_pretrained
from tigon.models.pretrained.names import MULTIMODAL
from tigon.train import main as train

__all__ = ["hub"]

NAME = "lab/tiny"
WEIGHTS = "model.safetensors"
SOME = [*FIRST, ("llama", "rope llama3"), ("gemma3_text", "two ropes")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "folder")


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes values of config.json; None takes a key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rename_weights(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["extra"] = weights.pop("model.norm.weight")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(weights, folder / WEIGHTS)


def old_keys(folder: Path) -> None:
    """Writes RoPE as transformers 4 did."""
    scaling = {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    rewrite(folder, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, head_dim=None)


def any_values(folder: Path) -> None:
    values = {"hidden_size": "\x1b[31m", "num_attention_heads": 0, "rope_parameters": {"a": 1}}
    rewrite(folder, **values, architectures=3, text_config=[], quantization_config="?")


def multimodal(folder: Path) -> None:
    rewrite(folder, model_type="mistral3", text_config={"model_type": "ministral3"})


def reward_model(folder: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)).save_pretrained(folder)


# What is done to a folder, and what its summary and its check then say, by label
FACTS: list[tuple[Callable[[Path], Any], dict[str, str], str]] = [
    (
        lambda f: to_fp8(f, (16, 32), DYNAMIC),
        {"quantized": "fp8", "tensors": "float8_e4m3fn"},
        "as",
    ),
    (lambda f: to_fp8(f, None, STATIC), {"parameters": "82,304"}, "as tigon.Llama in"),
    (reward_model, {"embeddings": "20,544, and a head of 1 scores"}, "as tigon.Llama in float32"),
    (
        old_keys,
        {
            "RoPE": "llama3, rope_theta 500000.0, factor 8.0, high_freq",
            "heads": "4 query, 2 key/value, 16 dims each",
        },
        "as tigon.Llama",
    ),
    (any_values, {"model dim": r"\x1b[31m", "parameters": "82,304 stored"}, "no: "),
    (multimodal, {"loads": "as tigon.Ministral3 in float32, 0.3 MiB; "}, "no: "),
    (
        lambda f: rewrite(f, quantization_config={"quant_method": "awq"}),
        {"loads": "no: quant_method 'awq' is not supported; docs/formats.md lists what is"},
        "no: ",
    ),
    (
        lambda f: (f / WEIGHTS).write_bytes(b"x" * 100),
        {"loads": "model.safetensors is no safetensors file"},
        "no: ",
    ),
    (
        lambda f: (f / WEIGHTS).unlink(),
        {"parameters": "unknown", "loads": "has neither model.safe"},
        "no: ",
    ),
    (
        rename_weights,
        {},
        "no: 1 missing: model.norm.weight; 1 unexpected: extra; 1 of another shape",
    ),
]


@pytest.mark.parametrize(("change", "facts", "loads"), FACTS)
def test_facts_of_changed_models(change, facts, loads, folder: Path) -> None:
    change(folder)
    summary, checked = summarize(str(folder)), describe(str(folder))
    assert all(text in summary[label] for label, text in facts.items()), summary
    assert checked["loads"].startswith(loads)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Each value is a parameter, and no scale is."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    theirs = reference("gpt_oss", sizes | {"num_experts_per_tok": 2}, tmp_path)
    to_mxfp4(tmp_path)
    facts, checked = summarize(str(tmp_path)), describe(str(tmp_path))
    count = sum(p.numel() for p in theirs.parameters())
    assert facts["parameters"] == checked["parameters"] == f"{count:,}"
    loads = checked["loads"].partition(";")[0]
    assert facts["loads"] == f"{loads}; --check tries it"


@pytest.mark.parametrize(("model_type", "case"), SOME)
def test_summary_is_that_of_the_model(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case], tmp_path)
    facts, checked = summarize(str(tmp_path)), describe(str(tmp_path))
    loads = checked["loads"].partition(";")[0]  # of mixtures, how experts are stored follows
    assert loads.startswith(f"as tigon.{MODELS[model_type].__name__} in ")
    assert facts["loads"] == f"{loads}; --check tries it"
    assert facts | {"loads": checked["loads"]} == checked
    assert facts | describe_model(from_pretrained(tmp_path)) == facts


@pytest.mark.parametrize(
    ("model_type", "others"),
    [
        ("muse_glimmer_text", ["model.vision_tower.x", "model.vision_adapter.x"]),
        ("qwen3_5_text", ["model.visual.x", "mtp.layers.0.x"]),
        ("deepseek_v3", ["model.layers.3.eh_proj.weight"]),
    ],
)
def test_parameters_are_those_of_the_text_model(model_type, others, tmp_path: Path) -> None:
    case, *_ = CASES[model_type].values()
    reference(model_type, case, tmp_path)
    before = summarize(str(tmp_path))
    weights = load_file(tmp_path / WEIGHTS)
    save_file(weights | {name: torch.zeros(3) for name in others}, tmp_path / WEIGHTS)
    facts = summarize(str(tmp_path))
    assert {k: facts[k] for k in ("parameters", "loads")}.items() <= before.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what an export will lack
        assert describe(str(tmp_path))["loads"].startswith("as tigon.")


# All that the summary says of layers that are not Llama's
LAYERS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        "layer types": "2 sliding_attention, 1 full_attention",
        "experts": "8, 3 per token, 136 dims each",
        "window": "7 tokens",
    },
    "gemma4_text": {
        "layer types": "4 full_attention, 2 sliding_attention",
        "window": "7 tokens",
        "shared keys": "in the last 3 layers",
    },
    "llama4_text": {
        "layer types": "2 chunked_attention, 1 full_attention",
        "chunks": "7 tokens",
        "experts": "5, 1 per token, 40 dims each",
    },
    "deepseek_v3": {
        "latents": "28 dims of keys and values",
        "experts": "12, 3 per token, 40 dims each",
    },
    "qwen3_5_text": {
        "layer types": "2 linear_attention, 1 full_attention",
        "DeltaNet": "4 query/key, 12 value heads, 14 and 10 dims each",
    },
    "lfm2": {"layer types": "2 conv, 1 full_attention", "convolution": "3 tokens"},
    "lfm2_moe": {
        "layer types": "2 conv, 1 full_attention",
        "convolution": "3 tokens",
        "experts": "8, 3 per token, 40 dims each",
    },
    "qwen2": {},
}


@pytest.mark.parametrize("model_type", LAYERS)
def test_summary_names_kinds_of_layers(model_type: str) -> None:
    case, *_ = CASES[model_type].values()
    facts = describe_config(their_config(model_type, **SIZES | case).to_dict(), {})
    labels = {label for of_model in LAYERS.values() for label in of_model}
    assert {k: v for k, v in facts.items() if k in labels} == LAYERS[model_type]


def test_summary_knows_the_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: model.__name__ for kind, model in MODELS.items()}
    known |= {kind: known[inner] for kind, inner in MULTIMODAL.items()}
    assert {kind: supported_class(kind) for kind in known} == known
    families = tmp_path / "families.py"
    families.write_text("from tigon.models.ernie4_5 import Ernie4_5 as Ernie4_5\n")
    monkeypatch.setattr(summary, "SUPPORTED", families)
    assert supported_class("ernie4_5") == "Ernie4_5"
    assert supported_class(None) is supported_class("gpt2") is None


def test_hub_repository_sends_headers_alone(hub, folder, tmp_path):
    weights = {f"padding.{i}": torch.zeros(1000) for i in range(1500)}  # a header above 64 KiB
    save_file(load_file(folder / WEIGHTS) | weights, folder / WEIGHTS)
    hub.push(NAME, folder)
    header = struct.unpack("<Q", (folder / WEIGHTS).read_bytes()[:8])[0]
    here, there = describe(str(folder)), describe(NAME)
    assert here == there
    assert "1500 unexpected: padding.0, padding.1, padding.10" in there["loads"]
    assert 65536 < header < (folder / WEIGHTS).stat().st_size / 10
    assert hub.sent[f"{NAME}/{WEIGHTS}"] == 65536 + 8 + header
    hub.knows_ranges = False
    assert describe(NAME) == here
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_headers_on_the_hub_are_checked(hub: HubServer, folder: Path) -> None:
    weights = folder / WEIGHTS
    content = weights.read_bytes()
    hub.push(NAME, folder)
    for length in (2**63, len(content), 90_000_000):
        weights.write_bytes(struct.pack("<Q", length) + content[8:])
        facts = describe(NAME)
        assert "lab/tiny/model.safetensors is no safetensors file" in facts["loads"]
        assert facts["architecture"] == "LlamaForCausalLM (llama)"
    weights.write_bytes(content[:-4])
    assert "lab/tiny/model.safetensors is truncated" in describe(NAME)["loads"]


def test_runs_and_their_checkpoints(folder: Path, tmp_path: Path) -> None:
    data, run = write_chats(tmp_path / "chats.jsonl", 12), tmp_path / "run"
    settings = "seq_len=64 batch_size=2 steps=1 export=false"
    train([f"run_dir={run}", f"model={folder}", f"data={data}", *settings.split()])
    for path in (run, run / "checkpoints/step-00000001"):
        facts = describe(str(path))
        assert facts["parameters"] == describe(str(folder))["parameters"]
        assert facts["files"].startswith("checkpoint step-00000001, ")
        assert facts["tensors"] == "optimizer in float32 0.6 MiB, weights in float32 0.3 MiB"
        assert facts["loads"] == "as tigon.Llama in float32, 0.3 MiB"


def test_adapters_and_their_runs(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    data, run = write_chats(tmp_path / "chats.jsonl", 12), tmp_path / "run"
    settings = "seq_len=64 batch_size=2 steps=1 lora.rank=4 lora.alpha=8 lora.targets=q_proj"
    train([f"run_dir={run}", f"model={folder}", f"data={data}", *settings.split()])
    assert describe(str(run))["adapter"] == "rank 4, alpha 8"
    hub.push(NAME, run / "adapter")
    for name in (str(run / "adapter"), NAME):
        facts = summarize(name)
        assert (
            describe(name)
            == facts
            == {
                "adapter": f"LORA of '{folder}'",
                "rank": "4, alpha 8",
                "parameters": "1,024",  # of two layers, A [4, 64] and B [64, 4]
                "files": "1 of weights, 4,096 bytes",
                "tensors": "4 float32, 0.0 MiB",
                "loads": "with its base, as in tigon generate and tigon export --merge",
            }
        )
    (run / "adapter/adapter_model.safetensors").write_bytes(b"")
    assert summarize(str(run / "adapter"))["loads"].startswith("no: ")


def test_unsupported_model_type(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    source = {"model_type": "new\x1b[31m", "architectures": ["NewModel"], "hidden_size": 8}
    source["time_step_limit"] = [0.0, float("inf")]  # as Mamba 2's config.json has
    (folder / "config.json").write_text(json.dumps(source))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2).half()}, folder / WEIGHTS)
    hub.push(NAME, folder)
    for name in (str(folder), NAME):
        assert describe(name) == {
            "architecture": r"NewModel (new\x1b[31m)",
            "parameters": "17",
            "model dim": "8",
            "files": "1 of weights, 64 bytes",
            "tensors": "1 float32, 0.0 MiB; 1 float16, 0.0 MiB",
            "loads": r"no: model_type 'new\x1b[31m' is not supported; README.md lists what is",
        }
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").touch()
    assert "pickled weights (pytorch_model.bin) are not read" in describe(NAME)["loads"]


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_and_a_stored_tied_head(tmp_path: Path, stacked: bool) -> None:
    model = MODELS["qwen3_moe"].from_config(EXPERTS | {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "moe", stacked_experts=stacked)
    facts = describe(str(tmp_path / "moe"))
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    form = "stacked" if stacked else "apart, stacked as they load"
    assert facts["loads"].endswith(f"MiB; experts are stored {form}")
    path = tmp_path / "moe" / WEIGHTS
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 0}, path)
    assert describe(str(tmp_path / "moe"))["loads"].endswith("if it equals the embedding")


def test_folders_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert main(["info", str(tmp_path / "run")]) == 1  # it has no checkpoint
    assert "has no file config.json" in capsys.readouterr().err
    (tmp_path / "run/config.yaml").touch()
    for command in (["info"], ["generate", "hi"], ["export", str(tmp_path / "export")]):
        assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 1
        assert "run is a run without a checkpoint: save_every says when" in capsys.readouterr().err
    (tmp_path / "run/hf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"without a checkpoint: its export is .*run/hf"):
        describe(str(tmp_path / "run"))
    for read in (describe, summarize):
        with pytest.raises(FileNotFoundError, match=r"has no file config.json"):
            read(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"gguf_file='m.gguf'; in a shell, its path"):
        describe(str(tmp_path))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config.json is no file but a pipe"):
        describe(str(tmp_path))
