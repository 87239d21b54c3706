"""tigon info: what a model is, from headers alone, and what loading it would do."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.hub_server import HubServer, hub
from tests.models.fp8_checkpoints import DYNAMIC, STATIC, to_fp8
from tests.models.tiny import CASES, FIRST, ROPES, reference
from tests.small import EXPERTS, LLAMA, write_chats, write_model
from tigon.cli import main
from tigon.cli.info import describe, describe_model
from tigon.cli.summary import summarize, supported_class
from tigon.models import MODELS, from_pretrained
from tigon.models.pretrained.names import MULTIMODAL
from tigon.train import main as train

__all__ = ["hub"]

NAME = "lab/tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "folder")


def rewrite(folder: Path, **changes: Any) -> None:
    """config.json with other values; None takes a key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


SOME = [*FIRST, ("llama", "tied"), ("llama", "rope llama3"), ("gemma3_text", "two ropes")]


@pytest.mark.parametrize(("model_type", "case"), SOME)
def test_a_summary_says_what_the_model_says(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case], tmp_path)
    facts, checked = summarize(str(tmp_path)), describe(str(tmp_path))
    loads = checked["loads"].partition(";")[0]  # of mixtures, how experts are stored follows
    assert loads.startswith(f"as tigon.{MODELS[model_type].__name__} in ")
    assert facts["loads"] == f"{loads}; --check tries it"
    assert facts | {"loads": checked["loads"]} == checked
    assert facts | describe_model(from_pretrained(tmp_path)) == facts


@pytest.mark.parametrize("settings", [DYNAMIC, STATIC])
def test_a_summary_of_fp8(folder: Path, settings: dict[str, Any]) -> None:
    to_fp8(folder, (16, 32) if settings is DYNAMIC else None, settings)
    facts = summarize(str(folder))
    assert facts["quantised"] == "fp8" and "float8_e4m3fn" in facts["tensors"]
    assert facts["parameters"] == describe_model(from_pretrained(folder))["parameters"]


