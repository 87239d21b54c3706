"""Describes tokenizers in GGUF files: tokens, merges or scores, special tokens, chat template.

llama.cpp has its own code for each way of splitting text into words, and a name for it: here the
patterns of tokenizer.json are looked up, so that a tokenizer with new tokens or of another
vocabulary finds the code of its kind.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from tigon.models.config import ModelConfig, eos_ids
from tigon.utils.json import quote
from tigon.weights.gguf import import_gguf

# The numbers of gguf's TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # in place of a space in SentencePiece's tokens
SPECIAL = "bos", "eos", "unk", "sep", "pad", "mask"  # tokens that the format has a place for
ENDS = "eos", "eot", "eom"
RARE = -1e4  # the score of tokens that no merge makes

# Parts of the patterns by which words are split
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _cased(suffix: str, digits: str) -> str:
    """The pattern of words that also end where a capital follows."""
    words = f"{_START}{_UPPER}*{_LOWER}+{suffix}|{_START}{_UPPER}+{_LOWER}*{suffix}|"
    return words + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _plain(digits: str) -> str:
    """The pattern of words in any case."""
    return rf"{_SUFFIX}|{_START}\p{{L}}+|{digits}|{_OTHERS}{_SPACES}"


GPT2 = "ByteLevel"  # GPT-2's pattern, which the library has built in
DIGITS = "Digits"
# Steps that split text, and whether whole words are looked up before merges -> llama.cpp's name
WORDS: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((_plain(r"\p{N}"),), False): "qwen2",
    ((_plain(r"\p{N}{1,3}"),), True): "llama-bpe",
    ((_plain(r"\p{N}{1,3}"),), False): "dbrx",
    ((_cased("", r"\p{N}"),), True): "tekken",
    ((_cased(f"{_SUFFIX}?", r"\p{N}{1,3}"),), False): "gpt-4o",
}


class SavePretrained(Protocol):
    """A tokenizer or other object with `save_pretrained`."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> object: ...


def add_vocabulary(
    writer: Any,
    tokenizer: SavePretrained | None,
    config: ModelConfig,
    generation_config: Mapping[str, Any],
) -> None:
    """Adds a tokenizer to a GGUFWriter, with the ids of special tokens that the model has.

    Without a tokenizer the file says so, and has the ids alone. Raises ValueError for a tokenizer
    that llama.cpp has no code for, or with more tokens than the model.
    """
    gguf = import_gguf()
    ids = {key: getattr(config, f"{key}_token_id") for key in ("bos", "pad")}
    ends = eos_ids(config, generation_config)
    with tempfile.TemporaryDirectory() as directory:
        if tokenizer is None:
            writer.add_tokenizer_model("none")
            special = gguf.SpecialVocab(directory)
        else:
            tokenizer.save_pretrained(directory)
            special = _add_tokenizer(writer, Path(directory), config.vocab_size)
    found = special.special_token_ids
    ends = sorted(ends, key=lambda end: end != found.get("eos"))  # the tokenizer's own comes first
    if len(ends) > len(ENDS):
        warnings.warn(
            f"a GGUF file names {len(ENDS)} tokens that end a text, and this one leaves out "
            + ", ".join(map(str, ends[len(ENDS) :])),
            UserWarning,
            stacklevel=5,
        )
    ids |= found | dict(zip(ENDS, ends, strict=False))
    special.special_token_ids = {
        name: token for name, token in ids.items() if token is not None and token >= 0
    }
    special.add_to_gguf(writer, quiet=True)


def _add_tokenizer(writer: Any, directory: Path, size: int) -> Any:
    """Adds the tokens in a directory; returns a SpecialVocab of the rest of the tokenizer."""
    gguf = import_gguf()
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError("the tokenizer has no tokenizer.json: GGUF files are made of that alone")
    content = json.loads(path.read_text(encoding="utf-8"))
    model, added = content["model"], content.get("added_tokens") or []
    if model.get("type") != "BPE":
        raise ValueError(f"a tokenizer of type {quote(model.get('type'))} is not exported to GGUF")
    byte_fallback = bool(model.get("byte_fallback"))
    tokens, kinds = _list_tokens(model, added, size, byte_fallback)
    special = gguf.SpecialVocab(directory, not byte_fallback, SPECIAL, n_vocab=size)
    if byte_fallback:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(_adds_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_find_words(content))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    encoded = tokenizers.Tokenizer.from_file(str(path)).encode("a").ids
    ids = special.special_token_ids
    special.add_special_token = {
        "bos": encoded[0] == ids.get("bos"),
        "eos": encoded[-1] == ids.get("eos"),
    }
    return special


def _list_tokens(
    model: Mapping[str, Any], added: list[dict[str, Any]], size: int, byte_fallback: bool
) -> tuple[list[str], list[int]]:
    """Lists the text and the TokenType of each id; ids without a token are padding."""
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    largest = max([*model["vocab"].values(), *(token["id"] for token in added)], default=0)
    if largest >= size:
        raise ValueError(
            f"the tokenizer has a token with id {largest}, and the model {size} tokens: call "
            f"model.resize_token_embeddings({largest + 1}) first, or give the model's own tokenizer"
        )
    for text, i in model["vocab"].items():
        is_byte = byte_fallback and len(text) == 6 and text.startswith("<0x") and text[-1] == ">"
        tokens[i], kinds[i] = text, BYTE if is_byte else NORMAL
    for token in added:
        text = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        tokens[token["id"]] = text if token["special"] else text.replace(SPACE, " ")
    unknown = model["vocab"].get(model.get("unk_token"))
    if byte_fallback and unknown is not None:
        kinds[unknown] = UNKNOWN
    return tokens, kinds


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Scores by which llama.cpp merges pairs in the order of the merges, as SentencePiece."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks[token]) if token in ranks else RARE for token in tokens]


def _steps(content: Mapping[str, Any], key: str, inside: str) -> list[dict[str, Any]]:
    """Lists the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    step = content.get(key)
    if step is None:
        return []
    return list(step[inside]) if step["type"] == "Sequence" else [step]


def _adds_space(content: Mapping[str, Any]) -> bool:
    """Whether a text gets a space in front before it is split, as in Llama 2 but not in Gemma."""
    if any(s["type"] == "Prepend" for s in _steps(content, "normalizer", "normalizers")):
        return True
    steps = _steps(content, "pre_tokenizer", "pretokenizers")
    return any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps)


def _find_words(content: Mapping[str, Any]) -> str:
    """Finds llama.cpp's name of the way in which a byte-level tokenizer splits words."""
    steps = []
    for step in _steps(content, "pre_tokenizer", "pretokenizers"):
        if step["type"] == "ByteLevel":
            steps += [GPT2] if step["use_regex"] else []
        elif step["type"] == "Digits" and step["individual_digits"]:
            steps.append(DIGITS)
        elif step["type"] == "Split" and not step["invert"] and step["behavior"] == "Isolated":
            steps.append(step["pattern"].get("Regex", ""))
        else:
            steps.append(step["type"])
    key = tuple(steps), bool(content["model"].get("ignore_merges"))
    if key not in WORDS:
        raise ValueError(
            f"the tokenizer splits words by {quote(steps, 500)}, which is not exported to GGUF: "
            "leave the tokenizer out, or convert an export in Hugging Face format with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    return WORDS[key]
