"""Checkpoints of a run: weights, optimizer states and the step; complete or absent, and verified.

No file of a checkpoint is unpickled or run. Each rank reads its rows as it reads those of a Hugging
Face checkpoint; docs/checkpoints.md has the format.
"""

from tigon.train.checkpoint.files import (
    KeepPolicy,
    latest,
    newest_complete,
    read_metadata,
    step_of,
    verify,
)
from tigon.train.checkpoint.reading import BEGIN_AGAIN, load, stored_weights
from tigon.train.checkpoint.saver import (
    BackgroundWriter,
    SaveError,
    Saver,
    check_finite,
    fits_in_memory,
)

__all__ = [
    "BEGIN_AGAIN", "BackgroundWriter", "KeepPolicy", "SaveError", "Saver", "check_finite",
    "fits_in_memory", "latest", "load", "newest_complete", "read_metadata", "step_of",
    "stored_weights", "verify",
]  # fmt: skip
