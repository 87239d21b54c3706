"""The mistakes of mutations.txt still fit the code; `make mutate` shows that tests notice them."""

import shutil
from pathlib import Path

import pytest

from tests.mutations import ROOT, Mutation, read, run


def every_mutation() -> list[Mutation]:
    return list(read((ROOT / "tests/mutations.txt").read_text().splitlines()))


def test_every_mistake_can_be_planted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tigon", tmp_path / "tigon")
    mutations = every_mutation()
    assert set(range(1, 34)) <= {m.number for m in mutations}
    for m in mutations:
        if m.test:
            before = m.apply(tmp_path)  # raises unless what it replaces stands there once
            path = tmp_path / "tigon" / m.file
            assert path.read_text() != before
            path.write_text(before)
            name = m.test.partition("::")[0]
            assert (ROOT / name).is_file(), name


@pytest.mark.slow
def test_every_test_that_has_to_notice_is_collected() -> None:
    """With its parameters, which change with those of the test."""
    tests = dict.fromkeys(m.test for m in every_mutation() if m.test)
    code, output = run(ROOT, "--collect-only", *tests)
    assert code == 0, output
