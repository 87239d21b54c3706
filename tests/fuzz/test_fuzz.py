"""Some cases of every target, the same in every run; `python -m tests.fuzz` runs more."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS, apportion
from tests.fuzz.harness import Fuzzer

CASES = 2000


@pytest.mark.parametrize("name", TARGETS)
def test_every_case_loads_or_is_one_clean_error(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(TARGETS[name], tmp_path)
    shares = [target.share for target in TARGETS.values()]
    cases = apportion(CASES, shares)[list(TARGETS).index(name)]
    fuzzer.run(cases, seed=1)
    assert fuzzer.count == cases


@pytest.mark.parametrize(("total", "shares"), [(2000, [8, 2, 1 / 4, 1 / 2, 3]), (7, [1] * 40)])
def test_the_cases_add_up_to_what_is_asked(total: int, shares: list[float]) -> None:
    found = apportion(total, shares)
    assert sum(found) == total
    assert all(abs(n - total * s / sum(shares)) <= 1 for n, s in zip(found, shares, strict=True))
