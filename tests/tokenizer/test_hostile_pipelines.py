"""Parts of a tokenizer.json that make the library panic, end the process, or write without end."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.test_hostile_files import changed, replace
from tigon.tokenizer import Tokenizer

A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "", "cleanup": True}
INSERT = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
PREFIX = {"type": "BPE", "continuing_subword_prefix": "z", "merges": [["a", "\u00e9"]]}


def precompiled(charsmap: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()}


def charsmap() -> dict[str, str]:
    """As sentencepiece's, with the longest text that it has, and a tree without one."""
    longest = "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 "
    longest += "\u0648\u0633\u0644\u0645"
    return precompiled(b"\x00\x04\0\0" + bytes(1024) + longest.encode() + b"\0")


def template(*pieces: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": pieces, "pair": [A, B], "special_tokens": {}}


def metaspace(letter: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": letter, "prepend_scheme": "always", "split": True}


def sequence(key: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: steps}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "pre_tokenizer FixedLength has l"),
        (
            "pre_tokenizer",
            sequence("pretokenizers", BYTES, {"type": "FixedLength", "length": 0}),
            "pre_tokenizer FixedLength has length 0",
        ),
        ("normalizer", INSERT, "normalizer makes the library fail on the text 'A probe"),
        ("normalizer", replace("", "a"), "normalizer makes the library fail"),
        ("normalizer", precompiled(bytes(4)), "normalizer makes the library fail"),
        ("normalizer", precompiled(b"\x04" + bytes(8)), "normalizer makes the library fail"),
        ("post_processor", template(B), "post_processor.single has a second text, B"),
        (
            "post_processor",
            template({"SpecialToken": {"id": "<s>", "type_id": 0}}, A),
            "post_processor.single adds '<s>', which special_tokens lacks",
        ),
        (
            "post_processor",
            sequence("processors", template(), template(A)),
            "post_processor makes the library fail",
        ),
        (
            "decoder",
            sequence(
                "decoders",
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            ),
            "decoder makes the library fail",
        ),
    ],
)
def test_what_panics_on_plain_text_is_not_loaded(
    byte_level: Path, tmp_path: Path, part: str, value: Any, message: str
) -> None:
    folder = changed(byte_level, tmp_path, "tokenizer.json", **{part: value})
    with pytest.raises(ValueError, match=rf"/tokenizer\.json is not a tokenizer: its {message}"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "continuing_subword_prefi\\u0078"])
def test_merges_that_would_end_the_process(byte_level: Path, tmp_path: Path, key: str) -> None:
    """The library cuts a byte of the prefix off each, here half of an e with an accent."""
    model = PREFIX | {"vocab": {"a": 0, "\u00e9": 1, "a\u00e9": 2}}
    folder = changed(byte_level, tmp_path, "tokenizer.json", model=model, added_tokens=[])
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("continuing_subword_prefix", key))
    with pytest.raises(ValueError, match=r"/tokenizer\.json .* its model\.merges has .*prefix 'z'"):
        Tokenizer.from_pretrained(folder)
    model |= {"vocab": {"a": 0, "zb": 1, "ab": 2}, "merges": ["a zb"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    assert Tokenizer.from_pretrained(folder).encode("ab", add_special_tokens=False) == [2]


@pytest.mark.parametrize("key", ["precompiled_charsmap", "precompiled_charsma\\u0070"])
def test_a_charsmap_of_another_length_than_it_says(
    byte_level: Path, tmp_path: Path, key: str
) -> None:
    """The library allocates at once what the first four bytes say, and eight in place of four."""
    folder = changed(
        byte_level, tmp_path, "tokenizer.json", normalizer=precompiled(b"\xff" * 4 + bytes(12))
    )
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("precompiled_charsmap", key))
    with pytest.raises(ValueError, match=r"/tokenizer\.json .* 16 bytes, .* say that 4294967295"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", sequence("pretokenizers", *[BYTES] * 9), "text 512 times longer"),
        ("normalizer", sequence("normalizers", *[{"type": "ByteLevel"}] * 9), "512 times longer"),
        (
            "normalizer",
            sequence("normalizers", *[replace("\u0644", "\ufdfa"), {"type": "NFKD"}] * 3),
            "543547 times longer",
        ),
        (
            "normalizer",
            sequence("normalizers", replace("a", "\ufdfa" * 21), {"type": "NFKD"}),
            "693 times longer",
        ),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 65}, "prepends 65 characters"),
        (
            "pre_tokenizer",
            sequence(
                "pretokenizers",
                *(
                    step
                    for letter in "abcdefg"
                    for step in (metaspace(letter), {"type": "FixedLength", "length": 1})
                ),
            ),
            "128 times longer",
        ),
        ("decoder", sequence("decoders", *[CTC] * 4), "81 times longer"),
        (
            "decoder",
            sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 4),
            "81 times longer",
        ),
    ],
)
def test_what_writes_without_end_is_not_loaded(
    byte_level: Path, tmp_path: Path, part: str, value: Any, message: str
) -> None:
    folder = changed(byte_level, tmp_path, "tokenizer.json", **{part: value})
    with pytest.raises(ValueError, match=rf"/tokenizer\.json is not a tokenizer: its .*{message}"):
        Tokenizer.from_pretrained(folder)


