"""The files of a tokenizer, which a checkpoint or an export gets again."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from tigon.utils.json import parse_object


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

    def save(
        self,
        directory: str | os.PathLike[str],
        changed: dict[str, str],
        added: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Byte for byte, but with `changed` in the files that name special tokens, and the tokens
        `added`, as tokenizer.json has them, in those that list them."""
        edited = self._edited(changed, added)
        for name in dict.fromkeys([*self.paths, *edited]):
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            partial.unlink(missing_ok=True)  # never written through, should it be a link
            with partial.open("wb") as write:
                if name in edited:
                    write.write(json.dumps(edited[name], indent=2, ensure_ascii=False).encode())
                else:
                    with self._read(self.paths[name]) as read:
                        shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            partial.replace(target)

    def _edited(
        self, changed: dict[str, str], added: Sequence[dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What files have in place of their own content, by name."""
        config, edited = self._config("tokenizer_config.json") | changed, {}
        if changed and "special_tokens_map.json" in self.paths:
            edited["special_tokens_map.json"] = self._config("special_tokens_map.json") | changed
        if added and "tokenizer.json" in self.paths:
            with self._read(self.paths["tokenizer.json"]) as file:
                edited["tokenizer.json"] = json.load(file) | {"added_tokens": added}
        if added and config.get("added_tokens_decoder") is not None:  # transformers 4 writes it
            flags = {str(t["id"]): {k: t[k] for k in t if k != "id"} for t in added}
            config["added_tokens_decoder"] = flags
        if added and "added_tokens.json" in self.paths:
            ids = {token["content"]: token["id"] for token in added}
            edited["added_tokens.json"] = self._config("added_tokens.json") | ids
        if changed or (added and "tokenizer_config.json" in self.paths):
            edited["tokenizer_config.json"] = config
        return edited

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
