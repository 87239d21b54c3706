"""The pages of README and docs, their links and their blocks of code."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- skip: (?P<skip>[^\n]*) -->\n\n?)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A block of code; `skip` says why no test runs it."""

    page: str  # its path from the root
    line: int  # of its fence
    language: str
    text: str
    skip: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def pages() -> dict[str, str]:
    """The text of each page, by its path from the root."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


@cache
def blocks() -> list[Block]:
    """All blocks of code, page by page."""
    return [
        Block(
            page,
            text[: match.start("text")].count("\n"),
            match["language"],
            re.sub(f"^{match['indent']}", "", match["text"], flags=re.M),
            match["skip"] or "",
        )
        for page, text in pages().items()
        for match in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """What a link into the page may name: its headings in GitHub's form, and explicit anchors."""
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.*)$", prose(text), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = sum(1 for name in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", name))
        found.add(f"{slug}-{count}" if count else slug)
    return found
