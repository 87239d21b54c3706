"""Tokens that are added to a tokenizer: the same ids as transformers', before and after saving."""

import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.tokenizer.test_tokenizer import CORPUS, REAL, edited
from tigon.tokenizer import Tokenizer

NEW = ["<tool>", "</tool>", "<|думай|>", "</s>", "two words"]
TEXTS = [*CORPUS, "a<tool>b</tool> <|думай|> two words</s>", " <tool> \n</tool>x", "<tool><tool>"]


@pytest.mark.skipif(not REAL, reason="TIGON_TOKENIZERS names no folder of tokenizers")
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("file", REAL or [None], ids=str)
def test_real_tokenizers(file, special, tmp_path):
    new = [token for token in NEW if token != "</s>"]
    check(file.parent, new, len(new), special, tmp_path)


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(directory, special, tmp_path):
    check(directory, NEW, 4, special, tmp_path)  # </s> is there


def check(directory: Path, new: list[str], count: int, special: bool, tmp_path: Path) -> None:
    ours, theirs = Tokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    before = len(ours)
    assert ours.add_tokens(new, special_tokens=special) == count
    theirs.add_tokens(new, special_tokens=special)
    assert len(ours) == len(theirs) == before + count
    ours.save_pretrained(tmp_path)
    again, exported = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    copied = pickle.loads(pickle.dumps(ours))
    for text in TEXTS:
        expected = theirs.encode(text)
        for tokenizer in (ours, again, exported, copied):
            assert tokenizer.encode(text) == expected
            plain = theirs.decode(expected, skip_special_tokens=True)
            assert tokenizer.decode(expected, skip_special_tokens=True) == plain
    assert again.digest() == ours.digest() != Tokenizer.from_pretrained(directory).digest()
    assert len(exported) == len(theirs)


def test_other_files_list_them_too(byte_level, tmp_path):
    """transformers 4 writes added_tokens_decoder, and older versions added_tokens.json."""
    tokens = {"400": {"content": "<old>", "special": True}}
    source = edited(byte_level, tmp_path / "old", added_tokens_decoder=tokens)
    (source / "added_tokens.json").write_text(json.dumps({"<old>": 400}))
    ours = Tokenizer.from_pretrained(source)
    assert ours.add_tokens("<new>", special_tokens=True) == 1
    ours.save_pretrained(tmp_path / "new")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert ours.encode("<old><new>") == theirs.encode("<old><new>")
    config, added = (
        json.loads((tmp_path / "new" / name).read_text())
        for name in ("tokenizer_config.json", "added_tokens.json")
    )
    assert added["<new>"] == len(ours) - 1
    assert config["added_tokens_decoder"][str(len(ours) - 1)]["content"] == "<new>"


@pytest.mark.parametrize(
    ("token", "message"),
    [("", "empty"), ("\ud800", "lone surrogate"), (3, "is a text or an AddedToken, not 3")],
)
def test_no_token(token, message, tokenizer):
    before = len(tokenizer)
    with pytest.raises(TypeError if token == 3 else ValueError, match=message):
        tokenizer.add_tokens(["<fine>", token])
    assert len(tokenizer) == before
