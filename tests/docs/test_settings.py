"""docs/settings.md is made from the settings of training; `python -m tests.docs.test_settings`
writes it."""

import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

import yaml

from tests.docs.pages import ROOT
from tigon.train.config import SECTIONS
from tigon.train.tasks import describe_tasks
from tigon.utils.config import describe_type, field_types

PAGE = ROOT / "docs/settings.md"
BEGIN = """# Settings of training

What a config of `tigon train` may have, and its command line as `key=value`; `tigon train --help`
prints the same. A setting of a group is `lora.rank=16` on the command line. What other trainers
call them is on the page of [migration](migration.md#names-of-settings).
"""


def table(cls: type) -> list[str]:
    """A row for each field; what the help says of pages is a link."""
    lines, kinds = ["| setting | type | default | |", "|---|---|---|---|"], field_types(cls)
    for f in fields(cls):
        default = "" if f.default is MISSING else yaml.safe_dump(f.default, default_flow_style=True)
        help = f.metadata.get("help", "").replace("{tasks}", describe_tasks())
        help = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", help)
        value = default.removesuffix("\n...\n").strip()
        cells = [f"`{f.name}`", describe_type(kinds[f.name]), f"`{value}`" if value else "", help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def page() -> str:
    """A table for each section of the settings, and for each group."""
    lines, groups = [BEGIN], {}
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


def test_the_page_is_that_of_the_settings():
    assert PAGE.read_text() == page(), "python -m tests.docs.test_settings writes it"


if __name__ == "__main__":
    PAGE.write_text(page())
