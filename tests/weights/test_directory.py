import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tigon.weights import files as module
from tigon.weights.files import (
    DiskFullError,
    LockedError,
    lock_file,
    new_directory,
    remove_directory,
)


def test_new_directory_appears_at_the_end_only(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with new_directory(target) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "x").write_text("x")
        assert not target.exists()
        assert directory.parent == target.parent and directory.name.startswith(".out.tmp-")
    assert (target / "sub" / "x").read_text() == "x"
    assert os.listdir(target.parent) == ["out"]


def test_new_directory_syncs_before_it_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = module.fsync, os.rename

    def noted_fsync(path: Path) -> None:
        events.append(path.name)
        fsync(path)

    def noted_rename(old: Path, new: Path) -> None:
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(module, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with new_directory(tmp_path / "out") as path:
        (path / "x").write_text("x")
        name = path.name
    assert events == ["x", name, "rename", tmp_path.name]


def test_new_directory_replaces_an_empty_one_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with new_directory(tmp_path / "link") as directory:
        (directory / "x").write_text("x")
    assert (tmp_path / "empty" / "x").read_text() == "x"
    (tmp_path / "file").touch()
    for name, what in {"empty": "a directory with files in it", "file": "a file"}.items():
        message = f"{tmp_path / name} exists and is {what}: remove it or choose another path"
        with pytest.raises(FileExistsError, match=message), new_directory(tmp_path / name):
            pytest.fail("the check comes before any work")
    with pytest.raises(FileExistsError, match="late exists"), new_directory(tmp_path / "late"):
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "y").touch()
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "late", "link"]


def test_new_directory_cannot_replace_a_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    message = f"{tmp_path} is a mount point: name a directory inside it"
    with pytest.raises(FileExistsError, match=message), new_directory(tmp_path):
        pytest.fail("the check comes before any work")


def write(target: Path, text: str, *, replace: bool = False) -> None:
    with new_directory(target, replace=replace) as directory:
        (directory / "a").write_text(text)
        (directory / "b").write_text(text)


def content(target: Path) -> list[str]:
    return [(target / name).read_text() for name in ("a", "b")]


@pytest.fixture(params=["exchange", "two renames"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that exchanges names in one step, and one that cannot."""
    if request.param != "exchange":
        monkeypatch.setattr(module, "_exchange", lambda first, second: False)
    return request.param


def test_replaced_when_the_new_one_is_whole(tmp_path: Path, system: str) -> None:
    target = tmp_path / "out"
    write(target, "one", replace=True)
    with new_directory(target, replace=True) as directory:
        (directory / "a").write_text("two")
        assert content(target) == ["one"] * 2
        (directory / "b").write_text("two")
    assert content(target) == ["two"] * 2
    with pytest.raises(KeyError), new_directory(target, replace=True) as directory:
        (directory / "a").write_text("three")
        raise KeyError
    assert content(target) == ["two"] * 2
    with pytest.raises(FileExistsError, match="out exists and is a directory with files"):
        write(target, "four")
    assert os.listdir(tmp_path) == ["out"]


def test_files_of_other_names_are_kept(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have a name at any moment."""
    target = tmp_path / "out"
    write(target, "one")
    for name in ("deep/er/notes", "old-1", "old-2"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(name)
    (target / "link").symlink_to(tmp_path)
    (target / "empty").mkdir()
    os.mkfifo(target / "pipe")
    rename = os.rename

    def watched(old: Path, new: Path) -> None:
        rename(old, new)
        assert list(tmp_path.glob("*/deep/er/notes")) or list(tmp_path.glob(".out*/deep/er/notes"))

    monkeypatch.setattr(os, "rename", watched)
    for text in ("two", "three"):
        with new_directory(target, replace=True, stale=lambda name: name == "old-1") as directory:
            (directory / "a").write_text(text)
            (directory / "b").write_text(text)
        assert content(target) == [text] * 2
        assert (target / "deep/er/notes").read_text() == "deep/er/notes"
        assert (target / "link").readlink() == tmp_path and (target / "pipe").is_fifo()
        expected = ["a", "b", "deep", "empty", "link", "old-2", "pipe"]
        assert sorted(os.listdir(target)) == expected
    assert os.listdir(tmp_path) == ["out"]


def test_without_hard_links_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    write(tmp_path / "out", "one")
    (tmp_path / "out/notes").write_text("mine")
    (tmp_path / "out/link").symlink_to("nowhere")
    monkeypatch.setattr(os, "link", refused)
    write(tmp_path / "out", "two", replace=True)
    assert (tmp_path / "out/notes").read_text() == "mine"
    assert os.readlink(tmp_path / "out/link") == "nowhere"
    assert content(tmp_path / "out") == ["two"] * 2


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "mine", "one")
    (tmp_path / "out").symlink_to("mine")
    with pytest.raises(FileExistsError, match="out is a link to mine, which is not replaced"):
        write(tmp_path / "out", "two", replace=True)
    assert content(tmp_path / "mine") == ["one"] * 2
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_current_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for path in (".", "..", ""):
        with (
            pytest.raises(FileExistsError, match="has the current directory"),
            new_directory(path, replace=True),
        ):
            pass
    (tmp_path / "inner").rmdir()  # a run goes on where its directory was removed
    with new_directory(tmp_path / "out", replace=True):
        pass
    assert (tmp_path / "out").is_dir()


def test_modes_of_replaced_directories_stay(tmp_path: Path) -> None:
    notes = tmp_path / "out/notes"
    notes.mkdir(parents=True)
    (notes / "mine").touch()
    for path in (notes, notes.parent):
        path.chmod(0o700)
    with new_directory(tmp_path / "out", replace=True):
        pass
    assert {path.stat().st_mode & 0o777 for path in (notes, notes.parent)} == {0o700}


def test_link_to_nowhere_is_removed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert remove_directory(tmp_path / "out") and not os.path.lexists(tmp_path / "out")


def test_a_rename_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out", os.rename
    write(target, "one")
    monkeypatch.setattr(module, "_exchange", lambda first, second: False)

    def failing(old: Path, new: Path) -> None:
        if ".tmp-" in str(old):
            raise OSError(errno.EIO, "bad disk")
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="bad disk"):
        write(target, "two", replace=True)
    assert content(target) == ["one"] * 2
    assert os.listdir(tmp_path) == ["out"]


def test_leftovers_of_killed_writers_alone_are_removed(tmp_path: Path) -> None:
    left = [f".out.tmp-{'12' * 8}", f".out.tmp-{'0f' * 8}", f".out.old-{'34' * 8}"]
    others = [".out.old", ".out.tmp-1234", ".out.tmp-mine", f".other.tmp-{'12' * 8}"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".out.lock").write_text("process 1 on nowhere")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "one")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "out"])
    assert all(os.listdir(tmp_path / name) == ["file"] for name in others)


