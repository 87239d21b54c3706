"""What a launcher, torchrun or --nproc, and its ranks tell each other: variables, error files."""

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from tigon.utils.json import quote

LAUNCHED = "TIGON_LAUNCHED"  # in the environment of ranks: the process that repeats their errors


def is_launched() -> bool:
    """Returns whether --nproc or torchrun has started this process."""
    return "WORLD_SIZE" in os.environ


def count_ranks() -> int:
    """Returns the number of processes that a launcher has started, or 1 without one; raises
    ValueError for a WORLD_SIZE that is no such number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        advice = "unset it to run on one process, or start with torchrun"
        raise ValueError(f"WORLD_SIZE={quote(text)} is no number of processes: {advice}")
    return int(text)


def launcher_repeats_errors() -> bool:
    """Returns whether the process that started this one prints its error; one that a rank or a
    shell has only passed the variable on to prints its own."""
    return os.environ.get(LAUNCHED) == str(os.getppid())


def record_error(text: str) -> None:
    """Writes the error file of this rank, whose text the agent's summary repeats.

    The agent may end the rank meanwhile, and fails of half a file.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message, part = {"message": text, "timestamp": int(time.time())}, f"{path}.part"
        with suppress(OSError):
            Path(part).write_text(json.dumps(message))
            os.replace(part, path)
