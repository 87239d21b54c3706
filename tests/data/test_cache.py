"""The cache of tokenised sources: complete or absent, made once, and the same as in memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.rows import Count, File, write_rows
from tigon.cli import main as tigon
from tigon.data import cache, clean_cache, store, usage
from tigon.data.cache import tokenised
from tigon.data.formats import Format

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/data"


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


def assert_same(a, b) -> None:
    for name in ("tokens", "offsets", "origin"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
    assert a.per_token.keys() == b.per_token.keys() and a.files == b.files
    for name in a.per_token:
        np.testing.assert_array_equal(a.per_token[name], b.per_token[name], strict=True)
    assert (a.groups is None) == (b.groups is None)
    if a.groups is not None:
        np.testing.assert_array_equal(a.groups, b.groups, strict=True)
    assert a.report == b.report


def in_memory(source: File):
    """All rows as one block."""
    from tests.data.rows import Lines

    lines = tuple(Path(source.name).read_text().splitlines())
    return Count()(Lines(source.name, source.format, 1, lines))


@pytest.mark.parametrize(("groups", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_the_cache_holds_what_encoding_gives(tmp_path, workers, groups):
    """Also where groups and weights only come in a later block."""
    sources = [write_rows(tmp_path / f"{i}.jsonl", 40 * i, i, groups=groups) for i in (1, 2)]
    late = tmp_path / "late.jsonl"
    plain = [f'{{"first": {i}, "sizes": [4]}}' for i in range(1, 30)]
    late.write_text("\n".join([*plain, '{"first": 9, "sizes": [3, 4], "weight": 0.25}', plain[0]]))
    sources.append(File(str(late), Format()))
    parts = tokenised(sources, Count(), workers=workers)
    for source, part in zip(sources, parts, strict=True):
        expected = in_memory(source)
        examples, targets = part.open()
        assert_same(examples, expected)
        assert isinstance(examples.tokens, np.memmap)
        counts = [
            int(expected.supervised[a + 1 : b].sum())
            for a, b in zip(expected.offsets, expected.offsets[1:], strict=False)
        ]
        assert targets.tolist() == counts and part.targets == sum(counts)
        assert (part.count, part.tokens) == (len(expected), len(expected.tokens))
        assert part.highest == expected.tokens.max()


def test_it_is_made_once_and_anew_only_for_other_content_or_options(tmp_path, root):
    source = write_rows(tmp_path / "a.jsonl", 20)
    encoder = Counting()
    (first,) = tokenised([source], encoder)
    made = encoder.calls
    assert made == 3
    os.utime(source.name, ns=(1, 1))  # touched, and equal
    moved = tmp_path / "b.jsonl"
    moved.write_bytes(Path(source.name).read_bytes())
    (again,) = tokenised([source], encoder)
    (other,) = tokenised([File(str(moved), Format())], encoder)
    assert encoder.calls == made and again.directory == first.directory
    assert other.directory == first.directory
    assert other.open()[0].where(0).startswith(f"{moved}:")
    tokenised([source], Count(option=1))
    assert len(directories(root)) == 2
    Path(source.name).write_text('{"first": 5, "sizes": [2]}\n')
    (changed,) = tokenised([source], encoder)
    assert encoder.calls == made + 1 and changed.count == 1


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "version"])
def test_a_damaged_cache_is_made_anew(tmp_path, root, damage):
    source = write_rows(tmp_path / "a.jsonl", 20)
    tokenised([source], Count())
    (directory,) = directories(root)
    manifest = directory / "manifest.json"
    if damage == "truncate":
        os.truncate(directory / "tokens.npy", 150)
    elif damage == "delete":
        (directory / "origin.npy").unlink()
    elif damage == "manifest":
        os.truncate(manifest, 20)
    else:
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 0'))
    (part,) = tokenised([source], Count())
    assert_same(part.open()[0], in_memory(source))
    assert directories(root) == [directory]


SLOW = """
    import os, sys, time
    from tests.data.rows import Count, File
    from tigon.data.cache import tokenised
    from tigon.data.formats import Format

    class Slow(Count):
        def __call__(self, block):
            print("block", os.getpid(), flush=True)
            time.sleep(float(sys.argv[2]))
            return super().__call__(block)

    if __name__ == "__main__":
        (part,) = tokenised([File(sys.argv[1], Format())], Slow(), workers=int(sys.argv[3]))
        print("made", part.count, flush=True)
