"""Exports to the hub, with a model card of the run that they are from."""

import math
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tigon.hub import Destination, Metadata, has_token, is_own_file, write_card
from tigon.hub.card import CARD, plain, usage
from tigon.hub.upload import exported_files
from tigon.train.card import is_run, run_card, run_of
from tigon.train.config import Config
from tigon.utils.json import read_bytes, read_json
from tigon.weights import read_header

MOST_CARD = 1 << 20  # bytes


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
    exported_files(folder)  # an error before the repository is made
    to = Destination(repository, **destination)
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
            f"not pushed: {error}\n  {config.run_dir}/hf is whole; to push it: "
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


def _card(folder: Path, to: Destination) -> str:
    if is_own_file(folder, CARD):
        return read_bytes(folder / CARD, MOST_CARD).decode(errors="replace")
    if run := run_of(folder):
        return run_card(run, folder, to.name, _version(), to.has)
    config = read_json(folder / "config.json")
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    count = sum(math.prod(info.shape) for header in headers for info in header.values())
    kind = config.get("model_type")
    about = f"A {plain(kind)} model with {count:,} parameters in its files, saved by Tigon."
    return write_card(
        Metadata(tags=[kind] if isinstance(kind, str) else []),
        [f"# {plain(to.name.split('/')[-1])}", about, usage(to.name)],
    )


def _version() -> str:
    try:
        return version("tigon")
    except PackageNotFoundError:  # a source tree that was not installed
        return "from source"
