"""The cache of tokenised sources: complete or absent, made once, and the same as in memory."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.rows import Count, File, write_rows
from tigon.data import cache, store
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
    outputs = [p.communicate(timeout=60)[0] for p in [slow(tmp_path, source, 0.2) for _ in "ab"]]
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
        deadline = time.monotonic() + 10
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
