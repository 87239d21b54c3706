"""Reads the files of a tokenizer, and writes them to checkpoints and exports."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import tokenizers
from tokenizers import AddedToken

from tigon.hub import Repository, adapter_hint
from tigon.utils.json import escape, parse_object, quote, read_bytes, read_json
from tigon.utils.paths import new_file

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


def find_files(repository: Repository) -> dict[str, Path]:
    """Finds all files of a tokenizer, by name, also those that an export only copies."""
    if repository.optional_file("tokenizer.json") is None:
        names = repository.listing()
        if repository.directory is None and not names:
            repository.file("tokenizer.json")  # raises, and says why there is nothing
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
    """Reads a tokenizer.json; ValueError that names the file if the library refuses it."""
    text = _read_text(path, MAX_TOKENIZER_BYTES)
    # The assistant mask needs offsets that cover every character; ids do not depend on this
    text = re.sub(r'("trim_offsets"\s*:\s*)true', r"\1false", text)
    with library_errors(f"{escape(path)} is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    return backend


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turns errors of the tokenizers library into a ValueError that begins with `message`.

    The library raises plain Exceptions, and for a panic of its Rust code a BaseException.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {escape(error)}") from None


def _is_token(value: Any) -> bool:
    """Whether a JSON value is the text of a token, or an object with its text and flags."""
    if not isinstance(value, dict):
        return isinstance(value, str)
    flags = [value.get(flag, False) for flag in _FLAGS]
    return isinstance(value.get("content"), str) and all(isinstance(flag, bool) for flag in flags)


def _are_tokens(value: Any) -> bool:
    """Whether a JSON value is a list of tokens, or an object of them whose values may be null."""
    if isinstance(value, dict):
        return all(token is None or _is_token(token) for token in value.values())
    return isinstance(value, list) and all(map(_is_token, value))


def _are_tokens_by_id(value: Any) -> bool:
    """Whether a JSON value is an object that maps ids, as text, to objects of tokens."""
    return isinstance(value, dict) and all(
        _ID.fullmatch(number) and isinstance(token, dict) and _is_token(token)
        for number, token in value.items()
    )


def _is_template(value: Any) -> bool:
    """Whether a JSON value is a chat template, or a list of templates with their names."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "chat_template": _is_template,
    "split_special_tokens": lambda value: isinstance(value, bool),
    "model_max_length": lambda value: type(value) in (int, float) and value >= 0,
    "added_tokens_decoder": _are_tokens_by_id,
    "extra_special_tokens": _are_tokens,
    "additional_special_tokens": _are_tokens,
} | {f"{name}_token": _is_token for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


def read_config(path: Path | None) -> dict[str, Any]:
    """Reads the object of a JSON file, and raises ValueError for a value of the wrong type.

    Keys that this package does not use may have any value.
    """
    if path is None:
        return {}
    config = read_json(path)
    for key, value in config.items():
        is_token = key.endswith("_token") and isinstance(value, dict)
        check = _CHECKS.get(key, _is_token if is_token else None)
        if check is not None and value is not None and not check(value):
            raise _wrong_value(path, key, value)
    return config


def _wrong_value(path: Path, key: str, value: Any) -> ValueError:
    """Makes the error for a value of the wrong type in a file."""
    name = escape(key, 100)
    return ValueError(f"{escape(path)}: {name} is {quote(value)}, which no tokenizer has")


def add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], files: dict[str, Path]
) -> dict[str, str]:
    """Adds the tokens that other files list and tokenizer.json lacks to the backend.

    Returns the special tokens by name ({"bos_token": "<s>"}). Where the files differ, the same file
    counts as in transformers 5.
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
        ids = {}
        if path := files.get("added_tokens.json"):
            ids = read_json(path)
            if bad := [content for content in ids if type(ids[content]) is not int]:
                raise _wrong_value(path, bad[0], ids[bad[0]])
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


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    """Makes an AddedToken of text, or of text with flags; special unless they say otherwise."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: value[key] for key in _FLAGS if key in value}
    return AddedToken(value["content"], **{"special": True, **flags})


def read_templates(config: dict[str, Any], files: dict[str, Path]) -> str | dict[str, str] | None:
    """Reads the chat template, or several by name; files win over tokenizer_config.json."""
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
    """Reads a Jinja file, with \\n for all newlines, as in transformers."""
    try:
        text = _read_text(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        advice = "name a Jinja file, or none for the tokenizer's own"
        raise FileNotFoundError(f"no chat template {escape(path)}: {advice}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_text(path: Path, max_bytes: int) -> str:
    """Reads a text file; ValueError if it has more than `max_bytes` or is not UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{escape(path)} is not UTF-8 text: {error.reason}") from None


class TokenizerFiles:
    """The files that a tokenizer came from, by name, to be copied into exports."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        # Where links lead now: what an export copies hours later is what was checked and read
        self.paths = {name: Path(os.path.realpath(path)) for name, path in paths.items()}
        self._contents: dict[Path, bytes] = {}

    def read_all(self) -> None:
        """Reads all files into memory, so that `save` works after they are deleted."""
        for path in self.paths.values():
            with _open(path) as file:
                self._contents[path] = file.read()

    def use_template(self, path: str | os.PathLike[str]) -> None:
        """Replaces all template files by one Jinja file."""
        other = {name: file for name, file in self.paths.items() if not name.endswith(".jinja")}
        self.paths = other | {"chat_template.jinja": Path(os.path.realpath(path))}

    def save(
        self,
        directory: str | os.PathLike[str],
        special_tokens: dict[str, str],
        added_tokens: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Writes the files to a directory: copies, but for those that list changed tokens.

        `special_tokens` are the changed ones. `added_tokens` is empty without new tokens; with
        new ones it has all added tokens, old and new, as tokenizer.json lists them.
        """
        edits = self._edits(special_tokens, added_tokens)
        for name in dict.fromkeys([*self.paths, *edits]):
            target = Path(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_file(target) as temporary, temporary.open("xb") as write:
                if name in edits:
                    write.write(json.dumps(edits[name], indent=2, ensure_ascii=False).encode())
                else:
                    with self._open(self.paths[name]) as read:
                        shutil.copyfileobj(read, write)

    def _edits(
        self, special_tokens: dict[str, str], added_tokens: Sequence[dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Returns the new content of the files that list changed tokens, by name."""
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
        """Reads the object of one of the files; {} if there is no such file."""
        if name not in self.paths:
            return {}
        with self._open(self.paths[name]) as file:
            return parse_object(file.read(), self.paths[name])

    def _open(self, path: Path) -> IO[bytes]:
        """Opens a file for reading, from memory if `read_all` has read it."""
        return BytesIO(self._contents[path]) if path in self._contents else _open(path)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_contents": {}}  # worker processes save nothing


def _open(path: Path) -> IO[bytes]:
    """Opens a file for reading; OSError if it was replaced by a link, and a pipe does not block."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))