"""


def slow(tmp_path: Path, source: File, seconds: float, workers: int = 0) -> subprocess.Popen:
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), source.name, str(seconds), str(workers)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_makes_it_and_the_other_waits(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", 40)
    outputs = [p.communicate(timeout=200)[0] for p in [slow(tmp_path, source, 0.2) for _ in "ab"]]
    blocks = [output.count("block") for output in outputs]
    assert sorted(blocks) == [0, 6]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_kill_while_it_is_made_leaves_nothing_in_the_way(tmp_path, root):
    source = write_rows(tmp_path / "a.jsonl", 60)
    process = slow(tmp_path, source, 0.3, workers=2)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    children = {int(line.split()[1]) for line in lines if line.startswith("block")}
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.suffix for path in directories(root)] == [".partial"]
    for child in children - {process.pid}:  # its workers end with it
        deadline = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
    other = write_rows(tmp_path / "b.jsonl", 5)
    tokenised([other], Count())  # whatever is made next, leftovers go
    assert [path.suffix for path in directories(root)] == [""]
    (part,) = tokenised([source], Count())
    assert_same(part.open()[0], in_memory(source))


def test_a_bad_row_ends_all_who_wait_and_is_not_remembered(tmp_path, root, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", 20)
    good = Path(source.name).read_text()
    Path(source.name).write_text(good + '{"bad": "no sense"}\n')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a\.jsonl:21: no sense"):
            tokenised([source], Count())
        assert directories(root) == []
    came = time.time() - 60  # as one that waits since before it failed
    monkeypatch.setattr(cache.time, "time", lambda: came)
    encoder = Counting()
    with pytest.raises(ValueError, match=r"a\.jsonl:21: no sense"):
        tokenised([source], encoder)
    assert encoder.calls == 0


def test_a_cache_without_its_bad_rows_serves_only_those_who_skip_them(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", 40)
    (part,) = tokenised([source], Count(), workers=0)
    assert part.report.skipped
    strict = Count()
    strict.skip_bad_rows = False
    with pytest.raises(ValueError, match="nothing"):
        tokenised([source], strict, workers=0)
    assert tokenised([source], Count(), workers=0)[0].count == part.count


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, root, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", 20)

    def full(self, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._Array, "append", full)
    with pytest.raises(OSError, match=r"^disk full: .*cache/data/.* needs about .* GiB") as raised:
        tokenised([source], Count())
    assert "\n" not in str(raised.value) and "TIGON_CACHE" in str(raised.value)
    assert directories(root) == []


def test_a_directory_in_place_of_a_cached_file_is_made_anew(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", 20)
    (part,) = tokenised([source], Count(), workers=0)
    tokens = part.directory / "tokens.npy"
    tokens.unlink()
    tokens.mkdir()
    manifest = part.directory / store.MANIFEST
    facts = json.loads(manifest.read_text())
    facts["bytes"]["tokens.npy"] = tokens.stat().st_size  # as a file could have
    manifest.write_text(json.dumps(facts))
    (again,) = tokenised([source], Count(), workers=0)
    assert_same(again.open()[0], in_memory(source))


def test_what_is_in_the_way_is_named(tmp_path, root, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", 20)

    def fails(name: Path, why: str) -> None:
        there = rf"cannot write the data cache .*: {name} is in the way \({why}\): move it away"
        with pytest.raises(OSError, match=f"{there}, or set TIGON_CACHE"):
            tokenised([source], Count(), workers=0)

    (part,) = tokenised([source], Count(), workers=0)
    shutil.rmtree(part.directory)
    part.directory.write_text("")
    fails(part.directory, "Not a directory")
    part.directory.unlink()
    (memo,) = root.glob("*.digest")
    memo.unlink()
    memo.mkdir()
    fails(memo, "Is a directory")
    monkeypatch.setenv("TIGON_CACHE", source.name)
    fails(Path(source.name), "File exists")
    monkeypatch.setenv("TIGON_CACHE", f"{source.name}/cache")
    fails(Path(source.name), "Not a directory")


def test_worker_processes_need_no_torch():
    """It takes seconds and hundreds of megabytes, in each of them."""
    code = "import sys, tigon.data.workers, tigon.data.encoders; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_source_without_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"first": 1, "sizes": []}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl has no good row of 1: nothing"):
        tokenised([File(str(path), Format())], Count())


def test_a_file_that_changes_while_it_is_read_is_not_taken_for_what_it_was(tmp_path, root):
    source = write_rows(tmp_path / "a.jsonl", 20)
    before = Path(source.name).read_bytes()

    class Changing(Counting):
        def __call__(self, block):
            Path(source.name).write_text('{"first": 5, "sizes": [2]}\n')
            return super().__call__(block)

    with pytest.raises(ValueError, match=r"a.jsonl was changed while it was read: start again"):
        tokenised([source], Changing(), workers=0)
    assert not directories(root)
    Path(source.name).write_bytes(before)
    (part,) = tokenised([source], Count(), workers=0)
    assert_same(part.open()[0], in_memory(source))


def test_other_content_of_the_same_size_and_time_is_other_content(tmp_path):
    """As `cp --preserve` and rsync leave it."""
    source = write_rows(tmp_path / "a.jsonl", 20)
    path = Path(source.name)
    tokenised([source], Count(), workers=0)
    status, content = path.stat(), bytearray(path.read_bytes())
    digit = content.index(b'"first": ') + len(b'"first": ')
    content[digit : digit + 1] = b"8" if content[digit : digit + 1] != b"8" else b"7"
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (part,) = tokenised([source], Count(), workers=0)
    assert_same(part.open()[0], in_memory(source))


def forget(monkeypatch) -> None:
    """As if the process that has used the cache were another, which has ended."""
    for file in usage._mine.values():
        file.close()
    monkeypatch.setattr(usage, "_mine", {})


def test_clean_removes_what_nobody_uses(tmp_path, root, monkeypatch, capsys):
    assert tigon(["data", "clean"]) == 0  # nothing is there yet
    sources = [write_rows(tmp_path / f"{i}.jsonl", 20, i) for i in range(3)]
    tokenised(sources, Count(), workers=0)
    others = [root / "notes.txt", root / "0123", tmp_path / "cache/mine"]
    for path in others:
        path.mkdir() if path.name == "0123" else path.write_text("mine")
    in_use = [path.name for path in directories(root) if path.name != "0123"]
    capsys.readouterr()
    assert tigon(["data", "clean"]) == 0
    assert capsys.readouterr().out == "removed: 0, of 0.00 GiB; 3 in use\n"
    assert {path.name for path in directories(root)} == {*in_use, "0123"}
    forget(monkeypatch)
    (last,) = tokenised(sources[:1], Count(), workers=0)
    monkeypatch.setattr(usage.time, "time", lambda: time.time_ns() / 1e9 + 86400)
    assert str(clean_cache(days=2)) == "removed: 0, of 0.00 GiB; 1 in use; 2 used lately"
    size = sum(f.stat().st_size for key in in_use for f in (root / key).iterdir())
    cleaned = clean_cache(days=0.5)
    assert (cleaned.removed, cleaned.used) == (2, 1) and cleaned.bytes < size
    assert {path.name for path in directories(root)} == {last.directory.name, "0123"}
    assert len(last.open()[0]) == last.count
    forget(monkeypatch)
    assert clean_cache().removed == 1
    assert {path.name for path in root.iterdir()} == {".lock", "0123", "notes.txt"}
    assert all(path.exists() for path in others)
    with pytest.raises(ValueError, match="days=nan"):
        clean_cache(float("nan"))
    assert tokenised(sources[:1], Count(), workers=0)[0].count == last.count


def test_clean_beside_names_that_others_have_made(tmp_path):
    entry, other = tmp_path / ("a" * 32), tmp_path / "other.txt"
    entry.mkdir()
    other.write_text("of somebody")
    (tmp_path / f"link{usage.USES}").symlink_to(other)
    (tmp_path / f"directory{usage.USES}").mkdir()
    noted = tmp_path / f"bytes{usage.USES}"
    noted.write_bytes(b"\xff\n" + b"a" * 32)
    with usage.lock(noted):
        assert (usage.clean(tmp_path).removed, entry.exists()) == (0, True)
    assert (usage.clean(tmp_path).removed, other.read_text()) == (1, "of somebody")


def test_what_killed_processes_left_goes_after_a_day(tmp_path, root):
    """But nothing that others have made, nor what another process may still write."""
    reference, key, end = root.parent / "reference", "ab" * 16, "cd" * 8
    old = [root / f".{key}.digest.{end}", reference / f".{key}.npy.{end}"]
    mine = [root / ".notes.digest", reference / f".{key}.npy.mine", reference / f"{key}.npy"]
    mine.append(root / "notes.partial/mine")
    new = [root / f".{key}.failed.{end}"]
    for path in (*old, *mine, *new):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (reference / f".{key}.json.{end}").symlink_to(tmp_path)
    for path in (*old, *mine):
        os.utime(path, (0, 0))
    cache.make_directory(reference)
    assert tokenised([write_rows(tmp_path / "x.jsonl", 9)], Count())
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*mine, *new))
    assert (reference / f".{key}.json.{end}").is_symlink()


def test_clean_does_not_interfere_with_a_run_that_tokenises(tmp_path, root):
    source = write_rows(tmp_path / "a.jsonl", 20)

    class Cleaning(Count):
        def __call__(self, block):
            with pytest.raises(OSError, match="is being written by a run that tokenises"):
                clean_cache()
            return super().__call__(block)

    (part,) = tokenised([source], Cleaning(), workers=0)
    assert part.count and clean_cache().used == 1


def test_a_cache_that_is_only_read(tmp_path, monkeypatch):
    """As one that `tigon data pack` has made on a file system that runs cannot write."""
    source = write_rows(tmp_path / "a.jsonl", 20)
    (made,) = tokenised([source], Count(), workers=0)
    forget(monkeypatch)
    path_open, file_open = Path.open, os.open

    def os_open(path, flags, *mode):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system", str(path))
        return file_open(path, flags, *mode)

    def only_read(self, mode="r", *rest, **options):
        if mode != "r":
            return os_open(self, os.O_WRONLY)
        return path_open(self, mode, *rest, **options)

    monkeypatch.setattr(usage.os, "open", os_open)
    monkeypatch.setattr(Path, "open", only_read)
    assert tokenised([source], Count())[0].count == made.count


def test_nothing_is_written_through_a_link_that_another_user_has_planted(
    tmp_path, root, monkeypatch
):
    """The cache may be where others can write."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root.mkdir(parents=True)
    pid = os.getpid()
    for name in (f".memo.{pid}", ".memo.0000000000000000", "memo"):
        (root / name).symlink_to(victim)
    monkeypatch.setattr(cache.secrets, "token_hex", lambda n: "0" * 2 * n)
    with pytest.raises(FileExistsError):
        cache.write(root / "memo", "theirs")
    monkeypatch.undo()
    cache.write(root / "memo", "theirs")
    assert victim.read_text() == "mine" and not (root / "memo").is_symlink()
    (root / "a.lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"), cache.lock(root / "a.lock"):
        pass
    assert not (tmp_path / "new").exists()


def test_the_cache_is_the_users_alone_unless_it_was_there(tmp_path, root, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", 5)
    tokenised([source], Count())
    assert root.parent.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv("TIGON_CACHE", str(shared))
    tokenised([source], Count())
    assert shared.stat().st_mode & 0o777 == 0o775
