"""Settings from YAML and the command line, and back; names of other trainers get suggestions."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tigon.settings.config import Config
from tigon.utils.config import (
    ConfigError,
    Parse,
    build_settings,
    find_misspelled,
    group_fields,
    prefix_errors,
    read_settings,
)
from tigon.utils.json import quote
from tigon.utils.yaml import parse_yaml

ALIASES = Path(__file__).with_name("aliases.yaml")  # settings of other trainers
# Keys by which other trainers' configs choose the class of a group, as in optimizer._component_
CLASS_KEYS = (
    "_component_", "_target_", "enable", "enabled", "mode", "name", "path", "source", "type",
)  # fmt: skip
DATA_ENDINGS = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
MAX_BYTES = 2**20  # of a config file: PyYAML takes seconds for a megabyte
DATA = ("data", "eval_data")  # settings whose entries may be groups
_ENTRY = re.compile(r"^(eval_)?data\[\d+\]\.")  # of a name, as in data[0].path
DICTIONARIES = ("columns", "chat_template_kwargs")  # settings with entries of any name
# One of these on the command line replaces the other one in the file
PAIRS = (("epochs", "steps"), ("model", "init"), ("eval_data", "eval_fraction"))
ALTERNATIVES = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a Config from a YAML file and `key=value` or `--key value` texts, which win over it."""
    file = {} if path is None else _read_file(path)
    line = _read(_with_entries(dict(parse_arguments(overrides)), file), _parse)
    # A group that is null on the command line has no settings of the file either, and one that has
    # settings there is not null, or auto, as the file may say
    replaced = {name.partition(".")[0] for name in line if "." in name}
    replaced |= {other for name, other in ALTERNATIVES.items() if line.get(name)}
    replaced |= {name for name in file if name.partition(".")[0] in line}
    kept = {name: value for name, value in file.items() if name not in replaced}
    return build_settings(Config, kept | line)


def dump(config: Config) -> str:
    """Returns the settings as YAML that `load` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, width=100)


def parse_arguments(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the name, with _ for -, and the value of each `key=value` or `--key value`;
    ValueError for any other text."""
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if not equals:
            if not argument.startswith("--") or not rest:
                raise ValueError(
                    f"{quote(argument)}: settings are given as key=value or --key value, after the "
                    "config file"
                )
            value = rest.pop(0)
        pairs.append((key.removeprefix("--").replace("-", "_"), value))
    return pairs


def _read_file(path: str | Path) -> dict[str, Any]:
    """Returns the settings in a YAML file, as `read_settings` does; errors name the file."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no config file {path}")
    if not Path(path).is_file():  # ranks could not read a pipe again
        raise ValueError(f"{path} is not a regular file: settings are read from a YAML file")
    if Path(path).suffix in DATA_ENDINGS:
        raise ValueError(f"{path} is no YAML file of settings: give data as data={path}")
    if Path(path).suffix == ".toml":
        raise ValueError(f"{path}: settings are YAML, not TOML; docs/migration.md has their names")
    if (size := Path(path).stat().st_size) > MAX_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, and a file of settings {MAX_BYTES:,} at most: if these "
            f"are data, give data={path}"
        )
    content = parse_yaml(Path(path).read_bytes(), path) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: needs `key: value` lines, not a {type(content).__name__}")
    with prefix_errors(str(path), ValueError):
        return _read(content, _number)


def _with_entries(line: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Moves settings of entries, as columns.NAME=value, into dictionaries with the file's other
    entries; changes and returns `line`."""
    for name in DICTIONARIES:
        entries = {key: line.pop(key) for key in [*line] if key.startswith(f"{name}.")}
        if entries:
            dictionary = (_parse_entry(line[name]) if name in line else file.get(name)) or {}
            if not isinstance(dictionary, dict):
                entry = next(iter(entries))
                raise ConfigError(f"{name}={dictionary} and {entry} contradict each other")
            parsed = {k.removeprefix(f"{name}."): _parse_entry(v) for k, v in entries.items()}
            line[name] = dictionary | parsed
    return line


