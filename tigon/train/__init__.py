"""Training: `tigon train config.yaml key=value`, on one process or on many ranks."""

from tigon.settings.config import Config
from tigon.settings.load import load
from tigon.train.build import prepare
from tigon.train.data_commands import pack, preview
from tigon.train.distributed import start
from tigon.train.launch import launch, main
from tigon.train.trainer import train

__all__ = ["Config", "launch", "load", "main", "pack", "prepare", "preview", "start", "train"]
