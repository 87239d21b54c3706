"""How many times longer the steps of a tokenizer can make a text."""

import base64
import unicodedata
from typing import Any

MOST_GROWTH = 64
MOST_GROWTH_TOGETHER = 256  # of what is before the model; 88 of T5's kind
LONGEST_AFFIX = 64  # characters around each text or word

# Bytes for one of the text, at most. Once, none of them matters, and of what steps write it is
# counted there (`_size`); but what another step in between writes as before grows again
_AGAIN = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 1.5, "BertNormalizer": 5}


def check_growth(name: str, steps: list[dict[str, Any]]) -> float:
    """How much longer, at most; ValueError for steps that make texts far too long."""
    growth, kinds = 1.0, [step["type"] for step in steps]
    for i, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        growth *= _growth(kind, step) * (_AGAIN.get(kind, 1) if kind in kinds[:i] else 1)
        if kind == "Prepend" and len(step["prepend"]) > LONGEST_AFFIX:
            raise ValueError(f"its {name} prepends {len(step['prepend'])} characters")
    if growth > MOST_GROWTH:
        raise ValueError(f"its {name} could make a text {growth:.0f} times longer")
    return growth


def _size(content: str) -> int:
    """Bytes of what a step writes, as it is or as a later NFKD or NFKC leaves it."""
    return max(len(text.encode()) for text in (content, unicodedata.normalize("NFKD", content)))


def _growth(kind: str, step: dict[str, Any]) -> float:
    if kind == "Replace":
        content, pattern = _size(step["content"]), step["pattern"]
        if pattern.get("String"):
            return max(1.0, content / len(pattern["String"].encode()))
        return 1.0 + content  # it may match nothing, before each character
    if kind == "Precompiled":
        blob = base64.b64decode(step["precompiled_charsmap"])
        texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
        return max(1.0, max(_size(text.decode(errors="replace")) for text in texts) / 3)
    if kind == "ByteLevel":  # two bytes for each that is not ASCII, and a space before each piece
        return 3.0 if step.get("add_prefix_space") else 2.0
    if kind == "Metaspace":
        return 1.0 + _size(step["replacement"])
    if kind in ("CTC", "BPEDecoder"):  # a space for each of these texts, which is everywhere
        return 1.0 if step["word_delimiter_token" if kind == "CTC" else "suffix"] else 3.0
    return 1.0