def test_a_lock_names_the_process_that_has_it(tmp_path: Path) -> None:
    def lock() -> Any:
        return lock_file(tmp_path / "lock", tmp_path / "out", "in use", "choose another path")

    with lock() as held:
        assert held
        with pytest.raises(LockedError, match=rf"in use by process {os.getpid()} on .*: wait") as e:
            lock().__enter__()
        assert e.value.by_this_process
        (tmp_path / "lock").write_text("")  # as on a full disk
        with pytest.raises(LockedError, match="in use by another process: wait") as e:
            lock().__enter__()
        assert e.value.by_this_process
    with lock() as held:
        assert held


def test_a_lock_of_another_container_with_this_process_number(tmp_path: Path) -> None:
    name = f"process {os.getpid()} on {socket.gethostname()}"
    with (tmp_path / "lock").open("w") as file:
        file.write(name)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=f"in use by {name}: wait") as e:
            lock_file(tmp_path / "lock", tmp_path / "out", "in use", "wait").__enter__()
        assert not e.value.by_this_process


def test_a_file_of_the_locks_name_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").write_text("my notes")
    with pytest.raises(FileExistsError, match=r"\.out\.lock is a file, not a lock"):
        write(tmp_path / "out", "one")
    assert (tmp_path / ".out.lock").read_text() == "my notes"


def test_a_writer_killed_between_two_renames_is_made_good(tmp_path: Path) -> None:
    write(tmp_path / f".out.old-{'12' * 8}", "one")
    with pytest.raises(FileExistsError, match="out exists"):
        write(tmp_path / "out", "two")
    assert content(tmp_path / "out") == ["one"] * 2
    assert os.listdir(tmp_path) == ["out"]


def test_two_writers_of_one_directory(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("mine")
        holder = rf"out is being written by process {os.getpid()} on \S+: wait until it ends"
        with pytest.raises(FileExistsError, match=holder):
            write(tmp_path / "out", "yours")
        write(tmp_path / "other", "yours")
        assert (directory / "a").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    assert os.listdir(tmp_path / "out") == ["a"]


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell leftovers from what others write; names differ all the same."""

    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    left = tmp_path / f".out.tmp-{'12' * 8}"
    left.mkdir()
    with pytest.warns(UserWarning, match="has no locks"):
        write(tmp_path / "out", "one")
    assert content(tmp_path / "out") == ["one"] * 2
    assert left.exists()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk became full while .*out was written: 0.0 MiB needed"),
        (errno.EFBIG, "File too large: '.*out'"),
    ],
)
def test_a_write_that_fails_says_where(tmp_path: Path, number: int, message: str) -> None:
    """Errors of a descriptor name no file."""
    with pytest.raises(OSError, match=message), new_directory(tmp_path / "out"):
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"the disk of {tmp_path} is too full: .* GiB needed"
    with (
        pytest.raises(DiskFullError, match=message),
        new_directory(tmp_path / "out", needed=1 << 60),
    ):
        pytest.fail("the check comes before any work")
    assert list(tmp_path.iterdir()) == []

    def read_only(path: Path, flags: int, mode: int = 0) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match=f"{tmp_path}/out cannot be written: Read-only file system"):
        write(tmp_path / "out", "one")
    assert list(tmp_path.iterdir()) == []
