"""Tokenized sources in the cache: complete or absent, made once, and the same as in memory."""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from tests.data.rows import Count, File, Killed, write_rows
from tests.support.examples import join
from tests.support.small import CHATML, write_tokenizer
from tests.train.ranks import Ranks
from tigon.cli import main as tigon
from tigon.data import (
    Block,
    ChatEncoder,
    Examples,
    Format,
    cache,
    clean_cache,
    find_sources,
    tokenize,
    tokenized,
)
from tigon.tokenizer import Tokenizer
from tigon.utils import paths
from tigon.weights import files

pytest.importorskip("datasets", reason="needs tigon[train]")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/data"


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "a.jsonl", 20)


class Counting(Count):
    """Notes every block that it encodes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __call__(self, block):
        self.calls += 1
        return super().__call__(block)


def directories(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def assert_same(parts: list[Examples], b: Examples) -> None:
    a = join(parts)
    for name in ("tokens", "offsets", "origin"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
    assert a.per_token.keys() == b.per_token.keys() and a.files == b.files
    for name in a.per_token:
        np.testing.assert_array_equal(a.per_token[name], b.per_token[name], strict=True)
    assert (a.groups is None) == (b.groups is None)
    if a.groups is not None:
        np.testing.assert_array_equal(a.groups, b.groups, strict=True)
    assert a.report == b.report


def in_memory(*sources: File) -> Examples:
    """All rows of each source as one block."""
    return join([Count()(Block(s.name, s.format, list(s.read()))) for s in sources])


@pytest.mark.parametrize(("groups", "workers"), [(False, 0), (True, 0), (True, 2), (False, None)])
def test_cache_holds_what_encoding_gives(tmp_path, workers, groups):
    """Also where groups and weights only come in a later block, and for a file within a file."""
    sources = [write_rows(tmp_path / f"{i}.jsonl", 40 * i, i, groups=groups) for i in (1, 2)]
    late = tmp_path / "late.jsonl"
    plain = [f'{{"first": {i}, "sizes": [4]}}' for i in range(1, 30)]
    late.write_text("\n".join([*plain, '{"first": 9, "sizes": [3, 4], "weight": 0.25}', plain[0]]))
    sources.append(File(str(late), Format()))
    parts = tokenize(sources, Count(), workers=workers)
    expected = in_memory(*sources)
    assert_same(parts, expected)
    counts = [
        int(expected.supervised[a + 1 : b].sum())
        for a, b in zip(expected.offsets, expected.offsets[1:], strict=False)
    ]
    assert np.concatenate([part.targets for part in parts]).tolist() == counts
    assert max(part.highest for part in parts) == expected.tokens.max()
    assert len({part.key for part in parts}) == len(parts) == 6 + 12 + 5
    assert not parts[0].tokens.flags.owndata  # mapped


def test_data_is_tokenized_once_for_its_content(source, tmp_path, root):
    encoder = Counting()
    first = tokenize([source], encoder)
    made = encoder.calls
    assert made == 3
    os.utime(source.name, ns=(1, 1))  # touched, and equal
    moved = tmp_path / "b.jsonl"
    moved.write_bytes(Path(source.name).read_bytes())
    again = tokenize([source], encoder)
    other = tokenize([File(str(moved), Format())], encoder)
    assert encoder.calls == made
    assert [p.key for p in first] == [p.key for p in (*again[:1], *other[1:])]
    assert other[0].location(0).startswith(f"{moved}:")
    tokenize([source], Count(option=1))
    assert len(directories(root)) == 2
    Path(source.name).write_text('{"first": 5, "sizes": [2]}\n')
    (changed,) = tokenize([source], encoder)
    assert encoder.calls == made + 1 and len(changed) == 1


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty"])
def test_damaged_data_is_made_anew(source, root, damage):
    tokenize([source], Count())
    (directory,) = directories(root)
    (file,) = directory.rglob("*.arrow")
    if damage == "delete":
        file.unlink()
    else:
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size // 2)
    assert_same(tokenize([source], Count()), in_memory(source))
    assert directories(root) == [directory]


class Slow(Count):
    """Says which process makes each block, and takes time for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __call__(self, block: Block) -> Examples:
        print("block", os.getpid(), flush=True)
        time.sleep(self.seconds)
        return super().__call__(block)


def tokenize_slowly(source: File, seconds: float, workers: int) -> None:
    parts = tokenize([source], Slow(seconds), workers=workers)
    print("made", sum(map(len, parts)), flush=True)


