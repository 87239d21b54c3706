"""Reads the files of a tokenizer, and writes them to checkpoints and exports."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import tokenizers
from tokenizers import AddedToken

from tigon.hub import Repository, adapter_hint
from tigon.utils.json import escape, parse_object, quote, read_bytes, read_json

MAX_TOKENIZER_BYTES = 2**26  # of a tokenizer.json; the largest that are known have 35 MB
MAX_TEMPLATE_BYTES = 2**20
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
)
_TEMPLATES = "additional_chat_templates"
_ID = re.compile(r"[0-9]{1,9}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN_KEYS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_TYPES: dict[str, tuple[type, ...]] = {
    "chat_template": (str, list),
    "split_special_tokens": (bool,),
    "model_max_length": (int, float),
    "added_tokens_decoder": (dict,),
    "extra_special_tokens": (list, dict),
    "additional_special_tokens": (list, dict),
}


def find_files(repository: Repository) -> dict[str, Path]:
    """All files of the tokenizer by name, also those that are only copied by an export."""
    if repository.optional_file("tokenizer.json") is None:
        names = repository.listing()
        if "adapter_config.json" in names and "config.json" not in names:
            hint = adapter_hint(repository.name)
            raise FileNotFoundError(f"{repository.name} has no tokenizer.json; {hint}")
        related = [n for n in names if re.search(r"token|tekken|vocab|merges|\.model", n)]
        only = f", only {', '.join(related)}" if related else ""
        raise FileNotFoundError(
            f"{repository.name} has no tokenizer.json{only}: "
            "make one with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    files = {name: path for name in _FILES if (path := repository.optional_file(name))}
    if "chat_template.jinja" in files or repository.directory is not None:
        templates = [n for n in repository.listing(_TEMPLATES) if n.endswith(".jinja")]
        files |= {name: repository.file(name) for name in templates}
    return files


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json; ValueError that names the file if the library fails."""
    try:
        text = read_bytes(path, MAX_TOKENIZER_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{escape(path)} is not UTF-8 text: {error.reason}") from None
    # The assistant mask needs offsets that cover every character; ids do not depend on this
    text = re.sub(r'("trim_offsets"\s*:\s*)true', r"\1false", text)
    with library_errors(f"{escape(path)} is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    return backend


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise what the tokenizers library raises as a ValueError that begins with `message`.

    Its errors are plain Exceptions; a panic of its Rust code is a BaseException.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {escape(error)}") from None


def read_config(path: Path | None) -> dict[str, Any]:
    """The object of a JSON file; ValueError for values of wrong types among those in use."""
    if path is None:
        return {}
    config = read_json(path)
    for key, types in _TYPES.items():
        if not isinstance(config.get(key), (*types, type(None))):
            raise _wrong_value(path, key, config[key])
    for key, token in config.items():
        if key in _TOKEN_KEYS or (key.endswith("_token") and isinstance(token, dict)):
            _check_token(path, key, token)
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens = config.get(key) or []
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            _check_token(path, key, token)
        if isinstance(tokens, list) and None in tokens:
            raise _wrong_value(path, key, tokens)
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if not _ID.fullmatch(number) or not isinstance(token, dict):
            raise _wrong_value(path, f"added_tokens_decoder.{escape(number, 100)}", token)
        _check_token(path, f"added_tokens_decoder.{number}", token)
    templates = config.get("chat_template")
    for template in templates if isinstance(templates, list) else []:
        entry = template if isinstance(template, dict) else {}
        if not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise _wrong_value(path, "chat_template", template)
    length = config.get("model_max_length")
    if length is not None and (isinstance(length, bool) or length < 0):
        raise _wrong_value(path, "model_max_length", length)
    return config


def _wrong_value(path: Path, key: str, value: Any) -> ValueError:
    return ValueError(f"{escape(path)}: {key} is {quote(value)}, which no tokenizer can have there")


def _check_token(path: Path, key: str, token: Any) -> None:
    """ValueError for what is neither a token's text nor an object of it and its flags."""
    if token is None or isinstance(token, str):
        return
    flags = [token.get(flag, False) for flag in _FLAGS] if isinstance(token, dict) else [None]
    if not all(isinstance(flag, bool) for flag in flags) or not isinstance(
        token.get("content"), str
    ):
        raise _wrong_value(path, key, token)


def add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], files: dict[str, Path]
) -> dict[str, str]:
    """Add the tokens that tokenizer.json lacks; returns the special ones ({"bos_token": "<s>"}).

    Where the files differ, the same one counts as in transformers 5.
    """
    # Not add_bos_token and add_eos_token: beside a tokenizer.json its post-processor decides
    settings, declared = config, config.get("added_tokens_decoder")
    if declared is None:
        settings = config | read_config(files.get("special_tokens_map.json"))
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = settings | (extra if isinstance(extra, dict) else {})
    named = {
        key: _added_token(value)
        for key, value in named.items()
        if key.endswith("_token") and isinstance(value, (str, dict))
    }
    special = {token.content for token in named.values()}

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    if declared is None:
        ids = _read_ids(files.get("added_tokens.json"))
        legacy = sorted(ids.keys() - known, key=ids.__getitem__)
        new = [AddedToken(content, special=content in special) for content in legacy]
    else:
        new = [_added_token(declared[i]) for i in sorted(declared, key=int)]
    known |= {token.content for token in new}
    extra_tokens = map(_added_token, extra if isinstance(extra, list) else [])
    new += [token for token in (*named.values(), *extra_tokens) if token.content not in known]
    for token in new:
        token.special = token.special or token.content in special
    with library_errors(f"{escape(files['tokenizer.json'])}: the tokenizer failed"):
        backend.add_tokens(new)
    return {key: token.content for key, token in named.items()}


