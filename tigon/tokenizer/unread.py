"""What of a tokenizer.json is checked before the library reads it, as it would end the process."""

import base64
import json
import re
from contextlib import suppress
from pathlib import Path

from tigon.utils.json import escape, parse_object, quote

_CHARSMAP = re.compile(r'"precompiled_charsmap"\s*:\s*("[^"]*")')
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
_LETTER = re.compile(r"\\u00[4-7]")
_UNIGRAM = re.compile(r'"vocab"\s*:\s*\[')
_SCORED = re.compile(r'\[\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*,\s*[-\d]')

MOST_VALUES = 3 * 2**20  # the library takes 500 bytes for a token or a merge
MOST_NODES = 4 * 10**6  # of a Unigram model's tree, which take 330 bytes each
# At each place of a text every token that begins there is looked up, and long ones may all begin
# one another
LONG, MOST_LONG = 128, 2**16  # characters of a token, and of all of those together


def plain(text: str, path: Path) -> str:
    """The JSON, with keys as they are: the file is too large to parse it only to look for a few."""
    if _LETTER.search(text) is None:  # no library writes a letter as that
        return text
    return json.dumps(parse_object(text.encode(), path), ensure_ascii=False)


def check_unread(text: str, path: Path) -> None:
    """ValueError that names the file for what takes the library too much memory, or ends it."""
    if (values := text.count(",")) > MOST_VALUES:
        raise ValueError(f"{escape(path)} has about {values} values, and may have {MOST_VALUES}")
    if _UNIGRAM.search(text):
        _check_tree(text, path)
    for found in _CHARSMAP.finditer(text):
        blob = b""
        with suppress(ValueError):  # then the library cannot read it either
            blob = base64.b64decode(json.loads(found[1]))
        trie = int.from_bytes(blob[:4], "little")
        if trie > len(blob):  # it allocates twice as much at once
            raise ValueError(
                f"{escape(path)} is not a tokenizer: its precompiled_charsmap has "
                f"{len(blob)} bytes, of which the first four say that {trie} follow"
            )
    if _PREFIX.search(text):
        _check_merges(text, path)


def _check_tree(text: str, path: Path) -> None:
    """The library keeps each beginning of a token of a Unigram model."""
    tokens = [_unescaped(match[1]) for match in _SCORED.finditer(text)]
    if (long := sum(len(token) for token in tokens if len(token) > LONG)) > MOST_LONG:
        raise ValueError(
            f"{escape(path)} is not a tokenizer: its model.vocab has tokens of more than {LONG} "
            f"characters, {long} in all"
        )
    left = [token.encode(errors="replace") for token in tokens]
    if sum(map(len, left)) <= MOST_NODES:
        return
    nodes = length = 0
    while left:
        length += 1
        nodes += len({token[:length] for token in left})
        if nodes > MOST_NODES:
            raise ValueError(
                f"{escape(path)} is not a tokenizer: the tokens of its model.vocab have more than "
                f"{MOST_NODES} beginnings, which would all be kept in memory"
            )
        left = [token for token in left if len(token) > length]


def _unescaped(token: str) -> str:
    with suppress(ValueError):  # then the library cannot read it either
        return json.loads(f'"{token}"') if "\\" in token else token
    return token


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
                f"{escape(path)} is not a tokenizer: its model.merges has {quote(merge)}, which "
                f"does not go on with its continuing_subword_prefix {quote(prefix)}"
            )
