"""Checkpoints of a run: weights, optimizer states and the step; whole or absent, checked when read.

No file of a checkpoint is unpickled or run. torch.distributed.checkpoint plans what each rank
writes and reads; docs/training.md has the format.
"""

from tigon.train.checkpoint.files import (
    Keep,
    clean,
    in_use,
    latest,
    newest_whole,
    read_metadata,
    step_of,
    verify,
)
from tigon.train.checkpoint.reading import load, stored_weights
from tigon.train.checkpoint.saver import (
    InBackground,
    SaveError,
    Saver,
    check_finite,
    fits,
    has_failed,
)

__all__ = [
    "InBackground",
    "Keep",
    "SaveError",
    "Saver",
    "check_finite",
    "clean",
    "fits",
    "has_failed",
    "in_use",
    "latest",
    "load",
    "newest_whole",
    "read_metadata",
    "step_of",
    "stored_weights",
    "verify",
]