def test_steps_together_write_no_more(byte_level: Path, tmp_path: Path) -> None:
    parts = {"normalizer": replace("a", "b" * 60)}
    parts["pre_tokenizer"] = sequence("pretokenizers", *[BYTES] * 3)
    folder = changed(byte_level, tmp_path, "tokenizer.json", **parts)
    with pytest.raises(ValueError, match=r"normalizer and pre_tokenizer could .* 480 times longer"):
        Tokenizer.from_pretrained(folder)


def of_model(byte_level: Path, folder: Path, **model: Any) -> Path:
    parts = {"model": model, "added_tokens": [], "post_processor": None, "decoder": None}
    changed(byte_level, folder, "tokenizer.json", pre_tokenizer=None, **parts)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_words_that_wordpiece_would_cut_for_hours(byte_level: Path, tmp_path: Path) -> None:
    """Of a letter for each piece: the third power of what a word has."""
    model = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##"}
    model |= {"vocab": {"a": 0, "##a": 1}}
    folder = of_model(byte_level, tmp_path, **model, max_input_chars_per_word=10**15)
    with pytest.raises(ValueError, match=r"max_input_chars_per_word is 1000000000000000, and may"):
        Tokenizer.from_pretrained(folder)
    of_model(byte_level, tmp_path, **model, max_input_chars_per_word=1000)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("a" * 1000) == [0, *[1] * 999] and tokenizer.encode("a" * 1001) == [0]


def test_tokens_that_begin_one_another(byte_level: Path, tmp_path: Path) -> None:
    """Each is looked up wherever one of them begins."""
    model = {"type": "Unigram", "unk_id": 0}
    vocab = [["a" * n, -1.0] for n in range(1, 129)]
    folder = of_model(byte_level, tmp_path, **model, vocab=vocab)
    assert Tokenizer.from_pretrained(folder).encode("a" * 129) in ([0, 127], [127, 0])
    vocab = [["a" * n, -1.0] for n in range(1, 400)]
    of_model(byte_level, tmp_path, **model, vocab=vocab)
    with pytest.raises(
        ValueError, match=r"/tokenizer\.json .* of more than 128 characters, 71544 "
    ):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("letter", ["a", "\u00e9"])
