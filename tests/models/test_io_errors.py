"""Every bad checkpoint and every bad place to export to: one message that names what is wrong."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.models.tiny import edit_config, reference
from tigon.models.pretrained import convert
from tigon.weights import Repository, load

Break = Callable[[Path], Any]
SHARD = "model-00003-of-00006.safetensors"


@pytest.fixture
def model(sound: Path) -> tigon.models.CausalLM:
    return tigon.from_pretrained(sound / "single")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    reference("llama", {}, directory / "single")
    reference("llama", {}, directory / "sharded", max_shard_size="200KB")
    return directory


def configure(**changes: Any) -> Break:
    return lambda directory: edit_config(directory, **changes)


def remove(name: str) -> Break:
    return lambda directory: (directory / name).unlink()


def unfit(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = load_file(path)
    layer = "model.layers.1."
    del content[layer + "self_attn.k_proj.weight"], content["lm_head.weight"]
    content[layer + "self_attn.q_norm.weight"] = torch.ones(20)
    content[layer + "mlp.down_proj.weight"] = torch.ones(136, 96)
    content["model.norm.weight"] = torch.ones(96, dtype=torch.int32)
    save_file(content, path)


def pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def tag(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"', 1))


# kind of checkpoint, how it is damaged, message
BAD: dict[str, tuple[str, Break, str]] = {
    "tensors": (
        "single",
        unfit,
        r"the checkpoint .*single does not fit Llama:"
        r"\n  2 missing: model.layers.1.self_attn.k_proj.weight, lm_head.weight"
        r"\n  1 unexpected: model.layers.1.self_attn.q_norm.weight"
        r"\n  2 of another shape or kind: "
        r"model.layers.1.mlp.down_proj.weight is \[136, 96\], not \[96, 136\], "
        r"model.norm.weight is torch.int32, not torch.float32$",
    ),
    "truncated": (
        "sharded",
        lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 1),
        rf"sharded/{SHARD} is truncated: its tensors take \d+ bytes and \d+ are there",
    ),
    "shard missing": (
        "sharded",
        remove(SHARD),
        rf"sharded has no file {SHARD}, but model.safetensors.index.json names it",
    ),
    "no weights": (
        "single",
        remove("model.safetensors"),
        r"single has neither model.safetensors nor model.safetensors.index.json",
    ),
    "pickle": ("single", pickles, r"pickled weights \(pytorch_model.bin\).*convert them once"),
    "no JSON": (
        "single",
        lambda d: (d / "config.json").write_bytes(b"{'a': 1}"),
        "single/config.json is not valid JSON: Exp",
    ),
    "dtype tag": ("single", tag, r"model.safetensors: tensor '.*' has the unsupported dtype 'F99'"),
}
FACTORS = {"short_factor": [1.0] * 10, "long_factor": [1.0] * 9}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "model_type": ({"model_type": "gpt9"}, "model_type 'gpt9' is not .* or 'llama'"),
    "quantized": (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config: .* quant_method 'awq'",
    ),
    "longrope factors": (
        {"rope_parameters": FACTORS | {"rope_type": "longrope"}},
        ".*short_factor and long_factor have 10 and 9 values, but the head has 10 frequencies",
    ),
    "dtype": ({"dtype": "float8_e4m3fn"}, "unsupported dtype 'float8_e4m3fn': .*; pass dtype="),
}
BAD |= {
    f"config: {case}": ("single", configure(**changes), f"single/config.json: {message}")
    for case, (changes, message) in CONFIGS.items()
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(case: str, sound: Path, tmp_path: Path) -> None:
    kind, damage, message = BAD[case]
    directory = tmp_path / kind
    directory.mkdir()
    for path in (sound / kind).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    damage(directory)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        tigon.from_pretrained(directory)
    assert re.search(message, str(error.value)), str(error.value)


def test_config_errors_come_before_the_weights_are_fetched(hub: Any) -> None:
    directory = hub.root / "lab" / "odd"
    reference("llama", {}, directory)
    configure(quantization_config={"quant_method": "awq"})(directory)
    with pytest.raises(
        ValueError, match=r"lab/odd/config.json: quantization_config: .* quant_method 'awq'"
    ):
        tigon.from_pretrained("lab/odd")
    assert not any("safetensors" in name for name in hub.heads | hub.gets)


def test_a_class_reads_its_own_family(tmp_path: Path) -> None:
    configure_qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(configure_qwen2))
    with pytest.raises(ValueError, match=rf"{tmp_path}/config.json: model_type 'qwen2' is not 'll"):
        tigon.Llama.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'qwen2' is not 'llama'"):
        tigon.Llama.from_config(configure_qwen2)


@pytest.mark.parametrize("dtype", ["bf16", torch.int8])
def test_dtype_of_an_export(dtype: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"dtype must be a floating .*not .*{dtype}"):
        model.save_pretrained(tmp_path / "new", dtype=dtype)
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer, or None, not 'name'"):
        model.save_pretrained(tmp_path / "new", tokenizer="name")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["2 gigs", "0GB", -5, 2.5, True])
def test_shard_sizes(size: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"max_shard_size={size!r} is not a size"):
        model.save_pretrained(tmp_path / "new", max_shard_size=size)
    assert not any(tmp_path.iterdir())


def test_only_an_export_is_replaced(model: Any, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    (target / "other").mkdir(parents=True)
    (target / "other/config.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"mine holds files and no config\.json"):
        model.save_pretrained(target, replace=True)
    assert (target / "other/config.json").read_text() == "mine"
    shutil.rmtree(target)
    for _ in "ab":
        model.save_pretrained(target, replace=True)


def test_other_files_beside_an_export_are_kept(sound: Path, model: Any, tmp_path: Path) -> None:
    """But not the weights of the one before, which had more files, nor an edited config."""
    target, alone = tmp_path / "hf", tmp_path / "alone"
    model.save_pretrained(target, max_shard_size="20KB")
    assert (target / "model.safetensors.index.json").exists()
    model.save_pretrained(alone)
    mine = ["README.md", "eval_results.json", "evals/gsm8k.jsonl", "model.gguf", "tokenizer.model"]
    (target / "evals").mkdir()
    for name in mine:
        (target / name).write_text(f"my {name}")
    (target / "config.json").write_text("{}")
    (target / "data").symlink_to(sound)
    model.save_pretrained(target, replace=True)
    for name in mine:
        assert (target / name).read_text() == f"my {name}"
    assert (target / "data").readlink() == sound
    found = {path.name for path in target.iterdir()}
    assert found == {p.name for p in alone.iterdir()} | {p.split("/")[0] for p in mine} | {"data"}
    for path in alone.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_keywords_of_transformers(sound: Path) -> None:
    for theirs, ours in (("torch_dtype", "dtype"), ("attn_implementation", "attention")):
        with pytest.raises(
            TypeError, match=f"unexpected keyword argument '{theirs}'; here: '{ours}"
        ):
            tigon.from_pretrained(sound / "single", **{theirs: "x"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LoraConfig\(\) got an .*'r'; here: 'rank'"):
        tigon.LoraConfig(r=8)  # type: ignore[call-arg]


def test_other_places_than_a_model(sound: Path, tmp_path: Path) -> None:
    for name in ("run", "tuned/adapter"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/hf").symlink_to(sound / "single")
    (tmp_path / "tuned/adapter/adapter_config.json").write_text("{}")
    adapter = r"no file config.json; .*/adapter is an adapter"
    for place, message in (
        ("run", r"if it is a run, its export is .*/run/hf"),
        ("tuned", adapter),
        ("tuned/adapter", adapter),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            tigon.from_pretrained(tmp_path / place)
    with pytest.raises(ValueError, match="device 'nowhere' cannot be used here: "):
        tigon.from_pretrained(tmp_path / "nothing", device="nowhere")
    with pytest.raises(ValueError, match=r"mmap=True maps files into the CPU's memory: .* on cuda"):
        tigon.from_pretrained(tmp_path / "nothing", device="cuda", mmap=True)


class Unwritable:
    """A tokenizer whose files cannot be copied."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("half")
        raise OSError("disk full")


