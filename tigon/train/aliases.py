"""Suggests settings for names and values of other trainers, by the table `aliases.yaml`."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tigon.utils.config import find_misspelled
from tigon.utils.yaml import parse_yaml

FILE = Path(__file__).with_name("aliases.yaml")
# Keys by which other trainers' configs choose the class of a group, as in optimizer._component_
CLASS_KEYS = ("_component_", "_target_", "mode", "name", "path", "source", "type")


@dataclass(frozen=True)
class Aliases:
    names: dict[str, str]  # of a setting elsewhere -> what to write here
    values: dict[str, dict[str, str]]  # by setting: its value elsewhere -> what to write here


@cache
def load_aliases() -> Aliases:
    """Reads other trainers' settings; those of a group are also keyed with its name before them."""
    content = parse_yaml(FILE.read_bytes(), FILE)
    names = _invert(content["settings"])
    for group in ("lora", "parallel"):
        members = _invert(content[group])
        names |= members | {f"{group}.{name}": text for name, text in members.items()}
    return Aliases(names, {name: _invert(answers) for name, answers in content["values"].items()})


def _invert(answers: dict[str, list[str]]) -> dict[str, str]:
    return {name: text for text, names in answers.items() for name in names}


def suggest_setting(name: str, known: Iterable[str]) -> str:
    """Returns what to write in place of an unknown setting."""
    known, aliases = list(known), load_aliases().names
    if name in aliases:
        return f"here: {aliases[name]}"
    if "." in name:  # optimizer.lr, dataset.source
        first, last = name.split(".", 1)[0], name.rsplit(".", 1)[1]
        for part in (last, first) if last in CLASS_KEYS else (last,):
            if part in known or part in aliases:
                return f"here: {aliases.get(part, part)}"
    meant = find_misspelled(name, [*known, *aliases])  # ours first, of equally near ones
    if meant is None:
        return "`tigon train --help` lists all"
    if meant in known:
        return f"did you mean {meant!r}?"
    return f"if {meant!r} is meant, here: {aliases[meant]}"
