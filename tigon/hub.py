"""The Hugging Face hub and local folders: the files of a model, its card, its upload."""

import hashlib
import os
import re
import shlex
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from huggingface_hub import (
    _CACHED_NO_EXIST,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCardData,
    constants,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

from tigon.utils.json import quote, read_bytes, read_json
from tigon.utils.paths import expand_user

CARD = "README.md"
EXPORT_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
CHAT_TEMPLATES = "additional_chat_templates"
INDEX = "model.safetensors.index.json"
MAX_CARD, MAX_INDEX = 1 << 20, 100 << 20  # bytes
TIMEOUT = 5.0  # seconds for the hub's first answer, unless HF_HUB_ETAG_TIMEOUT is set
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_CARD_DIGEST = re.compile(r"<!-- tigon-card ([0-9a-f]{64}) -->\s*\Z")


class HubOptions(TypedDict, total=False):
    """Lists the keyword arguments of `Repository`."""

    revision: str | None
    subfolder: str
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool


class Repository:
    """A local directory, or a hub repository whose files are downloaded when they are requested.

    The first request pins the revision to a commit, from which all files come.
    """

    def __init__(
        self,
        path_or_repo: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> None:
        self.name = os.fspath(path_or_repo)
        self.revision = _check_relative(revision or "main", "revision")
        self.subfolder = _check_relative(subfolder, "subfolder").strip("/")
        self.token = token
        self.cache_dir = expand_user(cache_dir or constants.HF_HUB_CACHE)
        self.local_files_only = local_files_only
        self.directory: Path | None = None
        self._commit: str | None = None
        self._unreachable: str | None = None  # why the hub did not answer
        self._lock = threading.Lock()

        path = Path(os.path.expanduser(path_or_repo))  # ~USER stays if there is no such user
        is_path = not isinstance(path_or_repo, str) or re.fullmatch(r"[.~/].*|.*/", self.name, re.S)
        # Of a repository's owner there may be a folder here: then its revision is named
        is_ambiguous = revision is None and path.parent != Path() and path.parent.is_dir()
        if path.is_dir():
            if revision is not None:
                raise ValueError(
                    f"{self.name} is a local directory and has no revision {revision!r}: leave "
                    "revision out, or name a hub repository"
                )
            self._root, self.directory = path, path / self.subfolder
        elif path.exists():
            raise NotADirectoryError(
                f"{self.name} is a file; give the directory it is in, or of a GGUF file the one "
                "that `tigon export FILE DIRECTORY` writes"
            )
        elif is_path or is_ambiguous or self.name.count("/") > 1:
            raise FileNotFoundError(
                f"no directory {self.name} (absolute: {path.absolute()}); a hub repository is "
                "owner/name, with its revision, such as main, if there is a folder owner here"
            )

    def file(self, name: str) -> Path:
        """Returns the local path of a file, which is downloaded if need be.

        Raises FileNotFoundError if there is no such file, and ValueError for a link that leaves the
        directory, a pipe or a device.
        """
        if (path := self.optional_file(name)) is None:
            raise self._no_file(name)
        return path

    def optional_file(self, name: str) -> Path | None:
        """Returns the local path of a file; None if there is none (offline: none in the cache)."""
        path = self._join(_check_relative(name))
        if self.directory is not None:
            return self._root / path if contains_file(self._root, path) else None
        if self._commit is not None:
            return self._download(path, self._commit)
        with self._lock:
            if self._commit is None and not self._is_offline():
                self._unreachable = self._connection_fault(path)
            return self._download(path, self._commit or self.revision)

    def read_prefix(self, name: str, count: int) -> tuple[bytes, int]:
        """Returns the first `count` bytes of a file and its size; the rest is not downloaded."""
        path, revision = self._join(_check_relative(name)), self._commit or self.revision
        if self.directory is None and not self._is_offline() and self._unreachable is None:
            cached = try_to_load_from_cache(self.name, path, self.cache_dir, revision)
            if not isinstance(cached, str):
                return self._download_prefix(path, revision, count)
        local = Repository.optional_file(self, name)  # not that of a subclass
        if local is None:
            raise self._no_file(name)
        with local.open("rb") as file:
            return file.read(count), os.fstat(file.fileno()).st_size

    def listing(self, folder: str = "") -> list[str]:
        """Returns the sorted names of the files in the repository, or in a folder of it, for
        messages; none if they cannot be listed."""
        root, revision = self.directory, self._commit or self.revision
        if root is None and self._is_offline():
            repository = self.cache_dir / f"models--{self.name.replace('/', '--')}"
            root = repository / "snapshots" / revision / self.subfolder
        prefix = f"{folder}/" if folder else ""
        try:
            if root is not None:
                names = os.listdir(root / _check_relative(folder))
                return sorted(f"{prefix}{name}" for name in names)
            api = HfApi(token=self.token)
            info = api.model_info(self.name, revision=revision, timeout=_timeout())
        except Exception:  # of the hub or its HTTP client: not worth an error
            return []
        start, paths = self._join(""), (file.rfilename for file in info.siblings or ())
        return sorted(p.removeprefix(start) for p in paths if p.startswith(start + prefix))

    def _join(self, name: str) -> str:
        """Returns the path of a file below the subfolder."""
        return f"{self.subfolder}/{name}" if self.subfolder else name

    def _connection_fault(self, path: str) -> str | None:
        """Says why the hub does not answer within TIMEOUT, or returns None if it does; its library
        would try for minutes."""
        url = hf_hub_url(self.name, path, revision=self.revision)
        try:
            HfApi(token=self.token).get_hf_file_metadata(url=url, timeout=_timeout())
        except (OSError, ValueError):  # an answer, which the download raises too
            return None
        except Exception as error:  # of the HTTP client, whichever the library has
            return str(error) or type(error).__name__
        return None

    def _is_offline(self) -> bool:
        """Whether only local files are used, as the caller or the environment says."""
        return self.local_files_only or constants.is_offline_mode()

    def _no_file(self, name: str) -> FileNotFoundError:
        """Returns the error for a file that is not there; offline it says how to get it."""
        if self.directory is not None:
            return FileNotFoundError(f"{self.directory} has no file {name}")
        offline = (
            f" in the cache {self.cache_dir}, and downloads are off (local_files_only or "
            "HF_HUB_OFFLINE): load it once online, or pass its cache_dir"
        )
        message = f"{self.name} (revision {self.revision}) has no file {self._join(name)}"
        return FileNotFoundError(message + offline * self._is_offline())

    def _download(self, path: str, revision: str) -> Path | None:
        """Returns the file in the cache, downloaded if need be; the first one pins the commit."""
        if self._commit is not None:
            cached = try_to_load_from_cache(self.name, path, self.cache_dir, self._commit)
            if cached is _CACHED_NO_EXIST:
                return None
        try:
            with connection_errors(f"cannot download {path} of {self.name}"):
                file = hf_hub_download(
                    self.name,
                    path,
                    revision=revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    local_files_only=self.local_files_only or self._unreachable is not None,
                    etag_timeout=_timeout(),
                )
        except RemoteEntryNotFoundError as error:
            self._commit = error.response.headers.get("X-Repo-Commit", self._commit)
            return None
        except LocalEntryNotFoundError as error:
            if self._is_offline():
                return None
            raise ConnectionError(
                f"cannot reach {constants.ENDPOINT} for {path} of {self.name}, which is neither a "
                f"directory here nor in the cache {self.cache_dir}: "
                f"{self._unreachable or error.__cause__}; check the name and the network, or pass "
                "local_files_only=True"
            ) from error
        self._commit = Path(file).parents[path.count("/")].name  # .../snapshots/COMMIT/path
        return Path(file)

    def _download_prefix(self, path: str, revision: str, count: int) -> tuple[bytes, int]:
        """Downloads the first bytes of a file; returns them and its size."""
        headers = build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes=0-{max(count, 1) - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.name, path, revision=revision)
        content = bytearray()
        with (
            connection_errors(f"cannot read {path} of {self.name}"),
            # As a stream: a server may ignore the range and send all of the file
            get_session().stream("GET", url, headers=headers, timeout=_timeout()) as response,
        ):
            try:
                hf_raise_for_status(response)
            except RemoteEntryNotFoundError as error:
                raise FileNotFoundError(f"{self.name} has no file {path}") from error
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total or response.headers["Content-Length"])
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) >= count:
                    break
        return bytes(content[:count]), size


