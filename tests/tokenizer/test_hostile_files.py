"""Tokenizer files that others have written: they load, or are one error that names the file."""

import pytest
from tokenizers import Tokenizer as Backend

from tests.tokenizer.test_tokenizer import edited
from tigon.tokenizer import Tokenizer, files

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


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
def test_types_are_checked(byte_level, tmp_path, name, values):
    with pytest.raises(ValueError, match=rf"/{name}\b"):
        Tokenizer.from_pretrained(edited(byte_level, tmp_path, name=name, **values))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("added_tokens", [{"id": 2**31, "content": "<x>"}]),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("decoder", {"type": "Decoder"}),
    ],
)
def test_parts_that_the_library_refuses(byte_level, tmp_path, part, value):
    folder = edited(byte_level, tmp_path, name="tokenizer.json", **{part: value})
    with pytest.raises(ValueError, match=r"/tokenizer\.json is not a tokenizer: "):
        Tokenizer.from_pretrained(folder)


def test_truncation_and_padding_are_not_used(byte_level, tmp_path):
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    folder = edited(byte_level, tmp_path, name="tokenizer.json", truncation=truncation)
    assert len(Tokenizer.from_pretrained(folder).encode("a" * 100)) > 10


def test_sizes_of_files_are_limited(byte_level, tmp_path, monkeypatch):
    folder = edited(byte_level, tmp_path, name="tokenizer.json")
    (folder / "chat_template.jinja").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ValueError, match=r"/chat_template\.jinja has 1048577 bytes"):
        Tokenizer.from_pretrained(folder)
    monkeypatch.setattr(files, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ValueError, match=r"/tokenizer\.json has \d+ bytes"):
        Tokenizer.from_pretrained(folder)


def test_texts_on_which_the_library_panics(byte_level, tmp_path):
    look = {"type": "Replace", "pattern": {"Regex": "(?=quick)"}, "content": "a"}
    strip = {"type": "Strip", "content": "x", "start": 0, "stop": 3}
    folder = edited(byte_level, tmp_path, name="tokenizer.json", normalizer=look, decoder=strip)
    tokenizer = Tokenizer.from_pretrained(folder)
    message = r"/tokenizer\.json: the tokenizer failed: index out of bounds"
    assert tokenizer.encode("the quick fox")  # it may insert, but not before the first character
    ids = tokenizer.encode("x", add_special_tokens=False)
    for call in (
        lambda: tokenizer.encode("quick fox"),
        lambda: tokenizer.encode_batch(["quick fox"]),
        lambda: tokenizer.decode(ids),
        lambda: tokenizer.decode_stream().step(ids[0]),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_text_without_tokens(byte_level, tmp_path):
    model = {"type": "WordLevel", "vocab": {"Hi": 0}, "unk_token": "<unk>"}
    parts = {"model": model, "added_tokens": [], "post_processor": None}
    folder = edited(byte_level, tmp_path, name="tokenizer.json", **parts)
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("Hi") == [0]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match=r"/tokenizer\.json: the tokenizer failed: WordLevel"):
            encode("Hello")


def test_files_that_are_no_text(byte_level, tmp_path):
    folder = edited(byte_level, tmp_path, name=CONFIG)
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
