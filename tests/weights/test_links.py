"""A folder that was downloaded gives nothing away that is not in it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer
from tests.support.small import write_model
from tigon.models import from_pretrained
from tigon.tokenizer import Tokenizer
from tigon.weights import Repository

SECRET = '{"key": "secret"}'


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "secret.json"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "folder")


WRONG: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "absolute": (lambda place, secret: place.symlink_to(secret), "is a link to {secret}, outside"),
    "relative": (
        lambda place, secret: place.symlink_to(os.path.relpath(secret, place.parent)),
        "is a link to {secret}, outside of {folder}",
    ),
    "device": (lambda place, _: place.symlink_to("/dev/zero"), "is a link to /dev/zero, outside"),
    "pipe": (lambda place, _: os.mkfifo(place), "is no file but a pipe"),  # would be waited for
    "nowhere": (lambda place, _: place.symlink_to("none"), "cannot be followed: No such file"),
    "pointer": (
        lambda place, _: place.write_text("version https://git-lfs.github.com/spec/v1\noid a"),
        "is a pointer of Git LFS: `git lfs pull`",
    ),
    "itself": (lambda place, _: place.symlink_to(place), "cannot be followed: .*symbolic links"),
}
TOKENIZER = ["vocab.json", "tokenizer.json", "additional_chat_templates/a.jinja"]
MODEL = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", [*TOKENIZER, *MODEL])
@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_leads_out_of_a_folder(folder: Path, secret: Path, name: str, wrong: str) -> None:
    put, message = WRONG[wrong]
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    put(place, secret)
    message = f"{place} {message.format(secret=secret, folder=folder)}"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(folder) if name in TOKENIZER else from_pretrained(folder)


def test_a_link_that_comes_later_is_not_exported(
    folder: Path, secret: Path, tmp_path: Path
) -> None:
    """What is copied at the end of a run was checked at its beginning."""
    (folder / "vocab.json").write_text("{}")
    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "before")
    (folder / "vocab.json").unlink()
    (folder / "vocab.json").symlink_to(secret)
    with pytest.raises(OSError, match=f"Too many levels of symbolic links: '{folder}/vocab.json'"):
        tokenizer.save_pretrained(tmp_path / "after")
    found = {path.read_text() for path in (tmp_path / "after").iterdir()}
    assert SECRET not in found
    assert (tmp_path / "before/vocab.json").read_text() == "{}"


def test_a_folder_of_links_is_looked_through(tmp_path: Path, secret: Path) -> None:
    folder = write_model(tmp_path / "one")
    (folder / "inner").symlink_to(secret.parent)
    with pytest.raises(ValueError, match=r"secret.json is a link to .*, outside of"):
        Repository(folder).file("inner/secret.json")
    with pytest.raises(ValueError, match=r"inner/secret.json is a link to .*, outside of"):
        Repository(folder, subfolder="inner").file("secret.json")
    (folder / "additional_chat_templates").symlink_to(secret.parent)
    secret.rename(secret.with_suffix(".jinja"))
    with pytest.raises(ValueError, match=r"secret.jinja is a link to .*, outside of"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../private/secret.json", "/etc/hostname", "a/../../b", "a\\b"])
def test_names_stay_inside(folder: Path, secret: Path, name: str) -> None:
    for source in (folder, "lab/tiny"):
        with pytest.raises(ValueError, match="is outside the repository"):
            Repository(source).file(name)
        with pytest.raises(ValueError, match=r"subfolder .* is outside the repository"):
            Repository(source, subfolder=name)


def test_links_inside_and_of_the_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.v2.json")
    (folder / "tokenizer.json").symlink_to("tokenizer.v2.json")
    (tmp_path / "moved").symlink_to(folder)
    assert Repository(tmp_path / "moved").file("tokenizer.json").stat().st_size
    Tokenizer.from_pretrained(tmp_path / "moved")


def test_a_snapshot_of_the_hubs_cache(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    hub.push("lab/tiny", folder)
    repository = Repository("lab/tiny")
    snapshot = repository.file("config.json").parent
    repository.file("tokenizer.json"), repository.file("model.safetensors")
    assert (snapshot / "config.json").is_symlink()
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "link"):
        Tokenizer.from_pretrained(place)
        from_pretrained(place)


def _cache(cache: Path, blob: str) -> Repository:
    """A folder like a snapshot in a hub's cache, whose only blob is a link."""
    repository = cache / "models--lab--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (snapshot / "vocab.json").symlink_to("../../blobs/00")
    (repository / "blobs" / "00").symlink_to(blob)
    return Repository(snapshot)


def test_a_blob_that_repositories_share(tmp_path: Path) -> None:
    shared = "ab" * 32
    repository = _cache(tmp_path / "cache", f"../../blobs/ab/{shared}")
    (tmp_path / "cache/blobs/ab").mkdir(parents=True)
    (tmp_path / "cache/blobs/ab" / shared).write_text("shared")
    assert repository.file("vocab.json").read_text() == "shared"


def test_a_made_up_cache_leads_nowhere_else(tmp_path: Path, secret: Path) -> None:
    repository = _cache(tmp_path / "cache", str(secret))
    with pytest.raises(ValueError, match=f"vocab.json is a link to {secret}, outside of"):
        repository.file("vocab.json")
