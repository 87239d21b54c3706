"""How many times longer the steps of a tokenizer can make a text."""

import base64
from typing import Any

MOST_GROWTH = 64
LONGEST_AFFIX = 64  # characters around each text or word

# Bytes for one of the text, at most. Once, none of them matters; but what another step in between
# writes as before grows again
_AGAIN = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "BertNormalizer": 5}


def check_growth(name: str, steps: list[dict[str, Any]]) -> None:
    """ValueError for a normalizer, pre-tokenizer or decoder that makes texts far too long."""
    growth, kinds = 1.0, [step["type"] for step in steps]
    for i, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        growth *= _growth(kind, step) * (_AGAIN.get(kind, 1) if kind in kinds[:i] else 1)
        if kind == "Prepend" and len(step["prepend"]) > LONGEST_AFFIX:
            raise ValueError(f"its {name} prepends {len(step['prepend'])} characters")
    if growth > MOST_GROWTH:
        raise ValueError(f"its {name} could make a text {growth:.0f} times longer")


def _growth(kind: str, step: dict[str, Any]) -> float:
    if kind == "Replace":
        content, pattern = len(step["content"].encode()), step["pattern"]
        if pattern.get("String"):
            return max(1.0, content / len(pattern["String"].encode()))
        return 1.0 + content  # it may match nothing, before each character
    if kind == "Precompiled":
        blob = base64.b64decode(step["precompiled_charsmap"])
        texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
        return max(1.0, max(map(len, texts)) / 3)
    if kind == "ByteLevel":  # two bytes for each that is not ASCII, and a space before each piece
        return 3.0 if step.get("add_prefix_space") else 2.0
    if kind == "Metaspace":
        return 1.0 + len(step["replacement"].encode())
    if kind in ("CTC", "BPEDecoder"):  # a space for each of these texts, which is everywhere
        return 1.0 if step["word_delimiter_token" if kind == "CTC" else "suffix"] else 3.0
    return 1.0
