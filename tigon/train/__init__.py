"""Training: `python -m tigon.train config.yaml key=value`, or the same under torchrun."""

from tigon.train.config import Config, load
from tigon.train.launch import launch, main

__all__ = ["Config", "launch", "load", "main"]