def _timeout() -> float:
    """Returns the seconds to wait for the hub's first answer."""
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    return TIMEOUT if seconds == constants.DEFAULT_ETAG_TIMEOUT else seconds


@contextmanager
def connection_errors(action: str) -> Iterator[None]:
    """Turns an error of the hub's HTTP client, whichever it is, into a ConnectionError; an OSError
    or ValueError stays."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        text = f"{action}: {error}; the same again goes on from what is complete"
        raise ConnectionError(text) from error


def config_file(repository: Repository) -> Path:
    """Returns the path of config.json; a FileNotFoundError says what else may be meant."""
    try:
        return repository.file("config.json")
    except FileNotFoundError as error:
        directory, names = repository.directory, repository.listing()
        ggufs = [quote(name) for name in names if name.endswith(".gguf")]
        if directory and (directory / "hf/config.json").is_file():
            hint = f"if it is a run, its export is {directory}/hf"
        elif "adapter_config.json" in names:
            hint = adapter_hint(repository.name)
        elif directory and (directory / "adapter/adapter_config.json").is_file():
            hint = adapter_hint(f"{directory}/adapter")
        elif ggufs:
            hint = f"pass the name of a GGUF file, gguf_file={ggufs[0]}; in a shell, its path"
        else:
            raise
        raise FileNotFoundError(f"{error}; {hint}") from error


def adapter_hint(adapter: str) -> str:
    """Says what to do with a folder or repository that holds PEFT's files."""
    return (
        f"{adapter} is an adapter: load its base and call load_adapter, or "
        f"`tigon export {shlex.quote(adapter)} DIRECTORY --merge` writes both as a model"
    )


