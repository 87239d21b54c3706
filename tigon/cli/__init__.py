"""The command line: `tigon generate`, `chat`, `train`, `export` and the rest."""

from tigon.cli.main import main

__all__ = ["main"]
