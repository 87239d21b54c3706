"""docs/settings.md and docs/commands.md are made from the definitions of settings and commands;
`python -m tests.docs.test_reference` writes them."""

import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

import pytest
import yaml

from tests.docs.pages import ROOT
from tigon.cli.main import COMMANDS, SAMPLING
from tigon.settings.config import SECTIONS
from tigon.utils.config import describe_type, field_types

SETTINGS = """# Settings of training

What a config of `tigon train` may have, and its command line as `key=value`; `tigon train --help`
prints the same. A setting of a group is `lora.rank=16` on the command line. What other trainers
call them is on the page of [migration](migration.md#names-of-settings).
"""
COMMANDS_PAGE = """# Commands

What the command line takes; `tigon COMMAND --help` prints the same. `python -m tigon` is the
same command, for torchrun. Errors that you can fix are one line, and the exit code is 1.
"""
TRAIN = """`tigon train config.yaml key=value ...` takes [settings](settings.md), and these options:

| argument | |
|---|---|
| `--nproc` N | processes on this host, one for each GPU |
| `--dry-run` | check everything, say what the run takes, time a few steps, and stop |
| `--print-config` | the settings as they would be used, as YAML |
"""


def table(cls: type) -> list[str]:
    """A row for each field; what the help says of pages is a link."""
    lines, kinds = ["| setting | type | default | |", "|---|---|---|---|"], field_types(cls)
    for f in fields(cls):
        default = "" if f.default is MISSING else yaml.safe_dump(f.default, default_flow_style=True)
        help = f.metadata.get("help", "")
        help = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", help)
        value = default.removesuffix("\n...\n").strip()
        cells = [f"`{f.name}`", describe_type(kinds[f.name]), f"`{value}`" if value else "", help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def settings() -> str:
    """A table for each section of the settings, and for each group."""
    lines, groups = [SETTINGS], {}
    for section in SECTIONS:
        lines += [f"## {str(section.__doc__).rstrip('.')}", "", *table(section)]
        kinds = field_types(section)
        groups |= {f.name: cls for f in fields(section) if (cls := find_group(kinds[f.name]))}
    for name, cls in groups.items():
        lines += [f"## Settings of `{name}`", "", str(cls.__doc__).splitlines()[0], "", *table(cls)]
    return "\n".join(lines)


def find_group(kind: Any) -> type | None:
    """The dataclass among a setting's types, if each of its fields says what it is."""
    groups = [part for part in (kind, *get_args(kind)) if is_dataclass(part)]
    explained = (g for g in groups if all("help" in f.metadata for f in fields(g)))
    return next(explained, None)  # type: ignore[arg-type]


def commands() -> str:
    """A section for each command, with its arguments."""
    lines = [COMMANDS_PAGE]
    for name, (help, arguments) in COMMANDS.items():
        if isinstance(arguments, str):  # of a group of commands
            continue
        lines += [f"## `tigon {name}`", ""]
        if name == "train":  # has a syntax of its own
            lines.append(TRAIN)
            continue
        lines += [f"{help[0].upper()}{help[1:]}.", ""]
        sampling = SAMPLING if name in ("generate", "chat") else {}
        rows = [argument(*row) for row in (arguments | sampling).items()]
        lines += ["| argument | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def argument(flags: str, options: dict[str, Any]) -> str:
    """A row: its flags with what they take, and its help."""
    takes = options.get("metavar", "")
    if choices := options.get("choices"):
        takes = " or ".join(f"`{choice}`" for choice in choices)
    if "BooleanOptionalAction" in str(options.get("action")):
        flags = f"{flags} {flags.replace('--', '--no-')}"
    names = ", ".join(f"`{flag}`" for flag in flags.split())
    cells = (f"{names} {takes}".strip(), options["help"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {"settings": settings, "commands": commands}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_that_of_its_definitions(page):
    text = (ROOT / f"docs/{page}.md").read_text()
    assert text == PAGES[page](), "python -m tests.docs.test_reference writes it"


if __name__ == "__main__":
    for name, write in PAGES.items():
        (ROOT / f"docs/{name}.md").write_text(write())
