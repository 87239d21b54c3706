"""Where config.json is, and what may be meant where there is none."""

from collections.abc import Iterable
from pathlib import Path

from tigon.hub.folders import adapter_hint
from tigon.hub.repository import Repository
from tigon.utils.json import quote


def config_file(repository: Repository) -> Path:
    """config.json; the FileNotFoundError where there is none says what else may be meant."""
    try:
        return repository.file("config.json")
    except FileNotFoundError as error:
        directory = repository.directory
        if directory is not None and (directory / "hf" / "config.json").is_file():
            raise FileNotFoundError(
                f"{error}; if it is a run, its export is {directory}/hf"
            ) from error
        names = repository.listing()
        if (adapter := _adapter(repository, names)) is not None:
            raise FileNotFoundError(f"{error}; {adapter_hint(adapter)}") from error
        ggufs = [name for name in names if name.endswith(".gguf")]
        if not ggufs:
            raise
        raise FileNotFoundError(
            f"{error}; for a GGUF file there pass its name, gguf_file={quote(ggufs[0])}, or in the "
            "shell the path of a file that was downloaded"
        ) from error


def _adapter(repository: Repository, names: Iterable[str]) -> str | None:
    """The repository, or the `adapter` of a run, if it holds PEFT's files; else None."""
    if "adapter_config.json" in names:
        return repository.name
    inside = repository.directory and repository.directory / "adapter"
    return str(inside) if inside and (inside / "adapter_config.json").is_file() else None
