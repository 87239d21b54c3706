"""Uploads exported models to the hub, each with a card."""

import hashlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub  # whose HfApi, which only an upload needs, is slow to import
from huggingface_hub import constants, hf_hub_download

from tigon.hub import check_repository, connection_errors, contains_file
from tigon.utils.json import quote, read_bytes, read_json

CARD = "README.md"
EXPORT_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
CHAT_TEMPLATES = "additional_chat_templates"
INDEX = "model.safetensors.index.json"
MAX_CARD, MAX_INDEX = 1 << 20, 100 << 20  # bytes
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
USAGE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{0}")
tokenizer = AutoTokenizer.from_pretrained("{0}")
```

`tigon chat {0}` talks with it."""  # the section of a card
_CARD_DIGEST = re.compile(r"<!-- tigon-card ([0-9a-f]{64}) -->\s*\Z")


class UploadTarget:
    """A repository on the hub, created if need be, that an export is uploaded to.

    Args:
        private: for a repository that is created; None is the account's default.
        revision: a branch, which is created if need be.
        create_pr: whether the upload is a pull request.
    """

    def __init__(
        self,
        repository: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
    ) -> None:
        check_repository(repository)
        if create_pr and revision not in (None, "main"):
            raise ValueError(f"create_pr and revision={revision!r}: a pull request is for main")
        self.revision, self.create_pr = revision, create_pr
        self._token, self._api = token, huggingface_hub.HfApi(token=token)
        with connection_errors(f"cannot reach {constants.ENDPOINT} for {repository}"):
            created = self._api.create_repo(repository, private=private, exist_ok=True)
            self.name = created.repo_id  # with the owner
            if revision not in (None, "main") and not str(revision).startswith("refs/"):
                self._api.create_branch(self.name, branch=str(revision), exist_ok=True)

    def upload(
        self, folder: Path, *, card: str | None, message: str | None, overwrite_card: bool
    ) -> str:
        """Uploads an export in one commit; returns the URL of the repository or pull request.

        Weights of another export there are deleted. Files that the hub has are not sent again. An
        edited card there stays, with a warning, unless `overwrite_card`.
        """
        files = list_export(folder)
        with connection_errors(f"the upload to {self.name} broke"):
            current = self._api.model_info(self.name, revision=self.revision)
            names = {file.rfilename for file in current.siblings or ()}
            operations: list[Any] = [
                huggingface_hub.CommitOperationAdd(name, path) for name, path in files.items()
            ]
            if card is not None and (
                overwrite_card or CARD not in names or self._replaces_card(card, current.sha)
            ):
                operations.append(huggingface_hub.CommitOperationAdd(CARD, card.encode()))
            stale = sorted(name for name in names - files.keys() if _WEIGHTS.fullmatch(name))
            operations += [
                huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in stale
            ]
            commit = self._api.create_commit(
                self.name,
                operations,
                commit_message=message or "Upload model",
                revision=self.revision,
                create_pr=self.create_pr,
                parent_commit=current.sha,  # a change meanwhile, such as of the card, is an error
            )
        return commit.pr_url or f"{constants.ENDPOINT}/{self.name}"

    def is_public(self, repository: str, repo_type: str = "model") -> bool:
        """Whether there is such a public model or dataset; False if the hub does not answer."""
        try:
            return not self._api.repo_info(repository, repo_type=repo_type, timeout=10).private
        except Exception:  # of the hub or its HTTP client: then no link is made
            return False

    def _replaces_card(self, card: str, commit: str | None) -> bool:
        """Whether `card` replaces another one that Tigon wrote; warns about an edited one."""
        path = hf_hub_download(self.name, CARD, revision=commit, token=self._token)
        current = read_bytes(Path(path), MAX_CARD).decode(errors="replace")
        if current == card or is_generated_card(current):
            return current != card
        warnings.warn(
            f"{CARD} of {self.name} is not as Tigon wrote it, and stays; overwrite_card=True, or "
            "--overwrite-card in the shell, replaces it",
            stacklevel=3,
        )
        return False


def list_export(folder: Path) -> dict[str, Path]:
    """Returns the files of an export by name; raises FileNotFoundError if there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no directory {folder}")
    if (folder / "run.json").exists():  # has paths and the optimizer's states
        raise FileNotFoundError(
            f"{folder} is a checkpoint of a run: `tigon export {folder} DIRECTORY` makes a model "
            "of it, which `tigon push DIRECTORY` takes"
        )
    paths = sorted([*folder.iterdir(), *folder.glob(f"{CHAT_TEMPLATES}/*")])
    names = [path.relative_to(folder).as_posix() for path in paths if path.name[0] != "."]
    names = [name for name in names if name.endswith(EXPORT_SUFFIXES)]
    files = {name: folder / name for name in names if contains_file(folder, name)}
    if "config.json" not in files and "adapter_config.json" in files:
        raise FileNotFoundError(
            f"{folder} is an adapter: `hf upload OWNER/NAME {folder} .` uploads it as it is, "
            f"`tigon export {folder} DIRECTORY --merge` makes a model of it and its base"
        )
    if "config.json" not in files or not files.keys() & {"model.safetensors", INDEX}:
        raise FileNotFoundError(
            f"{folder} holds no exported model (config.json and model.safetensors, or its index); "
            "`tigon export` makes one"
        )
    if index := files.get(INDEX):
        weight_map = read_json(index, max_bytes=MAX_INDEX).get("weight_map")
        shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        for shard in sorted(shards - files.keys()):
            raise FileNotFoundError(f"{folder} has no file {quote(shard)}, but its index names it")
    return files


def write_card(
    repository: str,
    about: str,
    *sections: str,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str],
) -> str:
    """Returns a model card: about the model, how to load it, and more sections; it ends with a
    digest by which `is_generated_card` notices an edit."""
    data = huggingface_hub.ModelCardData(
        base_model=base_model,
        datasets=list(datasets) or None,
        library_name="transformers",  # the hub shows how to load it
        pipeline_tag="text-generation",
        tags=["tigon", *tags],
    )
    title, usage = escape_markdown(repository.split("/")[-1]), USAGE.format(repository)
    text = (
        "\n\n".join([f"---\n{data.to_yaml()}\n---", f"# {title}", about, usage, *sections]) + "\n"
    )
    return f"{text}\n<!-- tigon-card {_digest(text)} -->\n"


def is_generated_card(card: str) -> bool:
    """Whether the card is as `write_card` made it."""
    card = card.replace("\r\n", "\n")
    mark = _CARD_DIGEST.search(card)
    return mark is not None and mark[1] == _digest(card[: mark.start()])


def _digest(text: str) -> str:
    """Returns the SHA-256 digest, in hexadecimal, of a text without blank ends."""
    return hashlib.sha256(text.strip().encode(errors="replace")).hexdigest()


def escape_markdown(text: object) -> str:
    """Returns text of unknown origin as a line of Markdown of at most 80 characters, escaped."""
    line = " ".join(str(text).split())[:80]
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", "".join(filter(str.isprintable, line)))
