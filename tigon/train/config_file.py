"""Settings from YAML and the command line, and back."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from tigon.train.config import Config
from tigon.train.names import OTHERS, answer
from tigon.train.values import VALUES
from tigon.utils.config import ConfigError, Parse, group_fields
from tigon.utils.config import build_settings as build_settings
from tigon.utils.config import read_settings as read_settings
from tigon.utils.json import quote
from tigon.utils.yaml import parse_yaml

DATA = (
    ".jsonl",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".txt",
    ".gz",
    ".zst",
)  # endings of no config

DICTIONARIES = ("columns", "chat_template_kwargs")  # settings with entries of any name

# Settings of which a config has one: that of the command line is in place of the file's other
INSTEAD = {"epochs": "steps", "steps": "epochs", "model": "init", "init": "model"}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A Config from a YAML file and `key=value` or `--key value` texts, which win over it."""
    values: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no config file {path}")
        if Path(path).suffix in DATA:
            raise ValueError(f"{path} is no YAML file of settings: give data as data={path}")
        read = parse_yaml(Path(path).read_bytes(), path) or {}
        if not isinstance(read, dict):
            raise ValueError(f"{path}: needs `key: value` lines, not a {type(read).__name__}")
        try:
            values = _read(read, _number)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    given = _read(_with_entries(dict(pairs(overrides)), values), _parse)
    # A group that is null on the command line has no settings of the file either, and one that has
    # settings there is not null, or auto, as the file may say
    over = {name.partition(".")[0] for name in given if "." in name}
    over |= {other for name, other in INSTEAD.items() if given.get(name) is not None}
    kept = {n: v for n, v in values.items() if n.partition(".")[0] not in given and n not in over}
    return build_settings(Config, kept | given)


def _with_entries(given: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`columns.NAME=value` sets an entry of a dictionary and keeps the file's other ones."""
    for name in DICTIONARIES:
        entries = {key: given.pop(key) for key in [*given] if key.startswith(f"{name}.")}
        if entries:
            whole = (_value(given[name]) if name in given else values.get(name)) or {}
            if not isinstance(whole, dict):
                raise ConfigError(f"{name}={whole} and {next(iter(entries))} contradict each other")
            of_name = {key.removeprefix(f"{name}."): _value(entries[key]) for key in entries}
            given[name] = whole | of_name
    return given


def _value(text: str) -> Any:
    try:
        return _parse(text)
    except ConfigError:
        raise
    except ValueError:  # no YAML, so it is text
        return text


def _read(values: dict[str, Any], parse: Parse) -> dict[str, Any]:
    known, groups = Config.__dataclass_fields__, group_fields(Config)
    wrong = [
        f"{name!r}; {answer(name, known)}"
        for name in map(str, _names(values, groups, parse))
        if name not in known and (name.partition(".")[0] not in groups or name in OTHERS)
    ]
    if len(wrong) > 1:
        raise ConfigError("\n  ".join([f"{len(wrong)} unknown settings:", *wrong]))
    if wrong:
        raise ConfigError(f"unknown setting {wrong[0]}")
    for name, others in VALUES.items():
        if isinstance(value := values.get(name), str) and value in others:
            raise ConfigError(f"{name}={value!r} is another trainer's; here: {others[value]}")
    return read_settings(Config, values | _named(values, parse), parse=parse)


def _names(values: dict[str, Any], groups: Container[str], parse: Parse) -> Iterator[str]:
    """The settings that are given, those inside a group with its name before them."""
    for name, value in values.items():
        yield name
        inside = value
        if name in groups and isinstance(value, str):
            with suppress(ValueError):  # which is said when it is read
                inside = parse(value)
        if name in groups and isinstance(inside, Mapping):
            yield from (f"{name}.{key}" for key in inside)


def _named(values: dict[str, Any], parse: Parse) -> dict[str, Any]:
    """eval_data as {NAME: what, ...}, as a list of entries with a name."""
    given = values.get("eval_data")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = parse(given)
    if not isinstance(given, dict) or "path" in given:
        return {}
    entries = [
        {"name": str(name), **(what if isinstance(what, dict) else {"path": what})}
        for name, what in given.items()
    ]
    return {"eval_data": entries}


def dump(config: Config) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, width=100)


def pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if not equals:
            if not argument.startswith("--") or not rest:
                raise ValueError(f"{argument!r}: settings are given as key=value or --key value")
            value = rest.pop(0)
        pairs.append((key.removeprefix("--").replace("-", "_"), value))
    return pairs


def _number(text: str) -> float | str:
    """YAML reads 2e-5 as text."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse(text: str) -> Any:
    try:
        value = parse_yaml(text, quote(text))
    except ValueError as error:
        if text.startswith(("[", "{")):
            fix = "quote a text in it that has one of ? : , [ ] { }"
            raise ConfigError(f"{error}; {fix}") from None
        raise
    return _number(value) if isinstance(value, str) else value
