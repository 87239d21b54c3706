"""Where a model's files are: a local directory, or a repository on the Hugging Face hub."""

import os
import threading
from pathlib import Path

from huggingface_hub import (
    _CACHED_NO_EXIST,
    HfApi,
    constants,
    hf_hub_download,
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
        self.revision = revision or "main"
        self.subfolder = subfolder
        self.token = token
        self.cache_dir = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
        self.local_files_only = local_files_only
        self.directory: Path | None = None
        self._commit: str | None = None
        self._pinning = threading.RLock()

        path = Path(path_or_repo).expanduser()
        if path.exists():
            if not path.is_dir():
                raise NotADirectoryError(f"{self.name} is a file; give the directory it is in")
            if revision is not None:
                raise ValueError(
                    f"{self.name} is a local directory and has no revision {revision!r}: "
                    "leave revision out, or name a hub repository"
                )
            self.directory = path / subfolder
        elif self.name.startswith((".", "~", os.sep)) or not isinstance(path_or_repo, str):
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
        """The local path of the file, downloaded if it has to be."""
        if self.directory is None:
            return self._download(name)
        path = self.directory / name
        if not path.is_file():
            raise _NoSuchFile(f"{self.directory} has no file {name}")
        return path

    def optional_file(self, name: str) -> Path | None:
        """As `file`, but None if the repository (offline: what is cached of it) lacks the file."""
        try:
            return self.file(name)
        except _NoSuchFile:
            return None

    def listing(self) -> list[str]:
        """Names of the files at this place, as far as can be told without downloading any."""
        if self.directory is not None:
            return sorted(os.listdir(self.directory)) if self.directory.is_dir() else []
        if self.local_files_only:
            return []
        try:
            revision = self._commit or self.revision
            found = HfApi(token=self.token).model_info(self.name, revision=revision).siblings
        except OSError:  # only ever asked for to explain a failure
            return []
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        names = sorted(file.rfilename for file in found or () if file.rfilename.startswith(prefix))
        return [name.removeprefix(prefix) for name in names]

    def _download(self, name: str) -> Path:
        if self._commit is None:
            with self._pinning:
                if self._commit is None:
                    return self._fetch(name, self.revision)
        return self._fetch(name, self._commit)

    def _fetch(self, name: str, revision: str) -> Path:
        path = f"{self.subfolder}/{name}" if self.subfolder else name
        absent = f"{self.name} (revision {self.revision}) has no file {path}"
        if self._commit is not None and self._known_absent(path):
            raise _NoSuchFile(absent)
        try:
            found = hf_hub_download(
                self.name,
                path,
                revision=revision,
                token=self.token,
                cache_dir=self.cache_dir,
                local_files_only=self.local_files_only,
            )
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                raise self._not_cached(path, error) from error
            if isinstance(error, HfHubHTTPError):
                self._commit = error.response.headers.get("X-Repo-Commit", self._commit)
            raise _NoSuchFile(absent) from error
        except (HFValidationError, HfHubHTTPError) as error:
            raise self._refused(path, error) from error
        if self._commit is None:
            # The cache holds .../snapshots/{commit}/{path}
            self._commit = Path(found).parents[path.count("/")].name
        return Path(found)

    def _not_cached(self, path: str, error: LocalEntryNotFoundError) -> OSError:
        what = f"{path} of {self.name} (revision {self.revision})"
        if self.local_files_only or isinstance(error.__cause__, OfflineModeIsEnabled):
            kind = _NoSuchFile if self._in_cache() else FileNotFoundError
            return kind(
                f"{what} is not in the cache {self.cache_dir} and downloads are off "
                "(local_files_only or HF_HUB_OFFLINE): load it once online, or pass its cache_dir"
            )
        return ConnectionError(
            f"cannot reach {constants.ENDPOINT} for {what}, which is not in the cache "
            f"{self.cache_dir}: {error.__cause__}; check the network, or pass "
            "local_files_only=True if the cache holds all the model has"
        )

    def _refused(self, path: str, error: Exception) -> OSError:
        what = f"{path} of {self.name} (revision {self.revision})"
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
