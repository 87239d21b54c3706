"""Training: `python -m tigon.train config.yaml key=value`, or the same under torchrun."""

from tigon.train.build import prepare
from tigon.train.config import Config
from tigon.train.config_file import load
from tigon.train.data_commands import pack, preview
from tigon.train.distributed import start
from tigon.train.launch import launch, main
from tigon.train.trainer import train

__all__ = ["Config", "launch", "load", "main", "pack", "prepare", "preview", "start", "train"]
