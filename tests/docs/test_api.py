"""The API pages have every public name, and the manual builds without a warning."""

import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

import tigon
from tests.docs.pages import ROOT

MODULES = ("tigon", "tigon.eval", "tigon.generation", "tigon.kernels", "tigon.train")


def public(module: str) -> set[str]:
    """Its `__all__`, without definitions that operators are compared with, and families."""
    if module == "tigon":
        return set(tigon.EXPORTS)
    return {name for name in import_module(module).__all__ if not name.endswith("_ref")}


def named(page: str) -> list[str]:
    """The paths of what an API page shows."""
    return re.findall(r"^::: (\S+)$", (ROOT / f"docs/api/{page}.md").read_text(), re.M)


@pytest.mark.parametrize("module", MODULES)
def test_public_names(module):
    """Each is on its page once, or a method on the model's."""
    methods = {path for path in named("tigon") if hasattr(tigon.CausalLM, path.split(".")[-1])}
    paths = [path for path in named(module.rpartition(".")[2]) if path not in methods]
    for path in [*paths, *methods]:
        part, _, name = path.rpartition(".")
        assert hasattr(import_module(part), name), path
    paths = [path for path in paths if path != "tigon.models.from_pretrained"]  # explains tigon's
    found = {path.rpartition(".")[2] for path in paths}
    shown = {path.rpartition(".")[2] for path in methods}
    assert len(found) == len(paths) and found == public(module) - shown


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
