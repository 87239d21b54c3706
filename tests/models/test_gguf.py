"""GGUF files: the model that was converted, bit for bit what its blocks say; bad files by name."""

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

import tigon
from tests.models.dense_cases import LLAMA3, WINDOW, YARN
from tests.models.gguf_files import write_gguf
from tests.models.sparse_cases import EXPERTS, SHARED
from tests.models.test_io import same
from tests.models.tiny import CASES, load_reference, reference
from tests.support.hub_server import hub
from tests.train.ranks import Ranks
from tigon.models import MODELS as ZOO
from tigon.models import build, load_weights, materialize
from tigon.models.pretrained.gguf import GGUFModel
from tigon.models.pretrained.load import read_config
from tigon.train import start
from tigon.weights import GGUF, Repository
from tigon.weights.gguf import import_reader
from tigon.weights.read import Reader

__all__ = ["hub"]
IDS = torch.arange(40).view(2, 20)
SCALE = {"query_pre_attn_scalar": 20}  # the heads' size, as in llama.cpp's code
GEMMA3 = CASES["gemma3_text"]["two ropes"] | SCALE
# What llama.cpp's code has: five of six layers slide, with a theta of 10,000
GEMMA3 |= {
    "num_hidden_layers": 6,
    "layer_types": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
    },
}
LLAMA3_8K = LLAMA3 | {"original_max_position_embeddings": 8192}
LINEAR = CASES["llama"]["rope linear"]["rope_parameters"]
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-6}, "Llama"),
    "one kv head": ("llama", {"num_key_value_heads": 1}, "Llama"),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "Llama"),
    "tied": ("llama", {"tie_word_embeddings": True, "pad_token_id": 3}, "Llama"),
    "llama 3's rope": ("llama", {"rope_parameters": LLAMA3_8K}, "Llama"),
    "another rope": ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.5}}, "Llama"),
    "linear": ("llama", {"rope_parameters": LINEAR}, "Llama"),
    "mistral": ("mistral", {"sliding_window": None}, "Llama"),
    "mixtral": ("mixtral", {"num_local_experts": 4}, "Mixtral"),
    "qwen2": ("qwen2", {}, "Qwen2"),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}, "Qwen2"),
    "qwen2_moe": ("qwen2_moe", SHARED, "Qwen2Moe"),
    "qwen2_moe, no bias": ("qwen2_moe", SHARED | {"qkv_bias": False}, "Qwen2Moe"),
    "qwen3": ("qwen3", {}, "Qwen3"),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}, "Qwen3Moe"),
    "gemma": ("gemma", {}, "Gemma"),
    "gemma2": ("gemma2", WINDOW | SCALE | {"final_logit_softcapping": 3.0}, "Gemma2"),
    "gemma3": ("gemma3_text", GEMMA3, "Gemma3"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model of one layer."""
    directory = tmp_path_factory.mktemp("gguf")
    reference("llama", {"num_hidden_layers": 1}, directory)
    write_gguf(directory, directory / "model.gguf", **{"string:general.name": "small"})
    return directory


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model whose rows of queries and keys are permuted, with biases."""
    directory = tmp_path_factory.mktemp("turned")
    sizes = {"num_hidden_layers": 1, "attention_bias": True, "num_attention_heads": 8}
    reference("llama", sizes | {"intermediate_size": 96}, directory)  # blocks have 32 values
    write_gguf(directory, directory / "m.gguf", Kind.Q8_0)
    return directory


@torch.no_grad()
def assert_close(model: Any, expected: torch.Tensor) -> None:
    assert (model(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", MODELS)
def test_the_model_that_was_converted(case: str, tmp_path: Path) -> None:
    model_type, sizes, name = MODELS[case]
    theirs = reference(model_type, sizes, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    ours = tigon.from_pretrained(tmp_path / "model.gguf")
    assert type(ours).__name__ == name and ours.dtype == torch.float32
    expected = theirs(IDS).logits.detach()
    assert_close(ours, expected)
    written = load_file(tmp_path / "model.safetensors")
    ours.save_pretrained(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    if not name.startswith("Gemma"):  # 1 was added to norms, which rounds them
        assert same(exported, written)
    assert_close(load_reference(tmp_path / "out"), expected)


# Rows of a multiple of 256, which most types have blocks of
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    reference("llama", WIDE | {"num_hidden_layers": 1}, tmp_path)
    held = write_gguf(tmp_path, tmp_path / "m.gguf", Kind[kind])
    for dtype in torch.float32, torch.bfloat16:
        ours = tigon.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=dtype).state_dict()
        qkv, gate_up = (
            ours[f"model.layers.0.{name}.weight"]
            for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
        )
        q, k = (  # neighbours to halves
            held[f"blk.0.attn_{name}.weight"].view(-1, 16, 2, 256).transpose(1, 2).reshape(-1, 256)
            for name in "qk"
        )
        assert torch.equal(qkv, torch.cat([q, k, held["blk.0.attn_v.weight"]]).to(dtype))
        parts = [held[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up")]
        assert torch.equal(gate_up, torch.cat(parts).to(dtype))
        assert torch.equal(ours["lm_head.weight"], held["output.weight"].to(dtype))
    auto = {"F16": torch.float16}.get(kind, torch.bfloat16)
    assert tigon.from_pretrained(tmp_path / "m.gguf").dtype == auto


PEERS = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3")


@pytest.mark.parametrize("case", PEERS)
def test_weights_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, sizes, _ = MODELS[case]
    # It splits experts of these sizes only
    even = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
    even |= {"moe_intermediate_size": 32} if "moe" in model_type else {}
    even |= {"shared_expert_intermediate_size": 32} if model_type == "qwen2_moe" else {}
    reference(model_type, sizes | even, tmp_path)
    write_gguf(tmp_path, tmp_path / "m.gguf", Kind.Q8_0)
    # It forgets some sizes in the metadata, such as the heads'
    config = AutoConfig.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32
    )
    ours = tigon.from_pretrained(tmp_path / "m.gguf", dtype=torch.float32)
    ours.save_pretrained(tmp_path / "out")
    again = load_reference(tmp_path / "out")
    assert same(again.state_dict(), theirs.state_dict())


def test_any_range_of_rows_of_turned_heads(turned: Path) -> None:
    tensors = GGUFModel(GGUF.open(turned / "m.gguf")).checkpoint("m").tensors
    for name in "weight", "bias":
        info = tensors[f"model.layers.0.self_attn.k_proj.{name}"]
        assert info.unit == 20
        with Reader() as reader:
            whole = info.rows(reader, 0, 40)
            for first in range(0, 40, 3):
                for end in range(first, 41, 5):
                    assert torch.equal(info.rows(reader, first, end - first), whole[first:end])


def sharded(directory: Path) -> None:
    """Rows, then columns, of which a half begins within a block."""
    with start("cpu"):
        for dim in (0, 1):
            model, checkpoint = build(Repository(directory), ZOO, gguf_file="m.gguf")
            fully_shard(model, shard_placement_fn=lambda p, dim=dim: Shard(min(dim, p.dim() - 1)))
            materialize(model, torch.device("cpu"))
            load_weights(model, checkpoint)
            for name, whole in load_file(directory / "whole.safetensors").items():
                p: Any = model.get_parameter(name)
                expected = distribute_tensor(whole, p.device_mesh, p.placements)
                assert torch.equal(p.to_local(), expected.to_local()), (dim, name)


def test_into_parameters_that_two_ranks_share(turned: Path) -> None:
    model = tigon.from_pretrained(turned / "m.gguf")
    save_file(
        {name: p.detach() for name, p in model.named_parameters()}, turned / "whole.safetensors"
    )
    Ranks(2, sharded, turned).finish()


def test_a_config_without_guesses(tmp_path: Path) -> None:
    reference("llama", {"rope_parameters": LLAMA3_8K, "rms_norm_eps": 1e-5}, tmp_path)
    more = {
        "uint32:tokenizer.ggml.eot_token_id": 7,
        "array:tokenizer.ggml.tokens": [f"<{i}>" for i in range(211)],
    }
    write_gguf(tmp_path, tmp_path / "m.gguf", Kind.BF16, **more)
    config = read_config(Repository(tmp_path), {"llama": tigon.Llama}, "m.gguf")
    original = json.loads((tmp_path / "config.json").read_text())
    assert isinstance(config, tigon.Llama.config_class)
    assert config.rope_parameters == original["rope_parameters"]
    assert (config.rms_norm_eps, config.eos_token_id, config.dtype) == (1e-5, [2, 7], "bfloat16")


def test_from_the_hub(hub: Any) -> None:
    directory = hub.root / "lab" / "model-GGUF"
    reference("llama", {"num_hidden_layers": 1}, directory)
    write_gguf(directory, directory / "m-Q8_0.gguf")
    (directory / "model.safetensors").unlink()
    (directory / "config.json").unlink()
    model = tigon.from_pretrained("lab/model-GGUF", gguf_file="m-Q8_0.gguf")
    assert isinstance(model, tigon.Llama)
    with pytest.raises(FileNotFoundError, match=r"a GGUF file, gguf_file='m-Q8_0\.gguf'"):
        tigon.from_pretrained("lab/model-GGUF")


def test_without_the_package(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    import_reader.cache_clear()
    with pytest.raises(ImportError, match=re.escape("pip install 'tigon[gguf]'")):
        tigon.from_pretrained(small / "model.gguf")


def changed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


def value(key: str, old: str, new: bytes) -> Callable[[bytes], bytes]:
    """In place of a value of the metadata, whose type has that struct form."""

    def change(content: bytes) -> bytes:
        at = content.index(key.encode()) + len(key) + 4
        return content[:at] + new + content[at + struct.calcsize(f"<{old}") :]

    return change


def norm(kind: int) -> bytes:
    """The header of the last norm, with this type of ggml."""
    return b"output_norm.weight" + struct.pack("<IQI", 1, 96, kind)


FIVE = struct.pack("<Q", 5)  # the length of a name
BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "cannot be read as GGUF"),
    "no GGUF": (changed(b"GGUF", b"GGML"), "cannot be read as GGUF"),
    "old": (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "version 1"),
    "big-endian": (lambda c: c[:4] + struct.pack(">I", 3) + c[8:], "cannot be read as GGUF"),
    "cut": (lambda c: c[:-1], "cannot be read as GGUF"),
    "header cut": (lambda c: c[:200], "cannot be read as GGUF"),
    "unknown kind": (changed(norm(0), norm(77)), "77"),
    "unread kind": (
        changed(norm(0), norm(26)),
        "tensor 'output_norm.weight': ggml's type 26 is not read",
    ),
    "architecture": (changed(FIVE + b"llama", FIVE + b"mamba"), "'mamba' is not read"),
    "no size": (value("llama.embedding_length", "I", bytes(4)), "embedding_length=0 is not a"),
    "heads": (value("llama.attention.head_count", "I", b"\4\0\0\0"), "does not fit Llama"),
    "layers": (
        value("llama.block_count", "I", b"\xff" * 4),
        "num_hidden_layers=4294967295 must be at most",
    ),
    "epsilon": (
        value("llama.attention.layer_norm_rms_epsilon", "f", struct.pack("<f", torch.nan)),
        "rms_norm_eps=nan must be at least 0",
    ),
    "theta": (value("llama.rope.freq_base", "f", struct.pack("<f", -1)), "freq_base=-1.0 is not"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case: str, small: Path, tmp_path: Path) -> None:
    change, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(change((small / "model.gguf").read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        tigon.from_pretrained(path)
    assert str(path) in str(error.value)


def test_values_that_may_change_numbers_are_refused(tmp_path: Path) -> None:
    reference("llama", {"num_hidden_layers": 1}, tmp_path)
    bad: dict[str, tuple[Any, str]] = {
        "float32:llama.attention.scale": (0.5, r"llama.attention.scale=0.5"),
        "bool:llama.attention.causal": (False, "attention.causal is false"),
        "string:llama.rope.scaling.type": ("longrope", "rope.scaling.type='longrope' is not none"),
        "uint16:split.count": (3, "split.count=3: a file in parts is not read; join them"),
        "string:general.type": ("adapter", "general.type='adapter' is not a model"),
        "array:llama.attention.head_count": ([6, 4], r"head_count=\[6, 4\] is not a size of at l"),
        "uint32:llama.expert_count": (8, "the metadata lack llama.expert_used_count"),
    }
    for i, (key, (given, message)) in enumerate(bad.items()):
        write_gguf(tmp_path, tmp_path / f"{i}.gguf", **{key: given})
        with pytest.raises(ValueError, match=message) as error:
            tigon.from_pretrained(tmp_path / f"{i}.gguf")
        assert f"{i}.gguf" in str(error.value)
