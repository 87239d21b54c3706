"""A tokenizer.json with other parts than it had: each kind that the library knows, and none."""

import base64
import json
from typing import Any

from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from tests.fuzz.junk import INTEGERS, dump, values

PATTERNS = [
    "(a+)+$",
    "(a|a)*$",
    "a{1,9}+b",
    r"(.*)\1",
    "(",
    "",
    r"\p{L}+|\s+",
    "[^\\x00]",
    "a" * 5000,
]
patterns = st.one_of(st.sampled_from(PATTERNS), st.text("ab()[]{}|*+?\\^$.,1p<>=!:#", max_size=12))
integers = st.sampled_from(INTEGERS)
replaces = st.builds(
    lambda p, c: {"type": "Replace", "pattern": {"Regex": p}, "content": c}, patterns, patterns
)
Steps = st.SearchStrategy[dict[str, Any]]


def known(*components: Any) -> Steps:
    return st.sampled_from([json.loads(each.__getstate__()) for each in components])


NORMALIZERS: Steps = st.one_of(
    known(normalizers.NFD(), normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()),
    known(normalizers.BertNormalizer(), normalizers.StripAccents(), normalizers.ByteLevel()),
    replaces,
    st.builds(lambda n: {"type": "Prepend", "prepend": "a" * n}, st.sampled_from([0, 1, 5000])),
    st.builds(
        lambda head, data: {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(head + data).decode(),
        },
        st.sampled_from([b"", b"\x10\0\0\0"]),  # the bytes of its trie
        st.binary(max_size=64),
    ),
)
PRE_TOKENIZERS: Steps = st.one_of(
    known(pre_tokenizers.ByteLevel(), pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)),
    known(pre_tokenizers.CharDelimiterSplit("a"), pre_tokenizers.UnicodeScripts()),
    known(pre_tokenizers.Metaspace(), pre_tokenizers.Metaspace("a", "first")),
    st.builds(lambda n: {"type": "FixedLength", "length": n}, integers),
    st.builds(
        lambda pattern, behavior, invert: {
            **{"type": "Split", "pattern": {"Regex": pattern}},
            **{"behavior": behavior, "invert": invert},
        },
        patterns,
        st.sampled_from(["Isolated", "Removed", "MergedWithNext"]),
        st.booleans(),
    ),
)
DECODERS: Steps = st.one_of(
    known(decoders.ByteFallback(), decoders.Fuse(), decoders.WordPiece("", True)),
    known(decoders.CTC("", ""), decoders.CTC("a", "l", False), decoders.Metaspace("a")),
    known(decoders.BPEDecoder(""), decoders.BPEDecoder("a"), decoders.ByteLevel()),
    replaces,
    st.builds(
        lambda n, m: {"type": "Strip", "content": "a", "start": n, "stop": m}, integers, integers
    ),
)
PIECES = [
    {"Sequence": {"id": "A", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 1}},
    {"SpecialToken": {"id": "<s>", "type_id": 0}},
    {"SpecialToken": {"id": "<y>", "type_id": 0}},
]
models = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["BPE", "WordPiece", "WordLevel"]),
        "unk_token": st.sampled_from(["a", "<unk>"]),
        "continuing_subword_prefix": st.sampled_from([None, "", "a", "\u00e9a"]),
        "merges": st.sampled_from([[], ["a b"], [["a", "\u00e9"]], [["a"]]]),
        "vocab": st.dictionaries(
            st.sampled_from(["a", "b", "ab", "\u00e9", "a\u00e9", ""]), integers
        ),
        "max_input_chars_per_word": integers,
    }
)
unigrams = st.fixed_dictionaries(
    {
        "type": st.just("Unigram"),
        "unk_id": st.sampled_from([None, 0, 1, 2**40]),
        "vocab": st.lists(
            st.tuples(st.sampled_from(["", "a", "\u00e9"]), st.sampled_from([0.0, -1e308, 1e308]))
        ),
        "byte_fallback": st.booleans(),
    }
)


processors = st.builds(
    lambda pieces: {
        **{"type": "TemplateProcessing", "single": pieces, "pair": pieces},
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    },
    st.lists(st.sampled_from(PIECES), max_size=3),
)


def sequences(key: str, steps: Steps) -> Steps:
    chains = st.builds(
        lambda some, times: {"type": "Sequence", key: some * times},
        st.lists(steps, min_size=1, max_size=3),
        st.sampled_from([1, 1, 10, 200]),
    )
    return st.one_of(steps, chains)


PARTS: dict[str, Steps] = {
    "normalizer": sequences("normalizers", NORMALIZERS),
    "pre_tokenizer": sequences("pretokenizers", PRE_TOKENIZERS),
    "decoder": sequences("decoders", DECODERS),
    "post_processor": sequences("processors", processors),
    "model": st.one_of(models, unigrams),
}


@st.composite
def backends(draw: Any, content: bytes) -> bytes:
    """Other parts of the pipeline, known and unknown."""
    changed = json.loads(content)
    for part in draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=2)):
        changed[part] = draw(PARTS[part] if draw(st.integers(0, 3)) else values)
    return dump(changed)
