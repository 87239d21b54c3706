"""What README and the manual point to exists: pages, headings, pictures, files, commands."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, pages, prose

FOLDERS = ("bench", "configs", "docs", "examples", "tests", "tigon")
# Paths that a reader makes, or that stand for a name of their own
MADE = re.compile(r"NAME|bench/out|tigon/(\w+\.)?$")
CODE = re.compile(r"`[^`]*`")


def exists(path: Path) -> bool:
    """Whether a file is there; an sdist has no records of benchmarks."""
    records = ROOT / "bench/results"
    return path.exists() or (path.is_relative_to(records) and not records.exists())


def broken(page: str, target: str) -> str:
    """What is wrong with a link's target; empty if nothing is."""
    if re.match(r"[a-z]+:", target):
        return ""
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    if not exists(path):
        return "no such file"
    inside = path.resolve().is_relative_to(ROOT / "docs")
    if page.startswith("docs/") and not inside:
        return "not in docs/: the manual has no such page; write its path as code"
    if anchor and anchor not in anchors(path.read_text()):
        return f"{path.name} has no such heading"
    return ""


@pytest.mark.parametrize("page", pages())
def test_links(page):
    text = CODE.sub("``", prose(pages()[page]))
    targets = re.findall(r"\]\(\s*([^)\s]+)[^)]*\)", text)
    targets += re.findall(r'\b(?:src|href)="([^"]+)"', text)
    assert {t: why for t in targets if (why := broken(page, t))} == {}


@pytest.mark.parametrize("page", pages())
def test_paths_of_the_repository(page):
    """Those in `code` are there."""
    found = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", prose(pages()[page]))
    assert [path for path in found if not MADE.search(path) and not exists(ROOT / path)] == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(Path(page).relative_to("docs")) for page in pages() if "docs/" in page}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere.md", "no such file"),
        ("data.md#nothing", "data.md has no such heading"),
        ("#nothing", "howto.md has no such heading"),
        ("../tigon/hub.py", "not in docs/"),
        ("data.md#what-is-learned-of-it", ""),
        ("https://example.org", ""),
    ],
)
def test_what_a_broken_link_is(target, why):
    assert broken("docs/howto.md", target).startswith(why) and bool(why) == bool(
        broken("docs/howto.md", target)
    )
