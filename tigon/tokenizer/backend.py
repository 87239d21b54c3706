"""The tokenizers library on files that others have written."""

import json
import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from tigon.tokenizer.failures import check_runs, is_panic
from tigon.tokenizer.growth import LONGEST_AFFIX, MOST_GROWTH_TOGETHER, check_growth
from tigon.tokenizer.unread import check_unread, plain
from tigon.utils.json import escape, quote, read_bytes

MOST_BYTES = 2**26  # of a tokenizer.json; the largest that are known have 35 MB
LONGEST_PATTERN = 4000  # characters
MOST_STEPS = 32  # of a pipeline
MOST_ADDED = 256  # tokens around each text
# Characters of a word that WordPiece cuts, which takes the third power of it; published ones have
# 100, and those with more are one unknown token
LONGEST_WORD = 1000

# What Python writes otherwise than Oniguruma, for reading a pattern's structure
_AS_PYTHON = (
    (r"\\[pP]\{\^?\w+\}", r"\\w"),
    (r"\[:\^?\w+:\]", r"\\w"),
    (r"\\x\{[0-9a-fA-F]+\}", "x"),
    (r"\\[hH]", r"\\d"),
    (r"\\[RX]", r"\\s"),
    (r"\\z", r"\\Z"),
    (r"\(\?<(?![=!])", "(?P<"),
)
# Of published tokenizers, and safe, though the rules of `check_pattern` do not show it
_KNOWN = {r"(?:\r?\n)+(?!\r?\n)", r" ?[^(\s|[.,!?…。，、।۔،])]+"}
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_NOT_ONCE = 16  # repetitions from which a repeat counts as without an end
_ENDLESS = 1000  # repetitions of one without an end, of a run of letters in a text
MOST_WAYS = 10**8  # of matching a run of letters: those of two repeats, and of some options


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a file; ValueError if it is none, or could run for ever on a text."""
    try:
        text = plain(read_bytes(path, MOST_BYTES).decode(), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{escape(path)} is not UTF-8 text: {error.reason}") from None
    # The assistant mask needs offsets that cover every character; ids do not depend on this
    text = re.sub(r'("trim_offsets"\s*:\s*)true', r"\1false", text)
    check_unread(text, path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        check_backend(backend)
        check_runs(backend)
    except BaseException as error:  # the library raises nothing narrower
        if not isinstance(error, Exception) and not is_panic(type(error)):
            raise
        raise ValueError(f"{escape(path)} is not a tokenizer: {escape(error)}") from error
    return backend


def check_backend(backend: tokenizers.Tokenizer) -> None:
    """ValueError for a pipeline whose time or memory grows too fast with the text."""
    growth = {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(_state(getattr(backend, name))))
        _check_count(name, len(steps))
        for step in steps:
            _check_patterns(step)
            if step["type"] == "FixedLength" and not step["length"]:
                raise ValueError(f"its {name} {step['type']} has length 0, and needs 1 at least")
        growth[name] = check_growth(name, steps)
    both = growth["normalizer"] * growth["pre_tokenizer"]
    if both > MOST_GROWTH_TOGETHER:
        raise ValueError(
            f"its normalizer and pre_tokenizer could make a text {both:.0f} times longer"
        )
    steps = list(_steps(_state(backend.post_processor)))
    _check_count("post_processor", len(steps))
    added = sum(map(_added, steps))
    if added > MOST_ADDED:
        raise ValueError(f"its post_processor adds {added} tokens to each text")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(backend.model, name, None) or ""
        if len(affix) > LONGEST_AFFIX:
            raise ValueError(f"its model.{name} has {len(affix)} characters")
    longest = getattr(backend.model, "max_input_chars_per_word", 0)
    if longest > LONGEST_WORD:
        raise ValueError(
            f"its model.max_input_chars_per_word is {longest}, and may be {LONGEST_WORD} at most"
        )


def check_pattern(pattern: str) -> None:
    """ValueError for a regular expression that could search for ever.

    Refused are repeats of what itself repeats or has alternatives, references to groups, and more
    than two long repeats, or many options, one behind another.
    """
    if pattern in _KNOWN:
        return
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters")
    python = pattern
    for theirs, ours in _AS_PYTHON:
        python = re.sub(theirs, ours, python)
    if "}+" in python:  # Oniguruma repeats the repeat, which in Python is a possessive one
        raise ValueError(f"the pattern {quote(pattern)} repeats what repeats")
    try:
        with warnings.catch_warnings(action="ignore"):
            parsed = sre_parser.parse(python)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot read the pattern {quote(pattern)}: {error}") from None
    fault = _fault(parsed, 1)
    if not fault and _ways(parsed) > MOST_WAYS:
        fault = "has too many repeats or options one behind another"
    if fault:
        raise ValueError(f"the pattern {quote(pattern)} {fault}, which could search for ever")


def _fault(parsed: Any, times: int) -> str:
    """What is wrong in a part that is repeated so many times."""
    for kind, value in parsed:
        if kind in _REPEATS:
            least, most, inner = value
            if times > 1 and least != most:
                return "repeats what repeats"
            again = times * (int(most) if int(most) <= _NOT_ONCE or least == most else 10**6)
            if least == most and again > 10**6 * 10**3:
                return "repeats too often"
            if fault := _fault(inner, times if int(most) == 1 else max(again, times)):
                return fault
        elif kind is sre.BRANCH:
            if times > _NOT_ONCE:
                return "repeats alternatives"
            for branch in value[1]:
                if fault := _fault(branch, times):
                    return fault
        elif kind in (sre.GROUPREF, sre.GROUPREF_EXISTS):
            return "refers to a group"
        elif kind is sre.SUBPATTERN:
            if fault := _fault(value[3], times):
                return fault
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            if fault := _fault(value[1], times):
                return fault
        elif kind is sre.ATOMIC_GROUP and (fault := _fault(value, times)):
            return fault
    return ""


def _ways(parsed: Any) -> int:
    """In how many ways a part without a `_fault` could match the letters at one place at most."""
    ways = 1
    for kind, value in parsed:
        if kind in _REPEATS:
            least, most, inner = int(value[0]), int(value[1]), _ways(value[2])
            counts = max(min(most, _ENDLESS), least) - least + 1
            ways *= counts * inner ** min(most, _NOT_ONCE)
        elif kind is sre.BRANCH:
            ways *= sum(map(_ways, value[1]))
        elif kind is sre.SUBPATTERN:
            ways *= _ways(value[3])
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            ways *= _ways(value[1])
        elif kind is sre.ATOMIC_GROUP:
            ways *= _ways(value)
        ways = min(ways, MOST_WAYS + 1)
    return ways


def _state(component: Any) -> Any:
    return None if component is None else json.loads(component.__getstate__())


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    """The parts of a pipeline, in order."""
    if not isinstance(state, dict):
        return
    inner = next(
        (v for k, v in state.items() if isinstance(v, list) and state["type"] == "Sequence"), None
    )
    if inner is None:
        yield state
    else:
        for each in inner:
            yield from _steps(each)


def _check_count(name: str, count: int) -> None:
    if count > MOST_STEPS:
        raise ValueError(f"its {name} has {count} steps")


def _check_patterns(step: dict[str, Any]) -> None:
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern:
        check_pattern(pattern["Regex"])


def _added(step: dict[str, Any]) -> int:
    """Tokens that a step of the post-processor adds to a text."""
    if step["type"] != "TemplateProcessing":
        return 2
    special = step["special_tokens"]
    pieces = step["single"]
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    if len(texts) > 1:
        raise ValueError(f"its post_processor writes each text {len(texts)} times")
    if "B" in texts:
        raise ValueError("its post_processor.single has a second text, B, and there is only A")
    names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    if missing := [name for name in names if name not in special]:
        raise ValueError(
            f"its post_processor.single adds {quote(missing[0])}, which special_tokens lacks"
        )
    return sum(len(special[name]["ids"]) for name in names)
