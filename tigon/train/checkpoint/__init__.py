"""Checkpoints of a run: weights, optimizer states and the step; whole or absent, checked when read.

No file of a checkpoint is unpickled or run. torch.distributed.checkpoint plans what each rank
writes and reads; docs/training.md has the format.
"""

from tigon.train.checkpoint.files import (
    KeepPolicy,
    clean,
    latest,
    newest_complete,
    read_lock,
    read_metadata,
    step_of,
    verify,
)
from tigon.train.checkpoint.reading import load, stored_weights
from tigon.train.checkpoint.saver import (
    BackgroundWriter,
    SaveError,
    Saver,
    check_finite,
    fits_in_memory,
    has_failed,
)

__all__ = [
    "BackgroundWriter",
    "KeepPolicy",
    "SaveError",
    "Saver",
    "check_finite",
    "clean",
    "fits_in_memory",
    "has_failed",
    "latest",
    "load",
    "newest_complete",
    "read_lock",
    "read_metadata",
    "step_of",
    "stored_weights",
    "verify",
]