def _read_ids(path: Path | None) -> dict[str, int]:
    ids = {} if path is None else read_json(path)
    for token, number in ids.items():
        if type(number) is not int:
            raise _wrong_value(path or Path(), escape(token, 100), number)
    return ids


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: value[key] for key in _FLAGS if key in value}
    return AddedToken(value["content"], **{"special": True, **flags})


def read_templates(config: dict[str, Any], files: dict[str, Path]) -> str | dict[str, str] | None:
    """The chat template, or several by name; files win over tokenizer_config.json."""
    templates = {
        "default" if name == "chat_template.jinja" else path.stem: read_template(path)
        for name, path in files.items()
        if name.endswith(".jinja")
    }
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def read_template(path: Path) -> str:
    """The text of a Jinja file."""
    try:
        text = read_bytes(path, MAX_TEMPLATE_BYTES).decode()
    except FileNotFoundError:
        raise FileNotFoundError(f"no chat template {escape(path)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{escape(path)} is not UTF-8 text: {error.reason}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


class TokenizerFiles:
    """The files that a tokenizer came from, by name, to be copied into exports."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        # Where links lead now: what an export copies hours later is what was checked and read
        self.paths = {name: Path(os.path.realpath(path)) for name, path in paths.items()}
        self._contents: dict[Path, bytes] = {}

    def read_all(self) -> None:
        """Read all into memory, for a `save` when they are gone."""
        for path in self.paths.values():
            with _open(path) as file:
                self._contents[path] = file.read()

    def use_template(self, path: str | os.PathLike[str]) -> None:
        """Replace all template files by this one."""
        kept = {name: file for name, file in self.paths.items() if not name.endswith(".jinja")}
        self.paths = kept | {"chat_template.jinja": Path(os.path.realpath(path))}

    def save(
        self,
        directory: str | os.PathLike[str],
        special_tokens: dict[str, str],
        added_tokens: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Copy the files byte for byte, but for those that list changed tokens.

        `special_tokens` are those that have changed; `added_tokens` all of them, as tokenizer.json
        lists them, if there are new ones.
        """
        edits = self._edits(special_tokens, added_tokens)
        for name in dict.fromkeys([*self.paths, *edits]):
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            partial.unlink(missing_ok=True)  # never written through, should it be a link
            with partial.open("wb") as write:
                if name in edits:
                    write.write(json.dumps(edits[name], indent=2, ensure_ascii=False).encode())
                else:
                    with self._open(self.paths[name]) as read:
                        shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            partial.replace(target)

    def _edits(
        self, special_tokens: dict[str, str], added_tokens: Sequence[dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """The new content of files that list changed tokens, by name."""
        config, edits = self._read_json("tokenizer_config.json") | special_tokens, {}
        if special_tokens and "special_tokens_map.json" in self.paths:
            tokens = self._read_json("special_tokens_map.json")
            edits["special_tokens_map.json"] = tokens | special_tokens
        if added_tokens and "tokenizer.json" in self.paths:
            with self._open(self.paths["tokenizer.json"]) as file:
                edits["tokenizer.json"] = json.load(file) | {"added_tokens": added_tokens}
        if added_tokens and config.get("added_tokens_decoder") is not None:  # of transformers 4
            config["added_tokens_decoder"] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in added_tokens
            }
        if added_tokens and "added_tokens.json" in self.paths:
            ids = {token["content"]: token["id"] for token in added_tokens}
            edits["added_tokens.json"] = self._read_json("added_tokens.json") | ids
        if special_tokens or (added_tokens and "tokenizer_config.json" in self.paths):
            edits["tokenizer_config.json"] = config
        return edits

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self.paths:
            return {}
        with self._open(self.paths[name]) as file:
            return parse_object(file.read(), self.paths[name])

    def _open(self, path: Path) -> IO[bytes]:
        return BytesIO(self._contents[path]) if path in self._contents else _open(path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_contents": {}}  # worker processes save nothing


def _open(path: Path) -> IO[bytes]:
    """Open a file that was not replaced by a link or a pipe."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))