def test_failed_exports_leave_nothing(sound: Path, model: Any, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=rf"{full} exists and is a directory with files"):
        model.save_pretrained(full)
    with pytest.raises(FileExistsError, match=r"notes.txt exists and is a file"):
        model.save_pretrained(full / "notes.txt")
    with pytest.raises(OSError, match="disk full"):
        model.save_pretrained(tmp_path / "new", tokenizer=Unwritable())  # type: ignore[arg-type]
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is on the meta device"):
        model.save_pretrained(tmp_path / "new", max_shard_size="100KB")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
    assert [p.name for p in full.iterdir()] == ["notes.txt"]
    assert (full / "notes.txt").read_text() == "mine"

    (tmp_path / "empty").mkdir()
    tigon.from_pretrained(sound / "single").save_pretrained(tmp_path / "empty")
    assert load_file(tmp_path / "empty" / "model.safetensors").keys() == set(
        load_file(sound / "single" / "model.safetensors")
    )


def test_a_checkpoint_that_is_replaced_while_it_is_read(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of two steps of a run would be mixed."""
    source, message = tmp_path / "source", "was replaced while it was read: load it again"
    model.save_pretrained(source, max_shard_size="200KB")

    def after_replacement(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            model.save_pretrained(source, max_shard_size="200KB", replace=True)
            function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(load, "fill_shards", after_replacement(load.fill_shards))
        with pytest.raises(OSError, match=message):
            tigon.from_pretrained(source)
    monkeypatch.setattr(convert, "write_model", after_replacement(convert.write_model))
    with pytest.raises(OSError, match=message):
        convert.convert_pretrained(Repository(source), tmp_path / "target", tigon.models.MODELS)
    assert os.listdir(tmp_path) == ["source"]
