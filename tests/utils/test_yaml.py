"""YAML of others: plain values, or one ValueError of one line."""

import time
from typing import Any

import pytest
import yaml

from tigon.train.config_file import load
from tigon.utils.yaml import parse_yaml

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
REFUSED: dict[str, str] = {
    "lr: !!bool x": r"line 1: 'x' is no bool",
    'a: 1\nlr: !!int ""': r"line 2: '' is no int",
    'lr: !!float ""': r"line 1: '' is no float",
    "lr: !!timestamp x": r"line 1: 'x' is no timestamp",
    "lr: " + "1:" * 90 + "1.0": r"line 1: a number of 183 characters",
    "lr: " + "1:" * 100_000 + "1": r"a number of 200001 characters",
    "lr: " + "9" * 5000: r"a number of 5000 characters",
    "lr: 0x" + "f" * 5000: r"a number of 5002 characters",
    "lr: !!binary é": r"line 1: (failed to convert|'é' is no binary)",
    "lr: !!python/object/apply:os.system [ls]": r"could not determine a constructor",
    "lr: !!map [x]": "expected a mapping node, but found sequence",
    "lr: !!int [x]": "expected a scalar node, but found sequence",
    "lr: !!omap x": "expected a sequence",
    "lr: =": r"line 1: ",
    "? [a]\n: 1": r"line 1: found unhashable key",
    "? {a: 1}\n: 1": r"line 1: found unhashable key",
    "lr: 1\nlr: 2": r"line 2: lr is also set in line 1",
    "lr: [": r"is not valid YAML: line",
    "a:\n\tb: 1": r"line 2: found character '\\t' that cannot start any token",
    "lr: \x1b": r"special characters are not allowed",
    "lr: *a": r"found undefined alias",
    "lr: &a [*a]": "too deep inside each other",
    "[" * 5000 + "]" * 5000: "nested too deeply",
    ALIASES + "lr: *h": "its values are too many",
    "a: &a {x: 1}\nb: {<<: [*a, *a]}": "line 2: << is not read",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text)[:30])
def test_what_is_refused_is_one_line_that_names_the_file(text: str) -> None:
    begun = time.process_time()
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=REFUSED[text]) as error:
            parse_yaml(content, "\x1bfile.yaml")
        said = str(error.value)
        assert said.startswith(r"\x1bfile.yaml") and said.isprintable() and len(said) < 500
    assert time.process_time() - begun < 5


def test_what_is_no_text() -> None:
    for data in (b"lr: \xff", "lr: \ud800".encode(errors="surrogatepass"), b"\xff\xfe\xff"):
        with pytest.raises(
            ValueError, match=r"^f\.yaml is not valid YAML: .*(decode|codec|unacceptable)"
        ):
            parse_yaml(data, "f.yaml")


def test_what_is_read_is_as_before() -> None:
    text = "a: &a {x: 1, lr: 2e-5, b: .inf, t: 2020-13-45, 'n': null}\nc: *a\nd: 1:30\n"
    expected = yaml.safe_load(text.replace("2020-13-45", "'2020-13-45'"))  # dates are text
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert parse_yaml(text.encode(encoding), "f") == expected
    assert parse_yaml("\ufeff" + text, "f") == expected
    assert parse_yaml("", "f") is None


@pytest.mark.parametrize("value", ["!!bool x", '!!int ""', "!!timestamp x", "1:" * 200 + "1.0"])
@pytest.mark.parametrize("name", ["lr", "steps", "lora", "data", "parallel", "chat_template"])
def test_settings_of_the_command_line(name: str, value: str) -> None:
    given: Any = [*["run_dir=r", "data=d", "model=m"], f"{name}={value}"]
    if name in ("data", "chat_template"):  # any text is a text
        assert value in str(load(None, given))
        return
    with pytest.raises(ValueError, match=name):
        load(None, given)
