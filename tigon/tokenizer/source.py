"""Read a tokenizer from the files of a repository."""

import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tigon.hub import Repository, adapter_hint
from tigon.tokenizer.failures import Failures
from tigon.utils.json import escape, quote, read_bytes, read_json

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
MOST_TEMPLATE = 2**20  # bytes of a file
_ID = re.compile(r"[0-9]{1,9}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "chat_template": (str, list, _NONE),
    "split_special_tokens": (bool, _NONE),
    "model_max_length": (int, float, _NONE),
    "added_tokens_decoder": (dict, _NONE),
    "extra_special_tokens": (list, dict, _NONE),
    "additional_special_tokens": (list, dict, _NONE),
}


def find_files(repository: Repository) -> dict[str, Path]:
    """All of the tokenizer's files by name, also those that only an export copies."""
    if repository.optional_file("tokenizer.json") is None:
        names = repository.listing()
        if "adapter_config.json" in names and "config.json" not in names:
            hint = adapter_hint(repository.name)
            raise FileNotFoundError(f"{repository.name} has no tokenizer.json; {hint}")
        kin = [n for n in names if re.search(r"token|tekken|vocab|merges|\.model", n)]
        only = f", only {', '.join(kin)}" if kin else ""
        raise FileNotFoundError(
            f"{repository.name} has no tokenizer.json{only}: "
            "make one with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    files = {name: path for name in _FILES if (path := repository.optional_file(name))}
    if "chat_template.jinja" in files or repository.directory is not None:
        others = [n for n in repository.listing(_TEMPLATES) if n.endswith(".jinja")]
        files |= {name: repository.file(name) for name in others}
    return files


def read_config(path: Path | None) -> dict[str, Any]:
    """The object of a JSON file, with the types that are read of it."""
    if path is None:
        return {}
    config = read_json(path)
    for key, kinds in _KINDS.items():
        if not isinstance(config.get(key), kinds):
            raise _wrong(path, key, config[key])
    for key, token in config.items():
        # Of the names that this library knows none has another type; others may be anything else
        if key in _NAMED or (key.endswith("_token") and isinstance(token, dict)):
            _check_token(path, key, token)
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens = config.get(key) or []
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            _check_token(path, key, token)
        if isinstance(tokens, list) and None in tokens:
            raise _wrong(path, key, tokens)
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if not _ID.fullmatch(number) or not isinstance(token, dict):
            raise _wrong(path, f"added_tokens_decoder.{escape(number, 100)}", token)
        _check_token(path, f"added_tokens_decoder.{number}", token)
    templates = config.get("chat_template")
    for template in templates if isinstance(templates, list) else []:
        named = isinstance(template, dict) and (template.get("name"), template.get("template"))
        if not named or not all(isinstance(text, str) for text in named):
            raise _wrong(path, "chat_template", template)
    return config


def read_length(config: dict[str, Any], files: dict[str, Path]) -> int | None:
    """model_max_length, None where there is none."""
    length = config.get("model_max_length")
    if length is not None and (isinstance(length, bool) or length < 0):
        raise _wrong(files["tokenizer_config.json"], "model_max_length", length)
    return int(length) if length else None


def _wrong(path: Path, key: str, value: Any) -> ValueError:
    return ValueError(f"{escape(path)}: {key} is {quote(value)}, which no tokenizer can have there")


def _check_token(path: Path, key: str, token: Any) -> None:
    """ValueError for what is neither a token's text nor an object of it and its flags."""
    if token is None or isinstance(token, str):
        return
    flags = [token.get(flag, False) for flag in _FLAGS] if isinstance(token, dict) else [None]
    if not all(isinstance(flag, bool) for flag in flags) or not isinstance(
        token.get("content"), str
    ):
        raise _wrong(path, key, token)


def add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], files: dict[str, Path]
) -> dict[str, str]:
    """Adds the tokens that tokenizer.json lacks; the special tokens by name ("bos_token": "<s>").

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
    others = [*named.values(), *map(_added_token, extra if isinstance(extra, list) else [])]
    new += [token for token in others if token.content not in known]
    for token in new:
        token.special = token.special or token.content in special
    with Failures(files.get("tokenizer.json")):
        backend.add_tokens(new)
    return {key: token.content for key, token in named.items()}


def _read_ids(path: Path | None) -> dict[str, int]:
    ids = {} if path is None else read_json(path)
    for token, number in ids.items():
        if type(number) is not int:
            raise _wrong(path or Path(), escape(token, 100), number)
    return ids


def read_templates(config: dict[str, Any], files: dict[str, Path]) -> str | dict[str, str] | None:
    """The chat template, or several by name; files win over tokenizer_config.json."""
    found = {
        "default" if name == "chat_template.jinja" else path.stem: read_template(path)
        for name, path in files.items()
        if name.endswith(".jinja")
    }
    if found:
        return found["default"] if found.keys() == {"default"} else found
    template = config.get("chat_template")
    if isinstance(template, list):
        return {one["name"]: one["template"] for one in template}
    return template


def read_template(path: Path) -> str:
    """The text of a Jinja file."""
    try:
        return read_bytes(path, MOST_TEMPLATE).decode().replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"no chat template {escape(path)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{escape(path)} is not UTF-8 text: {error.reason}") from None


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    given = {key: value[key] for key in _FLAGS if key in value}
    return AddedToken(value["content"], **{"special": True, **given})