def test_a_summary_of_a_reward_model(tmp_path: Path) -> None:
    config = LlamaConfig(**LLAMA, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    facts = summarize(str(tmp_path))
    assert facts["embeddings"] == "20,544, and a head of 1 scores"
    assert describe(str(tmp_path))["loads"].startswith("as tigon.Llama in float32")


def test_a_summary_of_the_keys_of_transformers_4(folder: Path) -> None:
    scaling = {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    rewrite(folder, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, head_dim=None)
    facts = summarize(str(folder))
    assert facts["RoPE"].startswith("llama3, rope_theta 500000.0, factor 8.0, high_freq")
    assert facts["heads"] == "4 query, 2 key/value, 16 dims each"
    assert facts | describe_model(from_pretrained(folder)) == facts


def test_a_summary_knows_the_families(folder: Path) -> None:
    known = {kind: model.__name__ for kind, model in MODELS.items()}
    known |= {kind: known[inner] for kind, inner in MULTIMODAL.items()}
    assert {kind: supported_class(kind) for kind in known} == known
    assert supported_class(None) is supported_class("gpt2") is None
    rewrite(folder, model_type="new", architectures=["NewModel"])
    assert summarize(str(folder))["loads"] == describe(str(folder))["loads"]
    rewrite(folder, model_type="mistral3", text_config={"model_type": "ministral3"})
    assert summarize(str(folder))["loads"].startswith("as tigon.Ministral3 in float32, 0.3 MiB; ")
    rewrite(folder, model_type="llama", quantization_config={"quant_method": "awq"})
    assert summarize(str(folder))["loads"] == "not checked: --check builds the model"


def test_a_summary_of_anything(hub: HubServer, folder: Path) -> None:
    """Values of config.json that no model has, and weights that nothing reads."""
    values = {"hidden_size": "\x1b[31m", "num_attention_heads": 0, "rope_parameters": {"a": 1}}
    rewrite(folder, **values, architectures=3, text_config=[], quantization_config="?")
    hub.push(NAME, folder)
    facts = summarize(NAME)
    assert facts["model dim"] == r"\x1b[31m" and facts["parameters"] == "82,304 stored"
    assert hub.sent[f"{NAME}/model.safetensors"] <= 65536
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    assert "model.safetensors is no safetensors file" in summarize(str(folder))["loads"]
    (folder / "model.safetensors").unlink()
    facts = summarize(str(folder))
    assert facts["parameters"] == "unknown" and "has neither model.safe" in facts["loads"]
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no file config\.json"):
        summarize(str(folder))


def test_the_check_and_runs_say_whether_it_loads(folder, tmp_path, capsys):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for arguments, said in (
        (["info", str(folder)], "loads         as tigon.Llama in float32, 0.3 MiB; --check"),
        (["info", str(folder), "--check"], "loads         as tigon.Llama in float32"),
    ):
        assert main(arguments) == 0
        assert said in capsys.readouterr().out
    assert main(["info", str(tmp_path / "run")]) == 1  # as before: it has no checkpoint
    assert "has no file config.json" in capsys.readouterr().err


def test_of_a_hub_repository_only_headers_are_fetched(hub, folder, tmp_path):
    weights = {f"padding.{i}": torch.zeros(1000) for i in range(1500)}  # a header above 64 KiB
    save_file(load_file(folder / "model.safetensors") | weights, folder / "model.safetensors")
    hub.push(NAME, folder)
    size = (folder / "model.safetensors").stat().st_size
    header = struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
    here, there = describe(str(folder)), describe(NAME)
    assert here == there
    assert "1500 unexpected: padding.0, padding.1, padding.10" in there["loads"]
    assert 65536 < header < size / 10
    assert hub.sent[f"{NAME}/model.safetensors"] == 65536 + 8 + header
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_shards_on_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    model = from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", dtype=torch.bfloat16, max_shard_size="30KB")
    hub.push(NAME, tmp_path / "shards")
    facts = describe(NAME)
    count = sum(p.numel() for p in model.parameters())
    shards = len(list((tmp_path / "shards").glob("model-*")))
    assert shards > 3
    assert facts["files"] == f"{shards} of weights, {count * 2:,} bytes"
    assert facts["tensors"] == "20 bfloat16, 0.2 MiB"
    assert facts["loads"] == "as tigon.Llama in bfloat16, 0.2 MiB"
    first = min((tmp_path / "shards").glob("model-*"))
    first.unlink()
    assert f"has no file {first.name}, but model.safetensors.index.json" in describe(NAME)["loads"]


def test_a_server_that_knows_no_ranges(hub: HubServer, folder: Path) -> None:
    rewrite(folder, tie_word_embeddings=None)
    hub.push(NAME, folder)
    hub.knows_ranges = False
    assert describe(NAME) == describe(str(folder))


def test_what_is_in_the_cache_needs_no_hub(hub: HubServer, folder: Path) -> None:
    hub.push(NAME, folder)
    expected = describe(NAME)
    from_pretrained(NAME)
    requests = hub.gets.total()
    assert describe(NAME) == expected
    hub.close()
    assert describe(NAME) == expected
    assert hub.gets.total() == requests


def test_headers_on_the_hub_are_checked(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    hub.push(NAME, folder)
    for length in (2**63, len(content), 90_000_000):
        weights.write_bytes(struct.pack("<Q", length) + content[8:])
        facts = describe(NAME)
        assert "lab/tiny/model.safetensors is no safetensors file" in facts["loads"]
        assert facts["architecture"] == "LlamaForCausalLM (llama)"
    weights.write_bytes(content[:-4])
    assert "lab/tiny/model.safetensors is truncated" in describe(NAME)["loads"]


def test_private_and_gated(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push(NAME, folder)
    hub.gated[NAME] = "hf_right"
    with pytest.raises(GatedRepoError, match=NAME):
        describe(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert describe(NAME)["loads"].startswith("as tigon.Llama")


def test_a_run_and_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    data, run = write_chats(tmp_path / "chats.jsonl", 12), tmp_path / "run"
    settings = "seq_len=64 batch_size=2 steps=1 export=false"
    train([f"run_dir={run}", f"model={folder}", f"data={data}", *settings.split()])
    checkpoint = run / "checkpoints/step-00000001"
    for path in (run, checkpoint):
        facts = describe(str(path))
        assert facts["parameters"] == describe(str(folder))["parameters"]
        assert facts["files"].startswith("checkpoint step-00000001, ")
        assert facts["tensors"] == "optimizer in float32 0.6 MiB, weights in float32 0.3 MiB"
        assert facts["loads"] == "as tigon.Llama in float32, 0.3 MiB"


def test_a_model_type_that_we_do_not_have(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    source = {"model_type": "new\x1b[31m", "architectures": ["NewModel"], "hidden_size": 8}
    source["time_step_limit"] = [0.0, float("inf")]  # as Mamba 2's config.json has
    (folder / "config.json").write_text(json.dumps(source))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2).half()}, folder / "model.safetensors")
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
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    assert "pickled weights (pytorch_model.bin) are not read" in describe(NAME)["loads"]


def test_what_would_be_missing(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["extra"] = weights.pop("model.norm.weight")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(weights, path)
    loads = describe(str(folder))["loads"]
    with pytest.raises(ValueError) as caught:
        from_pretrained(folder)
    for text in (
        "1 missing: model.norm.weight",
        "1 unexpected: extra",
        "1 of another shape or kind: model.layers.0.mlp.up_proj.weight is [95, 64], not [96, 64]",
    ):
        assert text in loads and text in str(caught.value)


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_and_a_head_that_is_stored_too(tmp_path: Path, stacked: bool) -> None:
    model = MODELS["qwen3_moe"].from_config(EXPERTS | {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "moe", stacked_experts=stacked)
    facts = describe(str(tmp_path / "moe"))
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    how = "stacked" if stacked else "apart, stacked as they load"
    assert facts["loads"].endswith(f"MiB; experts are stored {how}")
    path = tmp_path / "moe/model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 0}, path)
    assert describe(str(tmp_path / "moe"))["loads"].endswith("if it equals the embedding")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no file config.json"):
        describe(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"gguf_file='m.gguf'; in a shell, its path"):
        describe(str(tmp_path))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config.json is no file but a pipe"):
        describe(str(tmp_path))
