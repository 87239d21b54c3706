"""The command line: `tigon generate`, `chat`, `train`, `export` and the rest."""

from tigon.cli.main import main, run

__all__ = ["main", "run"]
