"""NCCL's flight recorder: what each rank was doing when a collective did not end.

After torch's time limit of a collective, ten minutes, every rank writes its last collectives into
run_dir/flight-recorder/rank-N, and is ended. `torchfrtrace` reads them (docs/multihost.md).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.train.config import Config
from tigon.train.parallel import World

FOLDER = "flight-recorder"


def prepare_flight_recorder(config: Config) -> None:
    """Before the process group is made. What the environment says already stays."""
    folder = Path(config.run_dir).absolute() / FOLDER
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/rank-")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


@contextmanager
def flight_recorder(config: Config, world: World) -> Iterator[None]:
    """The folder that dumps go to, which is there no longer than it has to be."""
    if world.size == 1 or world.device.type == "cpu":
        yield
        return
    folder = Path(config.run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, or another rank was faster
            folder.rmdir()
