"""Uploads an exported model to the hub in one commit: there is the old one, or the new."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from tigon.hub.card import CARD, is_hub_name, is_untouched
from tigon.hub.folders import is_own_file
from tigon.hub.reach import why_unreachable
from tigon.hub.repository import Repository
from tigon.utils.json import quote, read_json

ENDINGS = (".json", ".safetensors", ".jinja", ".txt", ".model")  # of what an export consists of
TEMPLATES = "additional_chat_templates"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
LARGEST_CARD = 1 << 20  # bytes of one that is compared
LARGEST_INDEX = 100 << 20


class Destination:
    """A repository on the hub that exists, if need be because this made it, and may be written to.

    `private`: of one that is made; None is the account's default. `revision` is a branch, which is
    made too. With `create_pr` the upload is a pull request. Raises OSError, saying what to do, if
    the hub cannot be reached or refuses, and ValueError for a name that is none.
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
        self.name = repository
        self.revision = revision
        self.create_pr = create_pr
        self._token = token
        self._api = HfApi(token=token)
        fault = why_unreachable(lambda seconds: self._api.model_info(repository, timeout=seconds))
        if fault is not None:
            raise ConnectionError(f"cannot reach {constants.ENDPOINT} for {repository}: {fault}")
        with self._explained():
            made = self._api.create_repo(repository, private=private, exist_ok=True)
            self.name = made.repo_id  # with the owner
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
        """Returns the address of the repository, or of the pull request.

        Only what an export consists of is uploaded, and weights of another export there are
        deleted. What the hub has already is not sent again, so that the same call goes on after one
        that was interrupted. A card that somebody has changed stays, with a warning, unless
        `overwrite_card`.
        """
        files = exported_files(folder)
        with self._explained():
            there = self._api.model_info(self.name, revision=self.revision)
        names = {file.rfilename for file in there.siblings or ()}
        operations: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
        if card is not None and self._takes_card(card, names, there.sha, overwrite_card):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        old = sorted(name for name in names - files.keys() if _WEIGHTS.fullmatch(name))
        operations += [CommitOperationDelete(name, is_folder=False) for name in old]
        with self._explained():
            done = self._api.create_commit(
                self.name,
                operations,
                commit_message=message or "Upload model",
                revision=self.revision,
                create_pr=self.create_pr,
                parent_commit=there.sha,  # a change meanwhile, such as of the card, is an error
            )
        return done.pr_url or f"{constants.ENDPOINT}/{self.name}"

    def has(self, repository: str, kind: str = "model") -> bool:
        """Whether there is such a public repository, of a model or a dataset."""
        try:
            return not self._api.repo_info(repository, repo_type=kind, timeout=10).private
        except Exception:  # of the hub or its HTTP client; it only means that nothing links there
            return False

    def _takes_card(self, card: str, names: set[str], commit: str | None, overwrite: bool) -> bool:
        if overwrite or CARD not in names:
            return True
        with self._explained():
            there = Repository(self.name, revision=commit, token=self._token)
            known = there.beginning(CARD, LARGEST_CARD)[0].decode(errors="replace")
        if known == card or is_untouched(known):
            return known != card
        warnings.warn(
            f"{CARD} of {self.name} is not as Tigon wrote it, and stays; overwrite_card=True, or "
            "--overwrite-card in the shell, replaces it",
            stacklevel=3,
        )
        return False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        where = f"{self.name} on {constants.ENDPOINT}"
        again = "; the same again goes on from what is there"
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise ConnectionError(f"HF_HUB_OFFLINE is set: {where} cannot be reached") from error
        except HfHubHTTPError as error:
            raise _refusal(where, error) from error
        except (OSError, ValueError):
            raise
        except Exception as error:  # of the HTTP client, whichever the hub's library has
            cause = error.__cause__ or error
            raise ConnectionError(f"the upload to {where} broke: {cause}{again}") from error


def _refusal(where: str, error: HfHubHTTPError) -> OSError:
    status = error.response.status_code
    if status == 401:
        return PermissionError(
            f"{where} asks who you are: pass token= or run `hf auth login`, with a token that may "
            "write"
        )
    if status == 403:
        return PermissionError(
            f"your token may not write to {where}: it needs write permission for that account or "
            "organisation; to propose a change to somebody else's, create_pr=True or --create-pr"
        )
    if status == 404:
        return FileNotFoundError(f"no {where} that your token can see: {error}")
    if status == 412:
        return OSError(f"{where} has changed since the upload began: look, and push again")
    return OSError(f"{where} cannot be written: {error}")


def check_repository(name: str) -> None:
    """Raises ValueError for what cannot be the name of a repository."""
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is no name of a hub repository (owner/name): {error}") from None
    if "/" in name and not is_hub_name(name):
        raise ValueError(f"{name!r} is no name of a hub repository (owner/name)")


def has_token(token: str | bool | None = None) -> bool:
    return isinstance(token, str) or get_token() is not None


def exported_files(folder: Path) -> dict[str, Path]:
    """What an upload consists of: name -> file. Raises for a folder that holds no export, and for
    links that leave it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no directory {folder}")
    if (folder / "run.json").exists():  # has paths and the optimizer's states
        raise FileNotFoundError(
            f"{folder} is a checkpoint of a run: `tigon export {folder} DIRECTORY` makes a model "
            "of it, which `tigon push DIRECTORY` takes"
        )
    names = [name.name for name in folder.iterdir()]
    if (folder / TEMPLATES).is_dir():
        names += [f"{TEMPLATES}/{name.name}" for name in (folder / TEMPLATES).iterdir()]
    found = {
        name: folder / name
        for name in sorted(names)
        if name.endswith(ENDINGS) and not name.startswith(".") and is_own_file(folder, name)
    }
    weights = {"model.safetensors", "model.safetensors.index.json"}
    if "config.json" not in found or not weights & found.keys():
        raise FileNotFoundError(
            f"{folder} holds no exported model (config.json and model.safetensors, or its index); "
            "`tigon export` makes one"
        )
    if index := found.get("model.safetensors.index.json"):
        shards = read_json(index, max_bytes=LARGEST_INDEX).get("weight_map")
        named = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if absent := sorted(named - found.keys()):
            raise FileNotFoundError(
                f"{folder} has no file {quote(absent[0])}, but its index names it"
            )
    return found
