"""The mistakes of mutations.txt still fit the code; `make mutate` shows that tests notice them."""

import shutil
from pathlib import Path

from tests.mutations import ROOT, read


def test_every_mistake_can_be_planted(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tigon", tmp_path / "tigon")
    mutations = list(read((ROOT / "tests/mutations.txt").read_text().splitlines()))
    assert set(range(1, 34)) <= {m.number for m in mutations}
    for m in mutations:
        if m.test:
            before = m.apply(tmp_path)  # raises unless what it replaces stands there once
            path = tmp_path / "tigon" / m.file
            assert path.read_text() != before
            path.write_text(before)
            name = m.test.partition("::")[0]
            assert (ROOT / name).is_file(), name