def test_beginnings_of_tokens_are_counted(
    byte_level: Path, tmp_path: Path, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bytes, with escapes read: the library has a node in its tree for each."""
    vocab = [[f"{letter}{last}", 0] for last in ("x", "y", '"')]
    folder = of_model(byte_level, tmp_path, type="Unigram", unk_id=0, vocab=vocab)
    nodes = len(letter.encode()) + 3
    monkeypatch.setattr("tigon.tokenizer.unread.MOST_NODES", nodes)
    assert Tokenizer.from_pretrained(folder).encode(f'{letter}"') == [2]
    monkeypatch.setattr("tigon.tokenizer.unread.MOST_NODES", nodes - 1)
    with pytest.raises(ValueError, match=rf"/tokenizer\.json .* more than {nodes - 1} beginnings"):
        Tokenizer.from_pretrained(folder)


def test_a_unigram_vocabulary_that_is_no_json(byte_level: Path, tmp_path: Path) -> None:
    folder = of_model(byte_level, tmp_path, type="Unigram", unk_id=0, vocab=[["ab", 0]])
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"ab"', r'"a\xb"'))
    with pytest.raises(ValueError, match=r"/tokenizer\.json is not a tokenizer: invalid escape"):
        Tokenizer.from_pretrained(folder)


def test_more_values_than_the_library_has_memory_for(
    byte_level: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tigon.tokenizer.unread.MOST_VALUES", 100)
    with pytest.raises(
        ValueError, match=r"/tokenizer\.json has about \d+ values, and may have 100"
    ):
        Tokenizer.from_pretrained(changed(byte_level, tmp_path, "tokenizer.json"))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        ([{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")], [metaspace("\u2581")]),
        (
            [
                {"type": "Replace", "pattern": {"Regex": r"(?<!\n)^"}, "content": "\u2581"},
                replace(" ", "\u2581"),
            ],
            [],
        ),
        (
            [replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}],
            [{"type": "WhitespaceSplit"}, metaspace("\u2581")],
        ),
        ([{"type": "NFC"}], [{"type": "Digits", "individual_digits": True}, BYTES, BYTES]),
        (
            [replace("``", '"'), {"type": "NFKD"}, charsmap(), SPACES],
            [{"type": "WhitespaceSplit"}, metaspace("\u2581")],
        ),
        ([{"type": "NFKC"}, {"type": "Prepend", "prepend": "\u2581"}, SPACES], []),
    ],
    ids=["llama", "persimmon", "albert", "byte level", "t5", "nfkc"],
)
def test_published_pipelines_are_taken(
    byte_level: Path, tmp_path: Path, normalizer: list[Any], pre_tokenizer: list[Any]
) -> None:
    parts = {
        "normalizer": sequence("normalizers", *normalizer),
        "pre_tokenizer": sequence("pretokenizers", *pre_tokenizer),
    }
    folder = changed(byte_level, tmp_path, "tokenizer.json", **parts)
    assert Tokenizer.from_pretrained(folder).encode("the quick brown fox")


def test_what_fails_on_some_texts_names_the_file(byte_level: Path, tmp_path: Path) -> None:
    look = {"type": "Replace", "pattern": {"Regex": "(?=quick)"}, "content": "a"}
    strip = {"type": "Strip", "content": "x", "start": 0, "stop": 3}
    folder = changed(byte_level, tmp_path, "tokenizer.json", normalizer=look, decoder=strip)
    tokenizer = Tokenizer.from_pretrained(folder)
    named = r"/tokenizer\.json: the tokenizer failed: index out of bounds"
    assert tokenizer.encode("the quick fox")  # it may insert, but not before the first character
    with pytest.raises(ValueError, match=named):
        tokenizer.encode("quick fox")
    with pytest.raises(ValueError, match=named):
        tokenizer.encode_batch(["quick fox"])
    ids = tokenizer.encode("x", add_special_tokens=False)
    with pytest.raises(ValueError, match=named):
        tokenizer.decode(ids)
    with pytest.raises(ValueError, match=named):
        tokenizer.decode_stream().step(ids[0])


def test_an_added_token_of_which_the_normalizer_leaves_nothing(
    byte_level: Path, tmp_path: Path
) -> None:
    """The library finds it inside of a character: such a tokenizer is fit for ASCII alone."""
    token = {"id": 256, "content": "\n", "normalized": True, "special": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    parts = {"normalizer": strip, "added_tokens": [token]}
    tokenizer = Tokenizer.from_pretrained(changed(byte_level, tmp_path, "tokenizer.json", **parts))
    assert tokenizer.decode(tokenizer.encode("the fox", add_special_tokens=False)) == "the fox"
    with pytest.raises(ValueError, match=r"/tokenizer\.json: the tokenizer failed: "):
        tokenizer.encode("caf\u00e9")


def test_a_text_without_tokens_is_an_error_that_names_the_file(
    byte_level: Path, tmp_path: Path
) -> None:
    model = {"type": "WordLevel", "vocab": {"Hi": 0}, "unk_token": "<unk>"}
    parts = {"model": model, "added_tokens": [], "post_processor": None}
    folder = changed(byte_level, tmp_path, "tokenizer.json", **parts)
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("Hi") == [0]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match=r"/tokenizer\.json: the tokenizer failed: WordLevel"):
            encode("Hello")
