"""Some cases of every target, the same in every run; `python -m tests.fuzz` runs more."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import SHARES, TARGETS
from tests.fuzz.harness import Fuzzer

CASES = 1500


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_loads_or_is_one_clean_error(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(TARGETS[name], tmp_path)
    cases = round(CASES * TARGETS[name].share / SHARES)
    fuzzer.run(cases, seed=1)
    assert fuzzer.count > cases // 2  # hypothesis ends where it finds no new one
