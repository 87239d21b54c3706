"""The files of a tokenizer, which a checkpoint or an export gets again."""

import json
import os
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from tigon.json_file import parse_object


class Files:
    """Files by their names, such as tokenizer.json."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        # Where links lead now: what an export copies hours later is what was checked and read
        self.paths = {name: Path(os.path.realpath(path)) for name, path in paths.items()}
        self._kept: dict[Path, bytes] = {}

    def keep(self) -> None:
        """Read all into memory, for a `save` when they are gone."""
        for path in self.paths.values():
            with _open(path) as file:
                self._kept[path] = file.read()

    def use_template(self, path: str | os.PathLike[str]) -> None:
        """In place of all templates that have a file of their own."""
        others = {name: file for name, file in self.paths.items() if not name.endswith(".jinja")}
        self.paths = others | {"chat_template.jinja": Path(os.path.realpath(path))}

    def save(self, directory: str | os.PathLike[str], changed: dict[str, str]) -> None:
        """Byte for byte, but with `changed` in the files that name special tokens."""
        for name in dict.fromkeys([*self.paths, *(["tokenizer_config.json"] if changed else [])]):
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            partial.unlink(missing_ok=True)  # never written through, should it be a link
            with partial.open("wb") as write:
                if changed and name in ("tokenizer_config.json", "special_tokens_map.json"):
                    config = self._config(name) | changed
                    write.write(json.dumps(config, indent=2, ensure_ascii=False).encode())
                else:
                    with self._read(self.paths[name]) as read:
                        shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            partial.replace(target)

    def _config(self, name: str) -> dict[str, Any]:
        if name not in self.paths:
            return {}
        with self._read(self.paths[name]) as file:
            return parse_object(file.read(), self.paths[name])

    def _read(self, path: Path) -> IO[bytes]:
        return BytesIO(self._kept[path]) if path in self._kept else _open(path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}  # worker processes save nothing


def _open(path: Path) -> IO[bytes]:
    return open(path, "rb", opener=_no_link)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
