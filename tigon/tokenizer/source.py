"""Read a tokenizer from the files of a repository."""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tigon.hub import Repository

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


def find_files(repository: Repository) -> dict[str, Path]:
    """All of the tokenizer's files by name, also those that only an export copies."""
    if repository.optional_file("tokenizer.json") is None:
        kin = [
            n for n in repository.listing() if re.search(r"token|tekken|vocab|merges|\.model", n)
        ]
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
    if path is None:
        return {}
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_backend(path: Path) -> tokenizers.Tokenizer:
    # The assistant mask needs offsets that cover every character; ids do not depend on this
    text = re.sub(r'("trim_offsets"\s*:\s*)true', r"\1false", path.read_text(encoding="utf-8"))
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


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
        ids = read_config(files.get("added_tokens.json"))
        legacy = sorted(ids.keys() - known, key=ids.__getitem__)
        new = [AddedToken(content, special=content in special) for content in legacy]
    else:
        new = [_added_token(declared[i]) for i in sorted(declared, key=int)]
    known |= {token.content for token in new}
    others = [*named.values(), *map(_added_token, extra if isinstance(extra, list) else [])]
    new += [token for token in others if token.content not in known]
    for token in new:
        token.special = token.special or token.content in special
    backend.add_tokens(new)
    return {key: token.content for key, token in named.items()}


def read_templates(config: dict[str, Any], files: dict[str, Path]) -> str | dict[str, str] | None:
    """The chat template, or several by name; files win over tokenizer_config.json."""
    found = {
        "default" if name == "chat_template.jinja" else path.stem: path.read_text(encoding="utf-8")
        for name, path in files.items()
        if name.endswith(".jinja")
    }
    if found:
        return found["default"] if found.keys() == {"default"} else found
    template = config.get("chat_template")
    if isinstance(template, list):
        return {one["name"]: one["template"] for one in template}
    return template


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    given = {key: value[key] for key in flags if key in value}
    return AddedToken(value["content"], **{"special": True, **given})
