"""Where NCCL's flight recorder writes, and its folder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tigon.train.distributed import FOLDER, flight_recorder, prepare_flight_recorder

VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "{folder}/rank-",
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
    folder = tmp_path / "run" / FOLDER
    for name, value in VARIABLES.items():
        assert os.environ[name] == value.format(folder=folder)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"  # what a person has set stays
    prepare_flight_recorder(config)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


@pytest.mark.parametrize("dumped", [False, True])
def test_the_folder_stays_if_it_has_dumps(config: Any, tmp_path: Path, dumped: bool) -> None:
    folder = tmp_path / "run" / FOLDER
    world: Any = SimpleNamespace(size=2, device=torch.device("cuda", 0))
    with flight_recorder(config, world):
        assert folder.is_dir()
        if dumped:
            (folder / "rank-0").write_text("x")
    assert folder.exists() == dumped


@pytest.mark.parametrize(("size", "device"), [(1, "cuda"), (2, "cpu")])
def test_no_folder_without_nccl(config: Any, tmp_path: Path, size: int, device: str) -> None:
    world: Any = SimpleNamespace(size=size, device=torch.device(device))
    with flight_recorder(config, world):
        assert not (tmp_path / "run").exists()
