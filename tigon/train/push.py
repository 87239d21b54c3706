"""Exports to the hub, with a model card of the run that they are from."""

import math
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tigon.hub import (
    CARD,
    MAX_CARD,
    UploadTarget,
    contains_file,
    escape_markdown,
    has_token,
    list_export,
    usage_section,
    write_card,
)
from tigon.json_file import read_bytes, read_json
from tigon.train.card import is_run, run_card, run_of
from tigon.train.config import Config
from tigon.weights import read_header


def push(
    source: Path,
    repository: str,
    *,
    message: str | None = None,
    overwrite_card: bool = False,
    **destination: Any,
) -> str:
    """Upload an exported model, or a run's last export; returns where it is on the hub.

    `destination`: private, revision, token and create_pr of `Destination`.
    """
    folder = _export_of(source)
    list_export(folder)  # an error before the repository is made
    to = UploadTarget(repository, **destination)
    card = _card(folder, to)
    return to.upload(folder, card=card, message=message, overwrite_card=overwrite_card)


def attempt(config: Config) -> str:
    """Push the last export of a run that ends: a line that says where it is, or how to push it."""
    try:
        where = push(Path(config.run_dir), config.push_to_hub, private=config.push_private)
        return f"pushed to {where}"
    except Exception as error:  # no push is worth a run
        private = " --private" * bool(config.push_private)
        return (
            f"not pushed: {' '.join(str(error).split())}\n"
            f"  {config.run_dir}/hf is whole; to push it: "
            f"tigon push {config.run_dir} {config.push_to_hub}{private}"
        )


def without_token(config: Config) -> bool:
    return bool(config.push_to_hub) and not has_token()


def _export_of(source: Path) -> Path:
    if not is_run(source):
        return source
    if (source / "hf").is_symlink():
        raise FileNotFoundError(
            f"{source}/hf is a link to {os.readlink(source / 'hf')}: if that is the export that "
            "you mean, name it in place of the run"
        )
    if not (source / "hf").is_dir():
        raise FileNotFoundError(
            f"{source} has no export: `tigon export {source} DIRECTORY` makes one of its newest "
            "checkpoint, which `tigon push DIRECTORY` takes"
        )
    return source / "hf"


def _card(folder: Path, to: UploadTarget) -> str:
    if contains_file(folder, CARD):
        return read_bytes(folder / CARD, MAX_CARD).decode(errors="replace")
    if run := run_of(folder):
        return run_card(run, folder, to.name, _version(), to.is_public)
    config = read_json(folder / "config.json")
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    count = sum(math.prod(info.shape) for header in headers for info in header.values())
    kind = config.get("model_type")
    about = (
        f"A {escape_markdown(kind)} model with {count:,} parameters in its files, saved by Tigon."
    )
    return write_card(
        [f"# {escape_markdown(to.name.split('/')[-1])}", about, usage_section(to.name)],
        tags=[kind] if isinstance(kind, str) else [],
    )


def _version() -> str:
    try:
        return version("tigon")
    except PackageNotFoundError:  # a source tree that was not installed
        return "from source"
