import os
from pathlib import Path

import pytest

from tigon.utils.json import (
    MAX_DEPTH,
    MAX_DIGITS,
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
    "a list": (b"[]", "f.json is not a JSON object but \\[\\]"),
    "a key twice": (b'{"a": {"b": 1, "b": 1}}', "f.json: it names 'b' twice"),
    "NaN": (b'{"a": [1, {"b": NaN}]}', "f.json is not valid JSON: NaN is not"),
    "infinity": (b'{"a": -Infinity}', "f.json is not valid JSON: -Infinity is not"),
    "a large exponent": (b'{"a": 1e999}', "f.json is not valid JSON: 1e999 is not"),
    "many digits": (
        b'{"a": %s}' % (b"1" * 5000),
        "f.json is not valid JSON: a number of 5000 digits",
    ),
    "a deep list": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "f.json is nested deeper than 100"),
    "no end of lists": (b"[" * 100_000, "f.json is nested deeper than 100"),
    "half a pair": (rb'{"a": "\ud83d"}', r"f.json has '\\ud83d', which is half a surrogate"),
    "half a pair as a key": (rb'{"a": {"\uDC00": 1}}', r"f.json has '\\udc00', which is half"),
    "many lists": (b'{"a":[' + b"[]," * 5_000_000 + b"1]}", "f.json has about 10000002 values"),
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
    deepest = b"[" * (MAX_DEPTH) + b"]" * (MAX_DEPTH)
    assert str(parse_json(deepest, "x")).encode() == deepest
    assert parse_json(b"1" * MAX_DIGITS, "x") == int("1" * MAX_DIGITS)
    infinite = parse_object(b'{"a": NaN, "b": 1e999}', "x", nan=True)
    assert infinite["a"] != infinite["a"] and infinite["b"] == float("inf")


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.json")
    with pytest.raises(ValueError, match=r"f\.json is not a regular file"):
        read_json(tmp_path / "f.json")


def test_quote() -> None:
    plain = {"a": [1, 2.5, None, (True,)], "b's": {"c": "é"}}
    assert quote(plain) == repr(plain)
    assert quote("\x1b[31m\u202e\ud800\n") == r"'\x1b[31m\u202e\ud800\n'"
    assert quote("x" * 100) == repr("x" * 100)
    assert quote("x" * 101) == "'" + "x" * 101 + "..."
    assert quote(list(range(10**6)), 10) == "[0, 1, 2, 3,..."
    assert quote([10**5000]) == "a value too large to show (list)"
    nested: list = []
    for _ in range(10**5):
        nested = [nested]
    assert quote(nested) == "a value too large to show (list)"
    assert escape(Path("a\x1b]0;b\x07")) == r"a\x1b]0;b\x07"
    assert escape("y" * 1001) == "y" * 1000 + "..."
