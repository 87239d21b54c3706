"""The page of a run, report.html, made from the files in its directory without torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from tigon.report.page import format_duration, render_page
from tigon.report.read import read
from tigon.utils.paths import write_text

__all__ = ["format_duration", "lacks_page", "write", "write_or_explain"]


def write(
    runs: Sequence[str | Path], out: str | Path | None = None, *, ended: bool = False
) -> Path:
    """Writes the page of one run, or of several compared, and returns its path.

    By default it is report.html in the run's directory, or comparison.html in the first one's. It
    is written whole or not at all. `ended`: the run, whose directory is still locked, has ended.
    Raises ValueError for a directory without a run, FileNotFoundError for a missing directory.
    """
    if not runs:
        raise ValueError("give at least one run directory")
    results = [read(Path(run)) for run in runs]
    results[0].running &= not ended
    name = "report.html" if len(results) == 1 else "comparison.html"
    path = results[0].path / name if out is None else Path(os.path.realpath(out))
    if path.is_symlink():
        raise FileExistsError(
            f"{path} is a link to {os.readlink(path)}, which is not written: remove the link, or "
            "name another file (--out)"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no directory {path.parent} for {path.name}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file, such as {path / name}")
    page = render_page(results)
    try:
        write_text(path, page)
    except PermissionError as error:
        text = f"{path} cannot be written: {error.strerror}; name another file (--out)"
        raise PermissionError(text) from None
    return path


def write_or_explain(run: Path) -> str:
    """Writes the page of a run that ends; returns a line with its path, or why there is none."""
    try:
        return f"report: {write([run], ended=True)}"
    except Exception as error:  # no page is worth a run
        return f"no report: {type(error).__name__}: {error}"


def lacks_page(run: Path) -> bool:
    """Returns whether report.html is missing or older than metrics.jsonl, as where a run was killed
    before it wrote its page; False without metrics.jsonl but with a page."""
    page, rows = run / "report.html", run / "metrics.jsonl"
    try:
        return not page.exists() or page.stat().st_mtime_ns < rows.stat().st_mtime_ns
    except OSError:
        return False
