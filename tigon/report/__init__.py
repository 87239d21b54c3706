"""A run's page for people: report.html, of the files in a run directory. Imports no torch."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tigon.report.figures import duration as format_duration
from tigon.report.page import page
from tigon.report.read import RunFiles, read

__all__ = ["attempt", "is_due", "write"]


def write(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of one run, or of several side by side, and return its path.

    By default it is report.html in the run's directory; of several, comparison.html in the first
    one's. It is there whole or not at all, and loads nothing from anywhere. Raises ValueError for a
    directory without a run, and FileNotFoundError where there is no directory.
    """
    return _write([read(Path(run)) for run in runs], out)


def _write(found: Sequence[RunFiles], out: str | Path | None = None) -> Path:
    if not found:
        raise ValueError("give at least one run directory")
    name = "report.html" if len(found) == 1 else "comparison.html"
    path = found[0].path / name if out is None else Path(os.path.realpath(out))
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a link to {os.readlink(path)}, which is not written: remove the link, or "
            "name another file (--out)"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no directory {path.parent} for {path.name}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file, such as {path / name}")
    _replace(path, page(found))
    return path


def attempt(run: Path) -> str:
    """The page of a run that ends: a line that says where it is, or why there is none."""
    try:
        found = read(run)
        found.running = False  # though it still holds its directory
        return f"report: {_write([found])}"
    except Exception as error:  # no page is worth a run
        return f"no report: {type(error).__name__}: {error}"


def is_due(run: Path) -> bool:
    """Whether a run that has ended lacks its page: it was killed before that, or while writing."""
    page, rows = run / "report.html", run / "metrics.jsonl"
    try:
        return not page.exists() or page.stat().st_mtime_ns < rows.stat().st_mtime_ns
    except OSError:
        return False


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
