"""What the scripts in bench/ share: where the repository is, and the stamp on a result."""

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tigon

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def stamp(*sources: str, described: str | None = None) -> dict[str, Any]:
    """When, of which commit, and with which versions; changes outside `sources` do not count.

    A copy without its git directory does not know: there, what `git describe --always --dirty`
    said where it was made.
    """
    changes = bool(git("status", "--porcelain", "--", *sources))
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if described is not None:
        commit, changes = described.removesuffix("-dirty"), described.endswith("-dirty")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "uncommitted_changes": changes,
        "python": platform.python_version(),
        "tigon": tigon.__version__,
        "torch": torch.__version__,
    }


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is cut off while it writes loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    half.replace(path)
