"""The table of families in docs/models.md is made from their files; `python -m tests.test_readme`
writes it. The README names each family. No page has a merge's conflict in it."""

import re
import sys
from pathlib import Path

from tigon.models import MODELS
from tigon.models.pretrained.names import MULTIMODAL

ROOT = Path(__file__).parents[1]
MODELS_PAGE = ROOT / "docs/models.md"
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
    assert TABLE.findall(MODELS_PAGE.read_text()) == [table()]


def test_readme_names_every_family() -> None:
    text = (ROOT / "README.md").read_text()
    named = text.split("## Supported models")[1].split("\n\n[")[0]
    assert sorted(re.findall(r"`(\w+)`", named)) == sorted(["model_type", *MODELS, *MULTIMODAL])


def test_no_merge_left_both_sides() -> None:
    """What tests and linters do not read."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/mutations.txt"]
    pages += ROOT.glob("configs/**/*.yaml")
    assert len(pages) > 20
    left = re.compile(r"^(?:<{7}|>{7})(?: |$)", re.M)
    assert not [str(page) for page in pages if left.search(page.read_text())]


if __name__ == "__main__":
    MODELS_PAGE.write_text(TABLE.sub(lambda _: table(), MODELS_PAGE.read_text()))
