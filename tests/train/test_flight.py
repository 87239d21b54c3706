"""Where NCCL's flight recorder writes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tigon.train.distributed import prepare_flight_recorder

VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "{folder}/flight-recorder-",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return SimpleNamespace(run_dir="run")


def test_collectives_are_dumped_into_the_run(config: Any, tmp_path: Path) -> None:
    prepare_flight_recorder(config)
    folder = tmp_path / "run"
    for name, value in VARIABLES.items():
        assert os.environ[name] == value.format(folder=folder)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"  # what a person has set stays
    prepare_flight_recorder(config)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