@pytest.mark.slow
def test_second_process_waits_for_the_first(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", 40)
    both = [Ranks(1, tokenize_slowly, source, 0.2, 0) for _ in "ab"]
    outputs = [process.finish() for process in both]
    blocks = [output.count("block") for output in outputs]
    assert sorted(blocks) == [0, 6]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def session(leader: int) -> set[int]:
    """The processes of a session that run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, *rest = stat.read_text().rpartition(")")[2].split()
            if int(rest[2]) == leader and state != "Z":
                found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_killed_process_leaves_nothing_in_the_way(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", 60)
    running = Ranks(1, tokenize_slowly, source, 1.0, 2)
    (process,), deadline = running.processes, time.monotonic() + 200
    while (printed := running.printed).count("\n") < 3:
        assert time.monotonic() < deadline and process.is_alive(), running.errors
        time.sleep(0.02)
    children = {int(line.split()[1]) for line in printed.splitlines()[:3] if "block" in line}
    assert children and process.pid not in children
    assert children < session(process.pid)  # there is the manager of their queue, too
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not session(process.pid)  # all that it has started ends with it
    assert_same(tokenize([source], Count()), in_memory(source))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_row_is_an_error_and_leaves_nothing(source, root, workers):
    """But what skipped it serves those who skip."""
    with open(source.name, "a") as file:
        file.write('{"bad": "no sense"}\n')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a\.jsonl:21: no sense"):
            tokenize([source], Count(), workers=workers)
        assert directories(root) == []
    parts = tokenize([source], Count(skip_bad_rows=True), workers=workers)
    assert sum(part.report.skipped for part in parts) == 1
    with pytest.raises(ValueError, match="no sense"):
        tokenize([source], Count(), workers=workers)
    assert len(directories(root)) == 1


class Full(Count):
    """Finds no room on the disk."""

    def __call__(self, block):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("workers", [0, 2])
def test_full_disk_is_one_line_and_leaves_nothing(source, root, workers):
    with pytest.raises(OSError, match=r"^the disk became full while .*cache/data") as raised:
        tokenize([source], Full(), workers=workers)
    assert "\n" not in str(raised.value) and "TIGON_CACHE" in str(raised.value)
    assert directories(root) == []


def test_a_disk_without_a_free_byte_is_named(source, root, monkeypatch):
    monkeypatch.setattr("datasets.builder.has_sufficient_disk_space", lambda *_, **__: False)
    with pytest.raises(OSError, match=r"^the disk became full while .*cache/data.*TIGON_CACHE"):
        tokenize([source], Count(), workers=0)
    assert directories(root) == []


def test_what_ends_a_process_is_one_line(source, root, monkeypatch):
    with pytest.raises(ChildProcessError, match=r"killed, as the system does .*workers=0"):
        tokenize([source], Killed(), workers=2)
    assert directories(root) == []
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda p: usage(p)._replace(free=0) if p == tokenized.SHARED_MEMORY else usage(p),
    )
    with pytest.raises(ChildProcessError, match=r"^/dev/shm is full, .*workers=0$"):
        tokenize([source], Full(), workers=2)


def test_source_without_examples_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"first": 1, "sizes": []}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl has nothing to learn: .* 1 of 1 row"):
        tokenize([File(str(path), Format())], Count())


class OnePass(list):
    """A list that is gone through once."""

    def __iter__(self):
        assert not getattr(self, "begun", False)
        self.begun = True
        return super().__iter__()


# In none of the chats that the cache's key tries
TELLS_DAY = "{{ strftime_now('%d %b') if messages[0].content == 'day?' }}" + CHATML


@pytest.mark.parametrize("workers", [0, 1])
def test_data_with_another_time_in_them_are_made_anew(tmp_path, root, workers):
    path, answer = tmp_path / "chats.jsonl", {"role": "assistant", "content": "x"}
    chats = [[{"role": "user", "content": text}, answer] for text in ("x", "day?")]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = Tokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template, made = TELLS_DAY, []
    for hour, day in ((9, 1), (23, 1), (9, 2)):
        tokenizer.strftime_now = datetime(2026, 5, day, hour)
        parts = tokenize(find_sources(str(path)), ChatEncoder(tokenizer), workers=workers)
        assert f"0{day} May<|im_start|>" in tokenizer.decode(join(parts).tokens)
        made.append([file.stat().st_mtime_ns for file in root.rglob("*.arrow")])
    assert made[0] == made[1] != made[2]


def test_many_files_take_a_time_of_their_number(tmp_path, root):
    """And leave no file each in the cache."""
    sources = [write_rows(tmp_path / f"{i}.jsonl", 5, i) for i in range(3)]
    parts = tokenize(sources, Count(), workers=0)
    assert not list(root.glob("*.digest"))
    tokenized._check_parts(sources, OnePass(parts), Count())


def test_same_size_and_time_is_other_content(source, root, monkeypatch):
    """As `cp --preserve` and rsync leave it."""
    monkeypatch.setattr(tokenized, "MEMO_BYTES", 0)
    path = Path(source.name)
    tokenize([source], Count(), workers=0)
    status, content = path.stat(), bytearray(path.read_bytes())
    digit = content.index(b'"first": ') + len(b'"first": ')
    content[digit : digit + 1] = b"8" if content[digit : digit + 1] != b"8" else b"7"
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_same(tokenize([source], Count(), workers=0), in_memory(source))
    assert len(list(root.glob("*.digest"))) == 2


def test_what_is_in_the_way_is_named(source, monkeypatch):
    for place, why in ((source.name, "File exists"), (f"{source.name}/cache", "Not a directory")):
        monkeypatch.setenv("TIGON_CACHE", place)
        with pytest.raises(OSError, match=rf"data cache {place}.*\({why}\): set TIGON_CACHE"):
            tokenize([source], Count(), workers=0)


def test_clean_removes_what_was_not_used_lately(tmp_path, root, capsys):
    assert tigon(["data", "clean"]) == 0  # nothing is there yet
    sources = [write_rows(tmp_path / f"{i}.jsonl", 20, i) for i in range(3)]
    for source in sources:
        last = tokenize([source], Count(), workers=0)
    others = [root / "notes.txt", root / "0123", tmp_path / "cache/mine"]
    for path in others:
        path.mkdir() if path.name == "0123" else path.write_text("mine")
    old = [path for path in directories(root) if path.name != "0123"]
    for path in old[:2]:
        os.utime(path, (0, 0))
    assert str(clean_cache(days=1)) == "removed: 2, of 0.00 GiB; 1 used lately"
    assert {path.name for path in directories(root)} == {old[2].name, "0123"}
    capsys.readouterr()
    assert tigon(["data", "clean"]) == 0
    assert capsys.readouterr().out == "removed: 1, of 0.00 GiB\n"
    assert all(path.exists() for path in others)
    assert_same(last, in_memory(sources[2]))  # a process that has it open
    with pytest.raises(ValueError, match="days=nan"):
        clean_cache(float("nan"))
    assert_same(tokenize(sources[2:], Count(), workers=0), in_memory(sources[2]))


def test_clean_leaves_data_that_is_being_made(source):

    class Cleaning(Count):
        def __call__(self, block):
            assert clean_cache().removed == 0
            return super().__call__(block)

    assert tokenize([source], Cleaning(), workers=0) and clean_cache().removed == 1


def test_cache_that_is_only_read(source, monkeypatch):
    """As one that `tigon data pack` has made on a file system that runs cannot write."""
    made = tokenize([source], Count(), workers=0)
    file_open = os.open

    def os_open(path, flags, *mode, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system", str(path))
        return file_open(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", os_open)
    monkeypatch.setattr(tokenized, "write_text", lambda *_: os_open("", os.O_WRONLY))
    assert len(tokenize([source], Count())) == len(made)


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path, root):
    """But nothing that others have made, nor what another process may still write."""
    reference, key, end = root.parent / "reference", "ab" * 16, "cd" * 8
    old = [root / f".{key}.digest.{end}", reference / f".{key}.npy.{end}"]
    mine = [root / ".notes.digest", reference / f".{key}.npy.mine", reference / f"{key}.npy"]
    new = [root / f".{key}.json.{end}"]
    for path in (*old, *mine, *new):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (reference / f".{key}.json.{end}").symlink_to(tmp_path)
    for path in (*old, *mine):
        os.utime(path, (0, 0))
    cache.make_directory(reference)
    cache.make_directory(root)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*mine, *new))
    assert (reference / f".{key}.json.{end}").is_symlink()


def test_nothing_is_written_through_a_planted_link(tmp_path, root, monkeypatch):
    """The cache may be where others can write."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root.mkdir(parents=True)
    for name in (".memo.0000000000000000", "memo"):
        (root / name).symlink_to(victim)
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    with pytest.raises(FileExistsError):
        paths.write_text(root / "memo", "theirs")
    monkeypatch.undo()
    paths.write_text(root / "memo", "theirs")
    assert victim.read_text() == "mine" and not (root / "memo").is_symlink()


def test_cache_is_the_users_alone_unless_it_was_there(tmp_path, root, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", 5)
    tokenize([source], Count())
    assert root.parent.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv("TIGON_CACHE", str(shared))
    tokenize([source], Count())
    assert shared.stat().st_mode & 0o777 == 0o775
