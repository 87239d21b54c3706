"""Where a model's files are: a local directory, or a repository on the Hugging Face hub."""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from huggingface_hub import (
    _CACHED_NO_EXIST,
    HfApi,
    constants,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from tigon.hub.folders import check_name, is_own_file
from tigon.hub.reach import reach_seconds, why_unreachable
from tigon.utils.paths import expand_user


class Source(TypedDict, total=False):
    """Where in a repository, which state of it, and how it is fetched: keywords of `Repository`."""

    revision: str | None
    subfolder: str
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool


class _NoSuchFile(FileNotFoundError):
    """The repository is there and does not hold the file."""


class Repository:
    """A local directory, or a hub repository; only the files asked for are fetched.

    The first file asked for pins the hub revision to a commit, and all later ones come from it.
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
        self.revision = check_name(revision or "main", "revision")
        self.subfolder = check_name(subfolder, "subfolder").strip("/")
        self.token = token
        self.cache_dir = expand_user(cache_dir or constants.HF_HUB_CACHE)
        self.local_files_only = local_files_only
        self.directory: Path | None = None
        self._commit: str | None = None
        self._pinning = threading.RLock()
        self._unreachable: str | None = None  # why, once the hub was asked in vain

        path = Path(os.path.expanduser(path_or_repo))  # of an unknown user it stays
        if path.exists():
            if not path.is_dir():
                how = "give the directory it is in"
                if path.suffix == ".gguf":
                    how = "`tigon export FILE DIRECTORY` makes a directory of a GGUF file"
                raise NotADirectoryError(f"{self.name} is a file; {how}")
            if revision is not None:
                raise ValueError(
                    f"{self.name} is a local directory and has no revision {revision!r}: "
                    "leave revision out, or name a hub repository"
                )
            self._root = path
            self.directory = path / self.subfolder
        elif (
            self.name.startswith((".", "~", os.sep))
            or self.name.endswith("/")
            or not isinstance(path_or_repo, str)
        ):
            raise FileNotFoundError(f"no directory {self.name} (absolute: {path.absolute()})")
        elif self.name.count("/") > 1:
            raise FileNotFoundError(
                f"{self.name!r} is neither an existing directory nor the name of a hub repository "
                "(organisation/name)"
            )
        elif revision is None and path.parent != Path() and path.parent.is_dir():
            raise FileNotFoundError(
                f"no directory {self.name}, though {path.parent} is one here; "
                "if the hub repository is meant, name its revision too, such as main"
            )

    def file(self, name: str) -> Path:
        """The local path of the file, downloaded if it has to be.

        Raises ValueError for what a directory has in its place: a link that leaves the directory,
        a pipe, a device.
        """
        if self.directory is None:
            return self._download(check_name(name))
        if not is_own_file(self._root, self._inside(name)):
            raise _NoSuchFile(f"{self.directory} has no file {name}")
        return self.directory / name

    def optional_file(self, name: str) -> Path | None:
        """As `file`, but None if the repository (offline: what is cached of it) lacks the file."""
        try:
            return self.file(name)
        except _NoSuchFile:
            return None

    def beginning(self, name: str, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a file, and its size. On the hub, no more of it is fetched."""
        if self.directory is None and not self.local_files_only:
            path = self._inside(check_name(name))
            with self._pinning:
                if self._commit is None:
                    self._reach(path)
            revision = self._commit or self.revision
            cached = try_to_load_from_cache(self.name, path, self.cache_dir, revision)
            if self._unreachable is None and not isinstance(cached, str):
                with suppress(OfflineModeIsEnabled):
                    return self._fetch_beginning(path, revision, count)
        local = Repository.file(self, name)  # as a whole, whatever a subclass has of it
        with local.open("rb") as file:
            return file.read(count), os.fstat(file.fileno()).st_size

    def listing(self, folder: str = "") -> list[str]:
        """Names of the files at this place, or in a folder there, as far as can be told without
        downloading any."""
        here = self.directory
        if here is None and (self.local_files_only or self._unreachable is not None):
            here = self._snapshots() / (self._commit or self.revision) / self.subfolder
        if here is not None:
            return _names(here, check_name(folder))
        try:
            revision = self._commit or self.revision
            api = HfApi(token=self.token)
            siblings = api.model_info(
                self.name, revision=revision, timeout=reach_seconds()
            ).siblings
        except Exception:  # of the hub or its HTTP client; it is not worth an error of its own
            return []
        prefix = "".join(f"{part}/" for part in (self.subfolder, folder) if part)
        names = (file.rfilename for file in siblings or ())
        start = f"{self.subfolder}/" if self.subfolder else ""
        return sorted(name.removeprefix(start) for name in names if name.startswith(prefix))

    def _inside(self, name: str) -> str:
        return f"{self.subfolder}/{name}" if self.subfolder else name

    def _download(self, name: str) -> Path:
        if self._commit is None:
            with self._pinning:
                if self._commit is None:
                    self._reach(self._inside(name))
                    return self._fetch(name, self.revision)
        return self._fetch(name, self._commit)

    def _reach(self, path: str) -> None:
        """Ask the hub once; what fetches files asks for minutes where nobody answers."""
        if self.local_files_only:
            return
        url = hf_hub_url(self.name, path, revision=self.revision)
        api = HfApi(token=self.token)
        self._unreachable = why_unreachable(
            lambda seconds: api.get_hf_file_metadata(url=url, timeout=seconds)
        )

    def _fetch(self, name: str, revision: str) -> Path:
        path = self._inside(name)
        if self._commit is not None and self._known_absent(path):
            raise self._absent(path)
        try:
            found = hf_hub_download(
                self.name,
                path,
                revision=revision,
                token=self.token,
                cache_dir=self.cache_dir,
                local_files_only=self.local_files_only or self._unreachable is not None,
            )
        except (EntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
            raise self._explained(path, error) from error
        except OSError as error:
            if error.errno is not None:  # of this machine, such as a full disk
                raise
            raise ConnectionError(self._broken(path, error)) from error
        except Exception as error:  # of the HTTP client, whichever the hub's library has
            raise ConnectionError(self._broken(path, error)) from error
        if self._commit is None:
            # The cache holds .../snapshots/{commit}/{path}
            self._commit = Path(found).parents[path.count("/")].name
        return Path(found)

    def _fetch_beginning(self, path: str, revision: str, count: int) -> tuple[bytes, int]:
        headers = build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes=0-{max(count, 1) - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.name, path, revision=revision)
        content = bytearray()
        try:
            # As a stream: a server may ignore the range and send all of the file
            with get_session().stream(
                "GET", url, headers=headers, timeout=reach_seconds()
            ) as answer:
                hf_raise_for_status(answer)
                size = _size(answer.headers)
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) >= count:
                        break
        except (HFValidationError, HfHubHTTPError) as error:
            raise self._explained(path, error) from error
        except OSError:
            raise
        except Exception as error:  # of the HTTP client, whichever the hub's library has
            raise ConnectionError(f"cannot read {self._what(path)}: {error}") from error
        return bytes(content[:count]), size

    def _what(self, path: str) -> str:
        return f"{path} of {self.name} (revision {self.revision})"

    def _broken(self, path: str, error: Exception) -> str:
        why = str(error).split("\n")[0].rstrip(".")
        return (
            f"{self._what(path)} did not come whole: {why}. The same again goes on from the files "
            "that did"
        )

    def _absent(self, path: str) -> _NoSuchFile:
        return _NoSuchFile(f"{self.name} (revision {self.revision}) has no file {path}")

    def _explained(self, path: str, error: Exception) -> OSError:
        """What to raise in place of an error of the hub's library."""
        if isinstance(error, LocalEntryNotFoundError):
            return self._not_cached(path, error)
        if isinstance(error, EntryNotFoundError):
            if isinstance(error, HfHubHTTPError):
                self._commit = error.response.headers.get("X-Repo-Commit", self._commit)
            return self._absent(path)
        return self._refused(path, error)

    def _not_cached(self, path: str, error: LocalEntryNotFoundError) -> OSError:
        what = self._what(path)
        offline = isinstance(error.__cause__, OfflineModeIsEnabled)
        if self._unreachable is None and (self.local_files_only or offline):
            kind = _NoSuchFile if self._in_cache() else FileNotFoundError
            return kind(
                f"{what} is not in the cache {self.cache_dir} and downloads are off "
                "(local_files_only or HF_HUB_OFFLINE): load it once online, or pass its cache_dir"
            )
        why = str(self._unreachable or error.__cause__).split("\n")[0]
        return ConnectionError(
            f"cannot reach {constants.ENDPOINT} for {what}, which is neither a directory here nor "
            f"in the cache {self.cache_dir}: {why}; check the name and the network, or pass "
            "local_files_only=True if the cache holds all the model has"
        )

    def _refused(self, path: str, error: Exception) -> OSError:
        what = self._what(path)
        if isinstance(error, HFValidationError):
            return FileNotFoundError(
                f"{self.name!r} is neither an existing directory nor the name of a hub repository "
                f"(organisation/name): {error}"
            )
        if isinstance(error, GatedRepoError):
            return PermissionError(
                f"{what} is gated: accept its terms at {constants.ENDPOINT}/{self.name}, "
                "then pass token= or run `hf auth login`"
            )
        if isinstance(error, RepositoryNotFoundError):
            return FileNotFoundError(
                f"cannot fetch {what}: no such directory here and no such repository on "
                f"{constants.ENDPOINT}; check the name, and if it is private pass token= or run "
                "`hf auth login`"
            )
        if isinstance(error, RevisionNotFoundError):
            return FileNotFoundError(f"cannot fetch {what}: no such branch, tag or commit there")
        return OSError(f"cannot fetch {what}: {error}")

    def _snapshots(self) -> Path:
        return self.cache_dir / f"models--{self.name.replace('/', '--')}" / "snapshots"

    def _in_cache(self) -> bool:
        """Whether the cache holds files of this revision, which is then pinned to their commit."""
        if self._commit is None:
            ref = self._snapshots().parent / "refs" / self.revision
            if ref.is_file():
                self._commit = ref.read_text()
        return (self._snapshots() / (self._commit or self.revision)).is_dir()

    def _known_absent(self, path: str) -> bool:
        cached = try_to_load_from_cache(self.name, path, self.cache_dir, self._commit)
        return cached is _CACHED_NO_EXIST


def _names(directory: Path, folder: str) -> list[str]:
    try:
        names = os.listdir(directory / folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(f"{folder}/{name}" if folder else name for name in names)


def _size(headers: Mapping[str, str]) -> int:
    """Of the whole file, as the answer to a request for a part of it says."""
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    if not total.isdecimal() or len(total) > 18:
        raise OSError(f"the hub does not say how large the file is, but {total[:40]!r}")
    return int(total)
