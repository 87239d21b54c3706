"""What of a tokenizer.json is checked before the library reads it, as it would end the process."""

import base64
import json
import re
from contextlib import suppress
from pathlib import Path

from tigon.json_file import escaped, parse_object, shown

_CHARSMAP = re.compile(r'"precompiled_charsmap"\s*:\s*("[^"]*")')
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
_LETTER = re.compile(r"\\u00[4-7]")


def plain(text: str, path: Path) -> str:
    """The JSON, with keys as they are: the file is too large to parse it only to look for a few."""
    if _LETTER.search(text) is None:  # no library writes a letter as that
        return text
    return json.dumps(parse_object(text.encode(), path), ensure_ascii=False)


def check_unread(text: str, path: Path) -> None:
    """ValueError that names the file for what makes the library abort."""
    for found in _CHARSMAP.finditer(text):
        blob = b""
        with suppress(ValueError):  # then the library cannot read it either
            blob = base64.b64decode(json.loads(found[1]))
        trie = int.from_bytes(blob[:4], "little")
        if trie > len(blob):  # it allocates twice as much at once
            raise ValueError(
                f"{escaped(path)} is not a tokenizer: its precompiled_charsmap has "
                f"{len(blob)} bytes, of which the first four say that {trie} follow"
            )
    if _PREFIX.search(text):
        _check_merges(text, path)


def _check_merges(text: str, path: Path) -> None:
    """The library cuts the prefix off each second part, in the middle of a character too."""
    model = parse_object(text.encode(), path).get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(prefix, str):
        return
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        last = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(last, str) or not last.startswith(prefix):
            raise ValueError(
                f"{escaped(path)} is not a tokenizer: its model.merges has {shown(merge)}, which "
                f"does not go on with its continuing_subword_prefix {shown(prefix)}"
            )
