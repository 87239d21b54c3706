"""Every setting of a training run with its default, by section.

Read from the sources, as importing them imports torch, which takes seconds.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[1] / "train"
SOURCES = (TRAIN / "config.py",)
UNKNOWN = object()  # a default that is no literal


@dataclass(frozen=True)
class Section:
    title: str
    defaults: dict[str, Any]


@cache
def sections() -> tuple[Section, ...]:
    """In the order of the files, which is that of `tigon train --help`."""
    trees = [ast.parse(source.read_text()) for source in SOURCES]
    classes = (n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef))
    found = []
    for node in (c for c in classes if c.name.endswith("Settings")):
        defaults = {
            line.target.id: _default(line.value)
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        title = (ast.get_docstring(node) or node.name).splitlines()[0].rstrip(".")
        found.append(Section(title, defaults))
    return tuple(found)


def _default(value: ast.expr | None) -> Any:
    """The first argument of option(default, help, ...)."""
    if not (isinstance(value, ast.Call) and value.args):
        return UNKNOWN
    try:
        return plain(ast.literal_eval(value.args[0]))
    except ValueError:
        return UNKNOWN


def plain(value: Any) -> Any:
    """As YAML gives it back: tuples are lists."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