def _read(values: dict[str, Any], parse: Parse) -> dict[str, Any]:
    """Returns the values for `build_settings`; raises ConfigError for all unknown names."""
    known, groups = Config.__dataclass_fields__, group_fields(Config)
    names, answers_by_setting = load_aliases()
    unknown = []
    for name in map(str, _setting_names(values, groups, parse)):
        first = name.partition(".")[0]
        inside = first in groups or first.endswith("]")
        if name not in known and (not inside or _ENTRY.sub("data.", name) in names):
            unknown.append(f"{name!r}; {suggest_setting(name, known)}")
    if len(unknown) > 1:
        raise ConfigError("\n  ".join([f"{len(unknown)} unknown settings:", *unknown]))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]}")
    for name, answers in answers_by_setting.items():
        if isinstance(value := values.get(name), str) and value in answers:
            raise ConfigError(f"{name}={value!r} is another trainer's; here: {answers[value]}")
    return read_settings(Config, values | _named_eval_data(values, parse), parse=parse)


def _setting_names(values: dict[str, Any], groups: Collection[str], parse: Parse) -> Iterator[str]:
    """Yields the names of settings; those inside a group or an entry are prefixed by its name.

    So are those in a section of another trainer's config, as training.steps, in place of its own.
    """
    for name, value in values.items():
        if value and isinstance(value, Mapping) and name not in {*groups, *DATA, *DICTIONARIES}:
            yield from (f"{name}.{key}" for key in value)
            continue
        yield name
        if (name in groups or name in DATA) and isinstance(value, str):
            with suppress(ValueError):  # `read_settings` raises it with the name
                value = parse(value)
        if name in groups and isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)
        if name in DATA:
            entries = enumerate(value if isinstance(value, list) else [value])
            inside = [(i, entry) for i, entry in entries if isinstance(entry, Mapping)]
            yield from (f"{name}[{i}].{key}" for i, entry in inside for key in entry)


def _named_eval_data(values: dict[str, Any], parse: Parse) -> dict[str, Any]:
    """Returns eval_data={NAME: ...} as a list of entries with names; {} for others."""
    value = values.get("eval_data")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse(value)
    if not isinstance(value, dict) or "path" in value:
        return {}
    entries = [
        {"name": str(name), **(entry if isinstance(entry, dict) else {"path": entry})}
        for name, entry in value.items()
    ]
    return {"eval_data": entries}


def _parse(text: str) -> Any:
    """Returns a setting's value from its text on the command line, read as YAML."""
    try:
        value = parse_yaml(text, quote(text))
    except ValueError as error:
        if text.startswith(("[", "{")):
            advice = "quote a text in it that has one of ? : , [ ] { }"
            raise ConfigError(f"{error}; {advice}") from None
        raise
    return _number(value) if isinstance(value, str) else value


def _parse_entry(text: str) -> Any:
    """Returns a dictionary entry's value, read as YAML; what is no YAML stays text."""
    try:
        return _parse(text)
    except ConfigError:
        raise
    except ValueError:  # no YAML, so it is text
        return text


def _number(text: str) -> float | str:
    """Returns the number in a text, such as 2e-5, which is text in YAML; other text unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


# Names and values of other trainers.


@cache
def load_aliases() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Returns what to write here for a setting of another trainer, and by setting for its values.

    Settings of a group are also keyed with its name before them, those of entries only so.
    """
    # A file of ours: libyaml, which PyYAML may lack, takes a tenth of the time
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(ALIASES.read_bytes(), loader)
    names = _invert(content["settings"])
    for group in ("lora", "parallel"):
        members = _invert(content[group])
        names |= members | {f"{group}.{name}": text for name, text in members.items()}
    names |= {f"data.{name}": text for name, text in _invert(content["data"]).items()}
    return names, {name: _invert(answers) for name, answers in content["values"].items()}


def _invert(answers: dict[str, list[str]]) -> dict[str, str]:
    return {name: text for text, names in answers.items() for name in names}


def suggest_setting(name: str, known: Iterable[str]) -> str:
    """Returns what to write in place of an unknown setting."""
    known, (aliases, _) = list(known), load_aliases()
    if answer := aliases.get(_ENTRY.sub("data.", name)):
        return f"here: {answer}"
    if "." in name:  # optimizer.lr, dataset.source
        first, last = name.split(".", 1)[0], name.rsplit(".", 1)[1]
        for part in (last, first) if last in CLASS_KEYS or first in aliases else (last,):
            if part in known or part in aliases:
                return f"here: {aliases.get(part, part)}"
    meant = find_misspelled(name, [*known, *aliases])  # ours first, of equally near ones
    if meant is None:
        return "`tigon train --help` lists all"
    if meant in known:
        return f"did you mean {meant!r}?"
    return f"if {meant!r} is meant, here: {aliases[meant]}"
