"""The API pages have every public name, and the manual builds without a warning."""

import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

import tigon
from tests.docs.pages import ROOT

# The modules that a page shows
PAGES = {
    "tigon": ["tigon"],
    "eval": ["tigon.eval"],
    "generation": ["tigon.generation"],
    "integrations": ["tigon.integrations.transformers", "tigon.integrations.tasks"],
    "kernels": ["tigon.kernels"],
    "train": ["tigon.train"],
}


def public(module: str) -> set[str]:
    """Its `__all__`, without definitions that operators are compared with, and families."""
    if module == "tigon":
        return set(tigon.EXPORTS)
    return {name for name in import_module(module).__all__ if not name.endswith("_ref")}


def named(page: str) -> list[str]:
    """The paths of what an API page shows."""
    return re.findall(r"^::: (\S+)$", (ROOT / f"docs/api/{page}.md").read_text(), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_public_names(page):
    """Each is on its page once; `generate` is among the methods of a model."""
    for path in named(page):
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path
    expected = set().union(*map(public, PAGES[page])) - {"generate"}
    if page != "tigon":
        assert sorted(path.rpartition(".")[2] for path in named(page)) == sorted(expected)
        return
    own = {path.removeprefix("tigon.") for path in named(page) if path.count(".") == 1}
    assert own == expected
    methods = [path.rpartition(".")[2] for path in named(page) if path.count(".") > 1]
    assert "generate" in methods and all(hasattr(tigon.CausalLM, name) for name in methods)


@pytest.mark.slow
def test_the_manual_builds(tmp_path):
    """Strictly: without a dead link, and with what each API page names."""
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings_handlers.python")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "tigon").symlink_to(ROOT / "tigon")
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (ROOT / "docs/api").glob("*.md"):
        html = (tmp_path / f"site/api/{page.stem}/index.html").read_text()
        for path in named(page.stem):
            assert f'id="{path}"' in html, f"{page.name}: {path}"
