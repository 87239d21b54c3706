"""Values that no file should have, and what damages a file's bytes."""

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

INTEGERS = (-(2**63), -(10**12), -2, -1, 0, 1, 2, 3, 7, 10**4, 2**31 - 1, 2**31, 10**9, 10**12)
INTEGERS += (2**62, 2**63, 2**64, 10**30)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-320, 1e-30, 1e30, 1e308, float("nan"), float("inf"))
TEXTS = ("", " ", "\x1b[2J\x1b]0;x\x07", "\u202e", "\ud800", "\x00", "../x", "/etc/passwd", "NaN")
TEXTS += ("float32", "x" * 20_000, "😀" * 5000, "__class__", "a\nb\rc")
RAW = ("[" * 5000 + "]" * 5000, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000, "1e999")
RAW += ("-" + "1" * 90, "[" + "[]," * 10**4 + "1]", '{"a":1,"a":2}', "0." + "1" * 5000)
# JSON that json.dumps cannot write: what stands in its place until `dump`
_RAW = {f"#raw {i}#": text for i, text in enumerate(RAW)}

# Not the default alphabet, which takes seconds to encode each character as UTF-8
ALPHABET = st.characters(exclude_categories=["Cs"])


def texts(max_size: int) -> SearchStrategy[str]:
    return st.text(ALPHABET, max_size=max_size)


scalars: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.sampled_from(FLOATS),
    st.sampled_from(TEXTS),
    st.integers(),
    st.floats(),
    texts(20),
)
values: SearchStrategy[Any] = st.one_of(
    scalars,
    scalars,
    st.sampled_from(sorted(_RAW)),
    st.lists(scalars, max_size=4),
    st.dictionaries(texts(8), scalars, max_size=3),
    st.builds(lambda count: [0] * count, st.sampled_from([64, 5000])),
    st.builds(lambda a, b: {"a": [{"b": a}], "c": [[b]]}, scalars, scalars),
)


def dump(content: Any) -> bytes:
    """Write the content as JSON, with the raw parts as they are."""
    text = json.dumps(content)
    if "#raw" in text:
        for name, raw in _RAW.items():
            text = text.replace(f'"{name}"', raw)
    return text.encode()


# Not made for each case, as hypothesis checks each strategy that is new
REPLACEMENT = st.one_of(values.map(dump), st.binary(max_size=64))
ODD = st.sampled_from([*(bytes([c]) for c in b'{}[]",:\xff\x00'), b"NaN", b"\\ud800", b"\xef"])
COUNTS = st.sampled_from([1, 2, 3000])


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """Cut off, drop, repeat, replace or insert bytes."""
    at = draw(st.integers(0, len(data)))
    end = draw(st.integers(at, min(len(data), at + 64)))
    kinds = {
        "cut": lambda: data[:at],
        "drop": lambda: data[:at] + data[end:],
        "repeat": lambda: data[:at] + data[at:end] * draw(st.integers(2, 200)) + data[end:],
        "replace": lambda: draw(REPLACEMENT),
        "insert": lambda: data[:at] + draw(ODD) * draw(COUNTS) + data[at:],
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


@st.composite
def altered(draw: Any, content: dict[str, Any], keys: list[str], most: int = 3) -> dict[str, Any]:
    """Set keys of the object to other values, remove or add them; `a.b` is inside `a`, `a.0` the
    first item of a list."""
    changed = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, most))):
        key = draw(st.sampled_from(keys)) if draw(st.integers(0, 9)) else draw(texts(9))
        *outer, last = key.split(".")
        inside = changed
        for name in outer:
            inside = inside.setdefault(name, {}) if isinstance(inside, dict) else {}
        if isinstance(inside, list) and last.isdecimal() and int(last) < len(inside):
            inside[int(last)] = draw(values)
        elif isinstance(inside, dict) and draw(st.integers(0, 7)) == 0:
            inside.pop(last, None)
        elif isinstance(inside, dict):
            inside[last] = draw(values)
    return changed
