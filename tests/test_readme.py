"""The table of families in README and docs/models.md is made from their files;
`python -m tests.test_readme` writes it. No page has a merge's conflict in it."""

import re
import sys
from pathlib import Path

from tigon.models import MODELS
from tigon.models.pretrained.names import MULTIMODAL

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/models.md"]
TABLE = re.compile(r"\| model_type \| class \|.*?\n\n", re.S)


def table() -> str:
    """A row for each file of models/: its families, and the first line of its docstring."""
    files: dict[str, list[str]] = {}
    for model_type, family in MODELS.items():
        files.setdefault(family.__module__, []).append(model_type)
    rows = [("model_type", "class", "what it is"), ("---", "---", "---")]
    for file, model_types in files.items():
        first = (sys.modules[file].__doc__ or "").splitlines()[0].rstrip(".")
        classes = (f"`tigon.{MODELS[kind].__name__}`" for kind in model_types)
        rows.append((", ".join(f"`{kind}`" for kind in model_types), ", ".join(classes), first))
    whole = ", ".join(f"`{kind}`" for kind in MULTIMODAL)
    rows.append((f"{whole} (multimodal)", "the class of its `text_config`", "the text model alone"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def test_the_table_of_families() -> None:
    for page in PAGES:
        assert TABLE.findall(page.read_text()) == [table()], page.name


def test_no_merge_left_both_sides() -> None:
    """What tests and linters do not read."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/mutations.txt"]
    pages += ROOT.glob("configs/**/*.yaml")
    assert len(pages) > 20
    left = re.compile(r"^(?:<{7}|>{7})(?: |$)", re.M)
    assert not [str(page) for page in pages if left.search(page.read_text())]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(TABLE.sub(lambda _: table(), page.read_text()))
