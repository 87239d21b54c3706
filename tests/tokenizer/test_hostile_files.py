# ruff: noqa: E501
"""Tokenizer files that others have written: they load, or are one error that names the file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tigon.tokenizer.backend import check_pattern
from tokenizers import Tokenizer as Backend

from tigon.tokenizer import Tokenizer

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def changed(source: Path, folder: Path, name: str, **values: Any) -> Path:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))
    return folder


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (CONFIG, {"eos_token": ["</s>"]}),
        (CONFIG, {"eos_token": 5}),
        (CONFIG, {"eos_token": {"content": 5}}),
        (CONFIG, {"eos_token": {"content": "</s>", "lstrip": "yes"}}),
        (CONFIG, {"eos_token": {"text": "</s>"}}),
        (CONFIG, {"extra_special_tokens": [5]}),
        (CONFIG, {"extra_special_tokens": "<a>"}),
        (CONFIG, {"extra_special_tokens": [None]}),
        (CONFIG, {"additional_special_tokens": ["<a>", None]}),
        (CONFIG, {"x_token": {"content": 5}}),
        (CONFIG, {"x_token": {}}),
        (MAP, {"extra_special_tokens": [None]}),
        (MAP, {"x_token": {"content": None}}),
        (CONFIG, {"added_tokens_decoder": ["<a>"]}),
        (CONFIG, {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        (CONFIG, {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}),
        (CONFIG, {"added_tokens_decoder": {"\u0663": {"content": "<a>"}}}),
        (CONFIG, {"added_tokens_decoder": {"5": "<a>"}}),
        (CONFIG, {"model_max_length": "512"}),
        (CONFIG, {"model_max_length": -1}),
        (CONFIG, {"model_max_length": True}),
        (CONFIG, {"model_max_length": [512]}),
        (CONFIG, {"split_special_tokens": "no"}),
        (CONFIG, {"chat_template": {"a": "b"}}),
        (CONFIG, {"chat_template": ["a"]}),
        (CONFIG, {"chat_template": [{"name": "a"}]}),
        (CONFIG, {"chat_template": [{"name": ["a"], "template": "b"}]}),
        (MAP, {"eos_token": "\ud800"}),
        (MAP, {"bos_token": False}),
        (ADDED, {"<a>": "5"}),
        (ADDED, {"<a>": None}),
    ],
)
def test_types_are_checked(
    byte_level: Path, tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"/{name}\b"):
        Tokenizer.from_pretrained(changed(byte_level, tmp_path, name, **values))


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", split("(a+)+$"), "repeats what repeats"),
        ("pre_tokenizer", split("a{1,20}+b"), "repeats what repeats"),
        ("pre_tokenizer", split("(a|a)*$"), "repeats alternatives"),
        ("pre_tokenizer", split(r"(.*)\1"), "refers to a group"),
        ("pre_tokenizer", split(r"(?<a>a|b\g<a>c)"), "cannot read the pattern"),
        ("pre_tokenizer", split("a{1,1000}a{1,1000}a{1,1000}b"), "one behind another"),
        ("pre_tokenizer", split("a*b|a*(?:a*)a*c"), "one behind another"),
        ("pre_tokenizer", split("a?" * 30 + "b"), "one behind another"),
        ("pre_tokenizer", split("(?:ab|a|b)" * 20 + "c"), "one behind another"),
        ("pre_tokenizer", split("(a"), "Oniguruma|cannot read"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split("a")] * 40}, "40 steps"),
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30},
            "1073741824 times longer",
        ),
        ("normalizer", replace("a", "a" * 1000), "1000 times longer"),
        (
            "decoder",
            {"type": "Sequence", "decoders": [replace("a", "aa")] * 30},
            "1073741824 times longer",
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": TWICE,
                "pair": [*TWICE, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            },
            "writes each text 2 times",
        ),
        (
            "truncation",
            {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5},
            None,
        ),
        ("added_tokens", [{"id": 2**31, "content": "<x>"}], "not a tokenizer"),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}, "not a tokenizer"),
    ],
)
def test_what_would_hang(
    byte_level: Path, tmp_path: Path, part: str, value: Any, message: str | None
) -> None:
    folder = changed(byte_level, tmp_path, "tokenizer.json", **{part: value})
    if message is None:  # it is not used
        assert Tokenizer.from_pretrained(folder).encode("a" * 100)
        return
    with pytest.raises(
        ValueError, match=rf"tokenizer\.json is not a tokenizer: .*{message}|{message}"
    ):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "pattern",
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        r"[\p{Han}]+|[\p{Lu}&&[^\p{Han}]]*[\p{Ll}]+(?i:'s|'t)?",
        r"(?:\r?\n)+(?!\r?\n)",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    ],
)
def test_published_patterns_are_taken(pattern: str) -> None:
    check_pattern(pattern)


def test_files_that_are_no_text(byte_level: Path, tmp_path: Path) -> None:
    folder = changed(byte_level, tmp_path, CONFIG)
    for name, content in (
        ("tokenizer.json", b"\xff\xfe{}"),
        ("chat_template.jinja", b"\xff"),
        (CONFIG, b"[1]"),
        (CONFIG, b"{" * 100_000),
    ):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"/{name}\b"):
            Tokenizer.from_pretrained(folder)
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)
    assert Backend.from_file(str(folder / "tokenizer.json"))
