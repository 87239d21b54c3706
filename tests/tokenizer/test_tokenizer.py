import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tigon.tokenizer import DecodeStream, Tokenizer

CORPUS = [
    "",
    "\n",
    " ",
    "Hello world",
    " a leading blank, and a trailing one ",
    "two  three   blanks,\ttabs\t\t, lines\n\n\n \r\n end",
    "def f(x: int) -> dict:\n    return {'a': [1, 2.5e-3, x]}  # fine\n",
    "naïve café, e\u0301, ﬁ, ½",
    "😀 and 👩‍👩‍👧‍👦🏳️‍🌈 then 🇩🇪",
    "你好，世界。日本語 한국어 مرحبا",
    "𐍈𐍉 zero\u200bwidth\ufeff \u00a0 nul\x00",
    "a real \ufffd replacement character",
    "<s>literal</s><|im_start|>user\nhi<|im_end|> [INST] x [/INST]<unk><pad>",
    "<0x41><0xE4> \u2581under\u2581",
]


REAL = sorted(Path(os.environ.get("TIGON_TOKENIZERS", "/nowhere")).glob("*/tokenizer.json"))


def stream(stream: DecodeStream, ids: list[int]) -> list[str]:
    pieces = [piece for i in ids if (piece := stream.step(i)) is not None]
    return [*pieces, stream.finish()]


