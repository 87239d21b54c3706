"""YAML of others: plain values, or one ValueError of one line."""

import time

import pytest
import yaml

from tigon.utils.yaml import parse_yaml

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
REFUSED: dict[str, str] = {
    "lr: !!bool x": r"f?.yaml is not valid YAML: 'x'",
    "lr: !!timestamp x": "is not valid YAML: ",
    "lr: " + "1:" * 100_000 + "1": r"a number of 200001 characters",
    "lr: " + "9" * 5000: r"a number of 5000 characters",
    "lr: !!binary é": "is not valid YAML: ",
    "lr: !!python/object/apply:os.system [ls]": r"could not determine a constructor",
    "lr: !!map [x]": "expected a mapping node, but found sequence",
    "lr: =": r"line 1: ",
    "? [a]\n: 1": r"line 1: found unhashable key",
    "lr: 1\nlr: 2": r"line 2: lr is also set in line 1",
    "a:\n\tb: 1": r"line 2: found character '\\t' that cannot start any token",
    "lr: \x1b": r"special characters are not allowed",
    "lr: *a": r"found undefined alias",
    "lr: &a [*a]": "too deep inside each other",
    "[" * 5000 + "]" * 5000: "nested too deeply",
    ALIASES + "lr: *h": "its values are too many",
    "a: &a {x: 1}\nb: {<<: [*a, *a]}": "line 2: << is not read",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:30])
def test_refusals_are_one_line_with_the_file(text: str) -> None:
    begun = time.process_time()
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=REFUSED[text]) as error:
            parse_yaml(content, "\x1bfile.yaml")
        said = str(error.value)
        assert said.startswith(r"\x1bfile.yaml") and said.isprintable() and len(said) < 500
    assert time.process_time() - begun < 20  # 2 s on a quiet core


def test_other_encodings_are_refused() -> None:
    for data in (b"lr: \xff", "lr: \ud800".encode(errors="surrogatepass"), b"\xff\xfe\xff"):
        with pytest.raises(
            ValueError, match=r"^f\.yaml is not valid YAML: .*(decode|codec|unacceptable)"
        ):
            parse_yaml(data, "f.yaml")


def test_values_are_those_of_yaml() -> None:
    text = "a: &a {x: 1, lr: 2e-5, b: .inf, t: 2020-13-45, 'n': null}\nc: *a\nd: 1:30\n"
    expected = yaml.safe_load(text.replace("2020-13-45", "'2020-13-45'"))  # dates are text
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert parse_yaml(text.encode(encoding), "f") == expected
    assert parse_yaml("\ufeff" + text, "f") == expected
    assert parse_yaml("", "f") is None
