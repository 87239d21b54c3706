import os
import tracemalloc
from pathlib import Path

import pytest

from tigon.utils.json import (
    MOST_DEPTH,
    MOST_DIGITS,
    escape,
    parse_json,
    parse_object,
    quote,
    read_json,
)

REFUSED: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "f.json is not valid JSON: .*line 1 column 2"),
    "no UTF-8": (b'{"a": "\xff"}', "f.json is not valid JSON: 'utf-8' codec"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "f.json is not valid JSON: .*BOM"),
    "a list": (b"[]", "f.json is not a JSON object but a list"),
    "null": (b"null", "f.json is not a JSON object but null"),
    "NaN alone": (b"NaN", "f.json is NaN"),
    "a key twice": (b'{"a": {"b": 1, "b": 1}}', "f.json: it names 'b' twice"),
    "NaN": (b'{"a": [1, {"b": NaN}]}', r"f.json: a\[1\].b is NaN, which JSON does not have"),
    "infinity": (b'{"a": -Infinity}', "f.json: a is -Infinity"),
    "a large exponent": (b'{"a": 1e999}', "f.json: a is 1e999, which no number can hold"),
    "many digits": (b'{"a": %s}' % (b"1" * 5000), "f.json: a is a number of 5000 digits"),
    "a deep list": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "f.json is nested deeper than 100"),
    "no end of lists": (b"[" * 100_000, "f.json is nested deeper than 100"),
    "no end of objects": (b'{"a":' * 100_000, "f.json is nested deeper than 100"),
    "half a pair": (rb'{"a": "\ud83d"}', r"f.json: a is '\\ud83d', which has half a surrogate"),
    "half a pair as a key": (rb'{"a": {"\uDC00": 1}}', r"f.json: a is '\\udc00', which has half"),
    "many lists": (b'{"a":[' + b"[]," * 5_000_000 + b"1]}", "f.json has 15000009 bytes .* values"),
    "more bytes": (b'{"a":"%s"}' % (b"1" * 2**24), "f.json has 16777224 bytes, and such a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    data, message = REFUSED[case]
    path = tmp_path / "f.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(r'{"a": [1, 2.5, null, true, "\ud83d\ude00é"], "b": {"c": {}}, "": -0.0}')
    assert read_json(path) == {"a": [1, 2.5, None, True, "😀é"], "b": {"c": {}}, "": 0.0}
    deepest = b"[" * (MOST_DEPTH) + b"]" * (MOST_DEPTH)
    assert str(parse_json(deepest, "x")).encode() == deepest
    assert parse_json(b"1" * MOST_DIGITS, "x") == int("1" * MOST_DIGITS)
    infinite = parse_object(b'{"a": NaN, "b": 1e999}', "x", nan=True)
    assert infinite["a"] != infinite["a"] and infinite["b"] == float("inf")


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.json")
    with pytest.raises(ValueError, match=r"f\.json is not a regular file"):
        read_json(tmp_path / "f.json")
    with pytest.raises(ValueError, match=r"zero is not a regular file"):
        read_json("/dev/zero")


@pytest.mark.parametrize("item", [b"[],", b"{},", b'{"a":{}},', b'{"a":1},', b"9999.5,", b'"ab",'])
def test_the_estimate_of_memory_holds(item: bytes) -> None:
    """A fiftieth of the most that is read takes a fiftieth of the memory at most."""
    count = 768 * 2**20 // 50 // (250 * sum(map(item.count, (b",", b"[", b"{"))) + 2 * len(item))
    data = b"[" + item * (count - 1) + item[:-1] + b"]"
    tracemalloc.start()
    try:
        parse_json(data, "x")
        assert tracemalloc.get_traced_memory()[1] < 768 * 2**20 / 50
    finally:
        tracemalloc.stop()


def test_distinct_keys_are_within_the_estimate() -> None:
    count = 768 * 2**20 // 50 // (250 + 2 * 10)
    data = b"{" + b",".join(b'"%x":%d' % (i, i) for i in range(count)) + b"}"
    tracemalloc.start()
    try:
        parse_json(data, "x")
        assert tracemalloc.get_traced_memory()[1] < 768 * 2**20 / 50
    finally:
        tracemalloc.stop()


def test_shown() -> None:
    plain = {"a": [1, 2.5, None, (True,)], "b's": {"c": "é"}}
    assert quote(plain) == repr(plain)
    assert quote("\x1b[31m\u202e\ud800\n") == r"'\x1b[31m\u202e\ud800\n'"
    assert quote("x" * 100) == repr("x" * 100)
    assert quote("x" * 101) == "'" + "x" * 99 + "..."
    assert quote(list(range(10**6)), 10) == "[0, 1, 2, ..."
    assert quote([10**5000]) == "[a number of 16610 bits]"
    nested: list = []
    for _ in range(10**5):
        nested = [nested]
    assert quote(nested) == "[" * 100 + "..."
    assert escape(Path("a\x1b]0;b\x07")) == r"a\x1b]0;b\x07"
    assert escape("y" * 1001) == "y" * 1000 + "..."
