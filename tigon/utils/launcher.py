"""What a launcher, torchrun or --nproc, and its ranks tell each other: variables, error files."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

LAUNCHED = "TIGON_LAUNCHED"  # in the environment of ranks whose launcher repeats their errors


def launched() -> bool:
    """Returns whether --nproc or torchrun has started this process."""
    return "WORLD_SIZE" in os.environ


def record_error(text: str) -> None:
    """Writes the error file of this rank, whose text the agent's summary repeats.

    The agent may end the rank meanwhile, and fails of half a file.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message, part = {"message": text, "timestamp": int(time.time())}, f"{path}.part"
        with suppress(OSError):
            Path(part).write_text(json.dumps(message))
            os.replace(part, path)