# A link to a private file would be copied into exports, and a pipe may never end


def _check_relative(name: str, label: str = "the file") -> str:
    """Returns the name; raises ValueError if it leads out of the folder that it is relative to."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{label} {name!r} is outside the repository: give a path inside it")
    return name


def contains_file(folder: Path, name: str) -> bool:
    """Returns whether the folder has a file of this name.

    Raises ValueError for a link that leaves the folder, a pipe or a device. The folder itself may
    be a link, and one of the hub's cache (snapshots/COMMIT) has links to its blobs.
    """
    path = folder / _check_relative(name)
    if not os.path.lexists(path):
        return False
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:  # of a link that leads nowhere, or in a circle
        raise ValueError(f"{path} cannot be followed: {error.strerror}: remove it") from None
    root = Path(os.path.realpath(folder))
    if not target.is_relative_to(root) and not _is_blob(target, root):
        text = f"{path} is a link to {target}, outside of {folder}: it is not read"
        raise ValueError(f"{text}. If you trust it, put a copy of that file in its place")
    mode = target.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is no file but a pipe, a socket or a device: remove it")
    return stat.S_ISREG(mode)


def check_folder(folder: Path) -> None:
    """Raises ValueError for a link directly in the folder that leaves it, a pipe or a device."""
    for name in sorted(os.listdir(folder)):
        contains_file(folder, name)


def _is_blob(target: Path, root: Path) -> bool:
    """Whether `target` is the blob of a file in a snapshot of the hub's cache, or below one.

    CACHE/models--OWNER--NAME/snapshots/COMMIT/FILE links to ../../blobs/HASH, and that perhaps to
    CACHE/blobs/HA/HASH, which several repositories share.
    """
    for snapshots in root.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            shared = repository.parent / "blobs" / target.name[:2]
            return target.parent in (repository / "blobs", shared)
    return False


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
        self._token, self._api = token, HfApi(token=token)
        with connection_errors(f"cannot reach {constants.ENDPOINT} for {repository}"):
            created = self._api.create_repo(repository, private=private, exist_ok=True)
            self.name = created.repo_id  # with the owner
            if revision not in (None, "main") and not str(revision).startswith("refs/"):
                self._api.create_branch(self.name, branch=str(revision), exist_ok=True)

    def upload(
        self,
        folder: Path,
        *,
        card: str | None = None,
        message: str | None = None,
        overwrite_card: bool = False,
    ) -> str:
        """Uploads an export in one commit; returns the URL of the repository or pull request.

        Weights of another export there are deleted. Files that the hub has are not sent again. An
        edited card there stays, with a warning, unless `overwrite_card`.
        """
        files = list_export(folder)
        with connection_errors(f"the upload to {self.name} broke"):
            current = self._api.model_info(self.name, revision=self.revision)
            names = {file.rfilename for file in current.siblings or ()}
            operations: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
            if card is not None and (
                overwrite_card or CARD not in names or self._replaces_card(card, current.sha)
            ):
                operations.append(CommitOperationAdd(CARD, card.encode()))
            stale = sorted(name for name in names - files.keys() if _WEIGHTS.fullmatch(name))
            operations += [CommitOperationDelete(name, is_folder=False) for name in stale]
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


def check_repository(name: str) -> None:
    """Raises ValueError for what cannot be the name of a repository."""
    if not is_hub_name(name if "/" in name else f"owner/{name}"):
        raise ValueError(f"{name!r} is no name of a hub repository (owner/name)")


def is_hub_name(text: str) -> bool:
    """Whether the text could be owner/name of a repository."""
    try:
        validate_repo_id(text)
    except ValueError:
        return False
    return text.count("/") == 1


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
    sections: Iterable[str],
    *,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:
    """Returns a model card, ending with a digest by which `is_generated_card` notices an edit."""
    data = ModelCardData(
        base_model=base_model,
        datasets=list(datasets) or None,
        library_name="transformers",  # the hub shows how to load it
        pipeline_tag="text-generation",
        tags=["tigon", *tags],
    )
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"
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
    """Returns text of unknown origin as one line of Markdown, cut to 80 characters, with its markup
    escaped."""
    line = " ".join(str(text).split())[:80]
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", "".join(filter(str.isprintable, line)))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; the cells are not escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def usage_section(repository: str) -> str:
    """Returns the section of a card that shows how to load the model."""
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repository}")
tokenizer = AutoTokenizer.from_pretrained("{repository}")
```

`tigon chat {repository}` talks with it."""
