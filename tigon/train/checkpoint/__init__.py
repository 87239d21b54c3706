"""Checkpoints of a run: weights, optimizer states and the step; complete or absent, and verified.

No file of a checkpoint is unpickled or run. Each rank reads its rows as it reads those of a Hugging
Face checkpoint; docs/checkpoints.md has the format. The run's exports are written here too.
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
from tigon.train.checkpoint.saver import Exporter, SaveError, Saver, check_finite

__all__ = [
    "BEGIN_AGAIN", "Exporter", "KeepPolicy", "SaveError", "Saver", "check_finite", "latest", "load",
    "newest_complete", "read_metadata", "step_of", "stored_weights", "verify",
]  # fmt: skip
