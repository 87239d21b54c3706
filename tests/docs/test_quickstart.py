"""The commands of docs/quickstart.md run, one after the other, and leave what the page says."""

import io
import shutil

from tests.docs.conftest import TINY
from tests.docs.pages import blocks, pages
from tests.docs.test_shell import commands
from tigon.cli.main import main

PAGE = "docs/quickstart.md"


def run(words: list[str]) -> int:
    """A command of ours, with a tiny run in place of a long one."""
    if words[:2] == ["tigon", "train"]:
        words = [*words, *TINY]
    return main(words[1:]) if words[0] == "tigon" else 0


def test_the_quickstart(desk, monkeypatch, capsys):
    shutil.rmtree(desk / "runs")
    for block in (block for block in blocks() if block.page == PAGE and not block.language):
        for words in commands(block):
            monkeypatch.setattr("sys.stdin", io.StringIO("Name a prime.\n"))
            assert run(words) == 0, words
    rows = pages()[PAGE].split("| file | contents |")[1].split("\n\n")[0].splitlines()[2:]
    left = [row.split("`")[1] for row in rows]
    assert left and not [name for name in left if not (desk / "runs/mine" / name).exists()]
    assert (desk / "exported/config.json").exists()
    said = capsys.readouterr().out
    assert "perplexity" in said and "finished" in (desk / "runs/mine/report.html").read_text()
