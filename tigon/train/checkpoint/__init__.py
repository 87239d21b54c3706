"""Checkpoints of a run: weights, optimizer states and the step; whole or absent, checked when read.

No file of a checkpoint is unpickled or run. torch.distributed.checkpoint plans what each rank
writes and reads; docs/training.md has the format.
"""

from tigon.train.checkpoint.background import InBackground, SaveError, has_failed
from tigon.train.checkpoint.files import clean, facts, in_use, latest, step_of
from tigon.train.checkpoint.finite import check_finite
from tigon.train.checkpoint.integrity import newest_whole, verify
from tigon.train.checkpoint.memory import fits
from tigon.train.checkpoint.reading import load, stored_weights
from tigon.train.checkpoint.retention import Keep
from tigon.train.checkpoint.saver import Saver

__all__ = [
    "InBackground",
    "Keep",
    "SaveError",
    "Saver",
    "check_finite",
    "clean",
    "facts",
    "fits",
    "has_failed",
    "in_use",
    "latest",
    "load",
    "newest_whole",
    "step_of",
    "stored_weights",
    "verify",
]
