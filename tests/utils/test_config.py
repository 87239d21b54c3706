"""Settings of every type, from mappings and from text, with groups inside."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from tigon.utils.config import (
    ConfigError,
    ConfigTypeError,
    build_settings,
    check_ranges,
    read_settings,
    setting,
)


@dataclass(frozen=True)
class Adapter:
    rank: int = setting(8, ge=1)
    alpha: float = 1.0


@dataclass(frozen=True)
class Run:
    name: str = ""
    steps: int | None = None
    lr: float = setting(1e-3, ge=0, le=1)
    mode: Literal["fast", "exact"] | None = None
    files: tuple[str, ...] = ()
    ids: int | list[int] | None = None
    note: dict[str, Any] = field(default_factory=dict)
    adapter: Adapter = field(default_factory=Adapter)
    other: Adapter | None = None

    def __post_init__(self) -> None:
        check_ranges(self)


def test_values_of_every_type() -> None:
    values = {"name": "a", "steps": np.int64(3), "lr": np.float32(0.5), "mode": "fast"}
    values |= {"files": "x", "ids": [1, 2], "note": {"a": 1}}
    run = build_settings(Run, read_settings(Run, values))
    assert run == Run("a", 3, 0.5, "fast", ("x",), [1, 2], {"a": 1})
    assert (type(run.steps), type(run.lr)) == (int, float)
    lr = build_settings(Run, read_settings(Run, {"lr": 1, "files": ["x", "y"]})).lr
    assert type(lr) is int  # a file's 1 is written back as 1


def test_groups() -> None:
    expected = Run(adapter=Adapter(4, 2.0), other=Adapter(1))
    nested = {"adapter": {"rank": 4, "alpha": 2.0}, "other": {"rank": 1}}
    assert build_settings(Run, read_settings(Run, nested)) == expected
    file = read_settings(Run, {"adapter": {"rank": 16, "alpha": 2.0}, "other": {"rank": 1}})
    line = read_settings(Run, {"adapter.rank": "4"}, parse=int)
    assert build_settings(Run, file | line) == expected
    assert build_settings(Run, read_settings(Run, asdict(expected))) == expected
    assert build_settings(Run, read_settings(Run, {"other": None})).other is None


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"step": 1}, ConfigError, "unknown setting 'step'; did you mean 'steps'?"),
        ({"qqq": 1}, ConfigError, "unknown setting 'qqq'; known: name, steps, lr, mode,"),
        ({"adapter": {"rnk": 1}}, ConfigError, r"'adapter.rnk'; did you mean 'rank'\?"),
        ({"adapter.rank": 0}, ConfigError, "adapter.rank=0 must be at least 1"),
        ({"adapter": 3}, ConfigTypeError, "adapter=3 is not a group of settings"),
        ({"other": 3}, ConfigTypeError, "other=3 is not a group of settings or null"),
        ({"lr": 2}, ConfigError, "lr=2 must be at most 1"),
        ({"lr": float("nan")}, ConfigError, "lr=nan must be at least 0"),
        ({"lr": True}, ConfigTypeError, "lr=True is not a number"),
        ({"lr": "1"}, ConfigTypeError, "lr='1' is not a number"),
        ({"steps": 1.0}, ConfigTypeError, "steps=1.0 is not a whole number or null"),
        ({"mode": "slow"}, ConfigTypeError, "mode='slow' is not one of fast, exact or null"),
        ({"files": [1]}, ConfigTypeError, r"files=\[1\] is not text or a list of texts"),
        ({"ids": ["a"]}, ConfigTypeError, "is not a whole number or a list of whole numbers or n"),
        ({"note": []}, ConfigTypeError, r"note=\[\] is not a dictionary"),
        ({"name": None}, ConfigTypeError, "name=None is not text"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_settings(Run, values)


def test_bounds_without_reading() -> None:
    with pytest.raises(ConfigError, match="lr=-1 must be at least 0"):
        Run(lr=-1)


@dataclass(frozen=True)
class Several:
    adapters: tuple[Adapter, ...] = ()


def test_a_mapping_is_a_list_of_one_group():
    values = read_settings(Several, {"adapters": "{rank: 3}"}, parse=yaml.safe_load)
    assert build_settings(Several, values) == Several((Adapter(3),))


def test_text_that_is_no_yaml_is_one_of_a_list_unless_it_begins_as_one():
    def parse(text):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError from error

    assert read_settings(Run, {"files": "*.jsonl"}, parse=parse) == {"files": ("*.jsonl",)}
    with pytest.raises(ConfigTypeError, match="is not text or a list of texts"):
        read_settings(Run, {"files": "[What is 2 + 2?]"}, parse=parse)
