"""The files of a model, in a local folder or on the Hugging Face hub."""

import os
import re
import shlex
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypedDict

import huggingface_hub  # whose HfApi, which only names on the hub need, is slow to import
from huggingface_hub import (
    _CACHED_NO_EXIST,
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

from tigon.utils.json import quote
from tigon.utils.paths import expand_user

TIMEOUT = 5.0  # seconds for the hub's first answer, unless HF_HUB_ETAG_TIMEOUT is set
LFS_POINTER, MAX_POINTER = b"version https://git-lfs", 1024  # how one begins, its bytes at most


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
        self._prefix = f"{self.subfolder}/" if self.subfolder else ""  # of paths
        self.token = token
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
        if self.directory is None:  # a directory needs no cache, and so no home directory
            self.cache_dir = expand_user(cache_dir or constants.HF_HUB_CACHE)

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
        path = self._prefix + _check_relative(name)
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
        path, revision = self._prefix + _check_relative(name), self._commit or self.revision
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
        """Returns the sorted names of the files, for messages; none if they cannot be listed."""
        root, revision = self.directory, self._commit or self.revision
        if root is None and self._is_offline():
            repository = self.cache_dir / f"models--{self.name.replace('/', '--')}"
            root = repository / "snapshots" / revision / self.subfolder
        prefix = f"{folder}/" if folder else ""
        try:
            if root is not None:
                names = os.listdir(root / _check_relative(folder))
                return sorted(f"{prefix}{name}" for name in names)
            api = huggingface_hub.HfApi(token=self.token)
            info = api.model_info(self.name, revision=revision, timeout=_timeout())
        except Exception:  # of the hub or its HTTP client: not worth an error
            return []
        start, paths = self._prefix, (file.rfilename for file in info.siblings or ())
        return sorted(p.removeprefix(start) for p in paths if p.startswith(start + prefix))

    def _connection_fault(self, path: str) -> str | None:
        """Says why the hub does not answer within TIMEOUT; None if it does."""
        url = hf_hub_url(self.name, path, revision=self.revision)
        try:
            huggingface_hub.HfApi(token=self.token).get_hf_file_metadata(
                url=url, timeout=_timeout()
            )
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
        message = f"{self.name} (revision {self.revision}) has no file {self._prefix}{name}"
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
                f"{self._unreachable or error.__cause__}; check the name and the network, set "
                "HF_HUB_OFFLINE=1 to use the cache alone, or name a local directory"
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
    """Turns errors of the hub's HTTP client into ConnectionError; OSError and ValueError stay."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        text = f"{action}: {error}; try again: files that are complete are kept"
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

    Raises ValueError for a link that leaves the folder, a pipe, a device or a pointer of Git LFS.
    The folder itself may be a link, and the hub's cache (snapshots/COMMIT) has links to its blobs.
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
    mode, size = (status := target.stat()).st_mode, status.st_size
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is no file but a pipe, a socket or a device: remove it")
    if stat.S_ISREG(mode) and size < MAX_POINTER and target.read_bytes().startswith(LFS_POINTER):
        raise ValueError(f"{path} is a pointer of Git LFS: `git lfs pull` puts the file there")
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