def edited(
    source: Path, target: Path, *, name: str = "tokenizer_config.json", **changes: Any
) -> Path:
    """Copy the files of a tokenizer, and change values of a JSON file; `...` removes one."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    content = json.loads((target / name).read_text()) if (target / name).exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not ...}
    (target / name).write_text(json.dumps(content))
    return target


def assert_equal_to_transformers(directory: Path) -> None:
    ours, theirs = Tokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    assert ours.model_max_length == theirs.model_max_length
    for name in ("bos", "eos", "pad", "unk"):
        for attribute in (f"{name}_token", f"{name}_token_id"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    for flag in (True, False):
        expected = [theirs.encode(text, add_special_tokens=flag) for text in CORPUS]
        assert [ours.encode(text, add_special_tokens=flag) for text in CORPUS] == expected
        assert ours.encode_batch(CORPUS, add_special_tokens=flag) == expected
        for ids in expected:
            for skip in (True, False):
                text = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == text


@pytest.mark.skipif(not REAL, reason="TIGON_TOKENIZERS names no folder of tokenizers")
@pytest.mark.parametrize("file", REAL or [None], ids=str)
def test_real_tokenizers_equal_transformers(file):
    assert_equal_to_transformers(file.parent)
    check_streams(Tokenizer.from_pretrained(file.parent))


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True, **plain, **flags}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({}, {}),
        ({"model_max_length": ..., "pad_token": None, "unk_token": ...}, {}),
        ({"eos_token": {"__type": "AddedToken", **added("<|im_end|>")}}, {}),
        ({"pad_token": "[PAD]", "additional_special_tokens": ["Hello", "<mine>"]}, {}),
        ({"extra_special_tokens": ["<a>"], "image_token": "<image>"}, {}),
        ({"extra_special_tokens": {"world_token": "world"}}, {}),
        ({"added_tokens_decoder": {"700": added("café"), "1": added("<s>", rstrip=True)}}, {}),
        ({"added_tokens_decoder": {"900": added("fine", special=False)}, "pad_token": "fine"}, {}),
        ({"add_bos_token": False, "add_eos_token": False}, {}),
        ({"split_special_tokens": True}, {}),
        (
            {"bos_token": ..., "eos_token": ..., "pad_token": ...},
            {
                "special_tokens_map.json": {"bos_token": "<|im_start|>", "pad_token": added("def")},
                "added_tokens.json": {"return": 701, "def": 700},
            },
        ),
        (
            {"added_tokens_decoder": {"1": added("<s>")}},
            {"special_tokens_map.json": {"eos_token": "<|im_end|>"}},
        ),
    ],
)
def test_settings_count_as_in_transformers(directory, tmp_path, config, files):
    edited(directory, tmp_path, **config)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert_equal_to_transformers(tmp_path)


def check_streams(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            pieces = stream(tokenizer.decode_stream(skip_special_tokens=skip), ids)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
            assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    dice, every = random.Random(0), range(len(tokenizer))
    for pool in (every[:280], every[-260:], every) * 300:  # single bytes are at either end
        ids = dice.choices(pool, k=dice.randint(1, 30)) + dice.choices(every, k=2)
        for skip in (True, False):
            pieces = stream(tokenizer.decode_stream(skip_special_tokens=skip), ids)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_stream_is_decode_in_pieces(directory):
    check_streams(Tokenizer.from_pretrained(directory))


def test_stream_returns_text_once_it_is_certain(tokenizer, byte_fallback):
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    pieces = tokenizer.decode_stream()
    assert [pieces.step(i) for i in ids] == ["a", None, None, None, "😀", "b"]
    pieces = tokenizer.decode_stream()
    assert [pieces.step(i) for i in ids[:3]] == ["a", None, None]
    assert (pieces.finish(), pieces.step(ids[-1])) == ("\ufffd", "b")

    tokenizer = Tokenizer.from_pretrained(byte_fallback)
    _, a, f0, *rest, b = tokenizer.encode("a😀b", add_special_tokens=False)
    pieces = tokenizer.decode_stream()
    assert [pieces.step(i) for i in (a, f0, *rest, b)] == ["a", None, None, None, None, "😀b"]
    # The decoder turns a whole run of bytes into U+FFFD when it ends inside a character
    pieces = tokenizer.decode_stream()
    assert [pieces.step(i) for i in (a, f0, *rest, f0, b)][-1] == "\ufffd" * 5 + "b"


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad(byte_level, side):
    rows = [[5, 6, 7], [8], []]
    theirs = AutoTokenizer.from_pretrained(byte_level).pad(
        {"input_ids": rows}, padding_side=side, return_tensors="pt"
    )
    ids, mask = Tokenizer.from_pretrained(byte_level).pad(rows, side=side)
    assert ids.tolist() == theirs["input_ids"].tolist()
    assert mask.tolist() == theirs["attention_mask"].tolist()
    assert ids.dtype == mask.dtype == theirs["input_ids"].dtype


def test_save_copies_the_files_byte_for_byte(byte_level, tmp_path):
    source, target = edited(byte_level, tmp_path / "source"), tmp_path / "target"
    (source / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (source / name).write_text("{{ messages }}\n")
    for name in ("special_tokens_map.json", "added_tokens.json", "vocab.json", "tekken.json"):
        (source / name).write_text(' {"x": 1}')
    for name in ("merges.txt", "tokenizer.model"):
        (source / name).write_bytes(b"#version: 0.2\r\na b\r\n")
    (source / "model.safetensors").write_bytes(b"no part of the tokenizer")
    tokenizer = Tokenizer.from_pretrained(source)
    assert tokenizer.add_tokens([]) == 0
    tokenizer.save_pretrained(target)

    def files(root: Path) -> dict[Path, bytes]:
        return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    expected = files(source)
    del expected[Path("model.safetensors")]
    assert files(target) == expected
    assert {path.relative_to(source) for path in tokenizer.files} == expected.keys()


def test_files_in_memory_are_saved(byte_level, tmp_path):
    source = edited(byte_level, tmp_path / "source")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    tokenizer = Tokenizer.from_pretrained(source)
    tokenizer.keep_files()
    shutil.rmtree(source)
    tokenizer.save_pretrained(tmp_path / "same")
    assert {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()} == before
    tokenizer.use_pad(3)
    tokenizer.save_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other/tokenizer_config.json").read_text())
    pad = tokenizer.backend.id_to_token(3)
    assert config == json.loads(before["tokenizer_config.json"]) | {"pad_token": pad}
    pickled = pickle.dumps(tokenizer)  # for worker processes, which save nothing
    assert pickle.loads(pickled).encode("Hi <s>") == tokenizer.encode("Hi <s>")
    assert before["tokenizer_config.json"] not in pickled


def test_a_hub_repository_is_as_its_directory(byte_level, hub):
    source = edited(byte_level, hub.root / "lab" / "model", chat_template="old")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "mine.jinja").write_text("{{ messages }}\n")
    (source / "chat_template.jinja").write_text("{{ 1 }}")
    (source / "model.safetensors").write_bytes(b"no part of the tokenizer")
    local = Tokenizer.from_pretrained(source)
    for offline in (False, True):
        remote = Tokenizer.from_pretrained("lab/model", local_files_only=offline)
        assert remote.encode("Hi <s>") == local.encode("Hi <s>")
        assert remote.chat_template == local.chat_template
        assert [p.read_bytes() for p in remote.files] == [p.read_bytes() for p in local.files]
    assert hub.gets["lab/model/model.safetensors"] == 0


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json, only tokenizer\.model"):
        Tokenizer.from_pretrained(tmp_path)
