"""What is published: metadata, files of both packages, one version, and the forms of issues."""

import os
import re
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import tigon

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    build = pytest.importorskip("hatchling.build")
    out, before = tmp_path_factory.mktemp("dist"), Path.cwd()
    os.chdir(ROOT)  # what a build front end does
    try:
        build.build_wheel(str(out))
        build.build_sdist(str(out))
    finally:
        os.chdir(before)
    return out


def tracked(*folders: str) -> set[str]:
    """The files that git knows and that are there, as paths from the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    command = ["git", "ls-files", "-z", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def wheel(packages: Path) -> tuple[set[str], Message]:
    """The names of its files, and its metadata."""
    (path,) = packages.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith("dist-info/METADATA"))
        return set(file.namelist()), Parser().parsestr(file.read(metadata).decode())


def test_metadata(packages):
    names, said = wheel(packages)
    assert said["Version"] == tigon.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert said["Author"] and said["Summary"] and said["Keywords"]
    kinds = said.get_all("Classifier") or []
    assert "Typing :: Typed" in kinds and not [kind for kind in kinds if "License" in kind]
    assert said["Requires-Python"] == ">=3.11"
    assert "Programming Language :: Python :: 3.11" in kinds
    assert {"LICENSE", "NOTICE"} == {name.split("/")[-1] for name in names if "/licenses/" in name}


def test_what_the_wheel_holds(packages):
    """Data files too: the lists of GPUs, the report's page, py.typed."""
    names, _ = wheel(packages)
    assert {name for name in names if ".dist-info/" not in name} >= tracked("tigon")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tigon"}
    assert {"tigon/py.typed", "tigon/report/page.html", "tigon/plan/gpus.json"} <= names


def test_what_the_sdist_holds(packages):
    (path,) = packages.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    left_out = re.compile(r"bench/results/|\.ci/|\.github/|\.pre-commit")
    assert {name for name in tracked() if not left_out.match(name)} <= names
    assert not [name for name in names if left_out.match(name) or name.startswith(".venv")]
    assert path.stat().st_size < 4 << 20


def test_one_version():
    """version.py has the next release's, which a tag of this commit and CITATION.cff name too."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == tigon.__version__ and cited["license"] == "Apache-2.0"
    tagged = subprocess.run(
        ["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert tagged in ([], [f"v{tigon.__version__}"])


def test_changelog():
    """Its releases have dates, the newest first, and none is above the package's version."""
    first, *headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first == "[Unreleased]"
    releases = [re.fullmatch(r"\[([\d.]+)\] - \d{4}-\d\d-\d\d", text) for text in headings]
    assert all(releases), headings
    versions = [Version(release[1]) for release in releases if release]
    assert versions == sorted(versions, reverse=True)
    assert all(version <= Version(tigon.__version__) for version in versions)


def test_the_workflow_makes_targets_that_are_there():
    """And its oldest versions are the oldest that pyproject.toml allows."""
    path = ROOT / ".github/workflows/versions.yml"
    if not path.exists():
        pytest.skip("an sdist has no workflow")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = set(re.findall(r"^make (\w+)", "\n".join(steps), re.M))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets == {"docs", "package"} <= known
    oldest = jobs["versions"]["strategy"]["matrix"]["include"][0]
    allowed = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={oldest["python"]}"' in allowed
    for name, version in re.findall(r"(torch|triton)==(\d+\.\d+)\.0", oldest["versions"]):
        assert f'"{name}>={version}' in allowed


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 1
    assert any(field.get("validations", {}).get("required") for field in fields)
