"""Some cases of every target, the same in every run; `python -m tests.fuzz` runs more."""

from pathlib import Path

import pytest

from tests.fuzz.harness import Fuzzer
from tests.fuzz.targets import TARGETS

CASES = 2000
WHOLE = sum(target.share for target in TARGETS.values())


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_loads_or_is_one_clean_error(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(TARGETS[name], tmp_path)
    cases = round(CASES * fuzzer.target.share / WHOLE)
    fuzzer.run(cases, seed=1)
    assert fuzzer.count >= cases
