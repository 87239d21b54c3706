"""In memory, from the cache and streamed: the same micro-batches, bit for bit."""

import json
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.rows import Count, File, write_rows
from tigon.data import Examples, Loader, MicroBatch, Mixture, Stream, join, split, tokenised, whole
from tigon.data.mixture import Order, Pattern
from tigon.data.store import Memory
from tigon.data.stream import stream_directory

SHAPE = {"batch_size": 8, "micro_batch_size": 2, "seed": 1}
ROWS = partial(whole, seq_len=40)
SIZE = 12  # groups in a window


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def entries(tmp_path) -> list[list[File]]:
    first = [write_rows(tmp_path / f"a{i}.jsonl", 20 + i, i) for i in range(2)]
    return [first, [write_rows(tmp_path / "b.jsonl", 30, 5, groups=True)]]


def encoded(source: File) -> Examples:
    encoder = Count()
    return join([encoder(block) for block in source.blocks()])


def in_memory(entries, weights=None) -> Mixture:
    parts = [[Memory.of(encoded(source)) for source in sources] for sources in entries]
    return Mixture(parts, size=SIZE, weights=weights)


def from_cache(entries, weights=None, workers: int = 0) -> Mixture:
    flat = iter(tokenised([s for sources in entries for s in sources], Count(), workers=workers))
    parts = [[next(flat) for _ in sources] for sources in entries]
    return Mixture(parts, size=SIZE, weights=weights)


def streamed(entries, weights=None, **options) -> Stream:
    return Stream(entries, Count(), size=SIZE, weights=weights, **{"workers": 0, **options})


def assert_equal(a: MicroBatch, b: MicroBatch) -> None:
    assert a.origins == b.origins and a.longest == b.longest
    for name in ("input_ids", "position_ids", "cu_seq_lens", "spans"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.attention_mask is None) == (b.attention_mask is None)
    for mine, theirs in ((a.per_token, b.per_token), (a.per_example, b.per_example)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


def assert_same_steps(a: Loader, b: Loader, steps: range) -> None:
    for step in steps:
        for one, other in zip(a.micro_batches(step), b.micro_batches(step), strict=True):
            assert_equal(one, other)
        assert a.counts(step) == b.counts(step) and a.where(step) == b.where(step)


def common(data: Loader, weights) -> int:
    """Steps that are the same in a stream: with weights, its first epoch never ends."""
    assert data.steps_per_epoch is not None and isinstance(data.windows, Mixture)
    if weights is None:
        return 2 * data.steps_per_epoch + 2
    rows = [len(data.pack(data.windows.window(n))) for n in range(data.windows.per_epoch - 1)]
    assert sum(rows) // 8 > 2
    return sum(rows) // 8


@pytest.mark.parametrize("rows", [ROWS, partial(whole, seq_len=40, packing=False)])
@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_memory_cache_and_stream_are_the_same(entries, weights, rows):
    memory = Loader(in_memory(entries, weights), rows, **SHAPE)
    assert memory.steps_per_epoch is not None and memory.steps_per_epoch > 4
    cache = Loader(from_cache(entries, weights), rows, **SHAPE)
    steps = range(common(memory, weights))
    assert_same_steps(memory, cache, range(2 * memory.steps_per_epoch))
    stream = Loader(streamed(entries, weights), rows, **SHAPE)
    try:
        assert_same_steps(memory, stream, steps)
    finally:
        stream.close()


def test_an_entry_without_a_place_in_some_windows(entries, monkeypatch):
    monkeypatch.setattr("tests.data.test_stream.SIZE", 2)
    weights = [1.0, 0.1]
    memory = Loader(in_memory(entries, weights), ROWS, **SHAPE)
    stream = Loader(streamed(entries, weights), ROWS, **SHAPE)
    try:
        assert_same_steps(memory, stream, range(4))
    finally:
        stream.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_stream_without_anything_to_learn_ends(entries, weights, monkeypatch):
    monkeypatch.setattr("tigon.data.loader.EMPTY", 100)
    data = Loader(streamed(entries, weights), partial(whole, seq_len=1), **SHAPE)
    with pytest.raises(ValueError, match="has anything to learn within seq_len 1"):
        data.micro_batches(0)
    data.close()


def test_worker_processes_change_nothing(entries, root):
    alone = Loader(from_cache(entries), ROWS, **SHAPE)
    assert_same_steps(alone, Loader(in_memory(entries), ROWS, **SHAPE), range(3))
    batches = [alone.micro_batches(step) for step in range(3)]
    shutil.rmtree(root)
    for loader in (
        Loader(from_cache(entries, workers=2), ROWS, **SHAPE),
        Loader(streamed(entries, workers=1), ROWS, **SHAPE),
    ):
        for step in range(3):
            for one, other in zip(batches[step], loader.micro_batches(step), strict=True):
                assert_equal(one, other)
        loader.close()


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_stream_goes_on_where_a_checkpoint_says(entries, weights, root):
    memory = Loader(in_memory(entries, weights), ROWS, **SHAPE)
    last = common(memory, weights)
    first = Loader(streamed(entries, weights), ROWS, **SHAPE)
    cursors = {}
    for step in range(last):
        first.micro_batches(step)
        cursors[step + 1] = json.loads(json.dumps(first.state(step + 1)))
    first.close()
    for step in range(1, last, 3):
        cursor = cursors[step]
        shared = {"name": "shared", "local_ranks": 2, "cursor": cursor}
        ranks = [
            Loader(
                streamed(entries, weights, local_rank=rank, **shared),
                ROWS,
                rank=rank,
                world=2,
                cursor=cursor,
                **SHAPE,
            )
            for rank in range(2)
        ]
        for later in range(step, min(step + 2, last)):
            one = memory.micro_batches(later)
            pair = [rank.micro_batches(later) for rank in ranks]
            two = [batch for both in zip(*pair, strict=True) for batch in both]
            for a, b in zip(one, two, strict=False):
                assert_equal(a, b)
        for rank in ranks:
            rank.close()
        assert not [*root.glob("streams/*/shared")]


def test_a_source_that_was_edited_under_its_name_is_noticed(entries):
    """As far as it was read: what is behind that may still be written."""
    first = Loader(streamed(entries), ROWS, **SHAPE)
    first.micro_batches(0)
    cursor = first.state(1)  # in the first file
    first.close()
    identity = first.identity()
    (place,) = cursor["places"]
    assert place[:2] == [0, 0] and place[2] > 0
    path = Path(entries[0][0].name)
    lines = path.read_text().splitlines(keepends=True)

    def goes_on() -> None:
        data = Loader(streamed(entries, cursor=cursor), ROWS, cursor=cursor, **SHAPE)
        try:
            data.micro_batches(1)
        finally:
            data.close()

    goes_on()
    later = Path(entries[0][1].name)
    later.write_text(later.read_text().replace('"first": ', '"first":1'))
    goes_on()
    assert first.identity() == identity  # no byte more or less
    for edited in ([lines[1], lines[0], *lines[2:]], lines[:5]):
        path.write_text("".join(edited))
        with pytest.raises(ValueError, match=r"a0\.jsonl was changed: what the run has read of it"):
            goes_on()
    assert first.identity() != identity


@pytest.mark.timeout(200)
def test_a_source_that_gives_nothing_does_not_keep_the_run_from_ending(entries, monkeypatch):
    """As a pipe that nobody writes to, or a network."""
    go_on = threading.Event()

    class Pipe(File):
        def blocks(self):
            go_on.wait()
            yield from super().blocks()

    monkeypatch.setattr("tigon.data.stream.PATIENCE", 0.2)
    stream = streamed([[Pipe(entries[0][0].name, entries[0][0].format)]])
    stream.close()
    assert not stream.directory.exists()
    go_on.set()
    stream._producer.join()
    assert not stream.directory.exists()


def test_a_stream_keeps_few_windows_and_can_go_back(entries):
    stream = streamed(entries)
    data = Loader(stream, ROWS, **{**SHAPE, "batch_size": 4})
    memory = Loader(in_memory(entries), ROWS, **{**SHAPE, "batch_size": 4})
    most = 0
    for step in range(80):
        data.micro_batches(step)
        most = max(most, len([p for p in stream.directory.iterdir() if p.is_dir()]))
    assert most <= 12 and not (stream.directory / "00000000").exists()
    assert_same_steps(memory, data, range(1, 4))
    data.close()
    assert not stream.directory.exists()


def test_errors_of_a_stream_reach_every_rank(entries, tmp_path):
    bad = Path(entries[1][0].name)
    bad.write_text(bad.read_text() + '{"bad": "no sense"}\n')
    shared = {"name": "shared", "local_ranks": 2}
    ranks = [Loader(streamed(entries, local_rank=r, **shared), ROWS, **SHAPE) for r in range(2)]
    for rank in ranks:
        with pytest.raises(ValueError, match=r"b\.jsonl:31: no sense"):
            for step in range(40):
                rank.micro_batches(step)
    for rank in ranks:
        rank.close()
    assert not [t for t in threading.enumerate() if t.name == "tigon stream"]


def test_streams_of_killed_processes_are_deleted(root):
    mine = stream_directory()
    left = mine.with_name("left")
    left.mkdir()
    (left / "lock").touch()
    other = stream_directory()
    assert not left.exists()
    assert mine.exists() and other != mine


def test_hosts_that_share_a_cache_have_streams_of_their_own(root, monkeypatch):
    """As containers, whose processes have the same numbers; locks may not reach other hosts."""
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    one = stream_directory("1-run")
    left = one.with_name("of-one")
    left.mkdir()
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    assert stream_directory("1-run") != one
    assert one.exists() and left.exists()


def test_split_text_is_the_same_in_windows(entries):
    rows = partial(split, seq_len=50)
    plain = [entries[0]]
    memory, cache = (Loader(f(plain), rows, **SHAPE) for f in (in_memory, from_cache))
    stream = Loader(streamed(plain), rows, **SHAPE)
    steps = range(2 * (memory.steps_per_epoch or 0))
    assert_same_steps(memory, cache, steps)
    assert_same_steps(memory, stream, steps)
    stream.close()
    total = sum(memory.counts(step)[0] for step in range(memory.steps_per_epoch or 0))
    assert total == sum(len(encoded(source).tokens) for source in entries[0])


def test_entries_have_their_shares_of_every_stretch():
    """Against the definition: the j-th of entry i comes at (j + 1/2) / w_i."""
    weights = [0.5, 0.2, 0.3]
    keys = sorted(((j + 0.5) / w, i, j) for i, w in enumerate(weights) for j in range(300))
    pattern = Pattern(weights)
    entry, index = pattern(np.arange(400))
    assert list(zip(entry.tolist(), index.tolist(), strict=True)) == [k[1:] for k in keys[:400]]
    for start in (0, 7, 123):
        drawn = pattern.drawn(start)
        assert drawn.tolist() == [sum(k[1] == i for k in keys[:start]) for i in range(3)]
    order = Order((4, 9, 5), tuple(weights))
    groups = order(18, 36)  # the second epoch goes on where the first has ended
    first = [g for g in order(0, 36).tolist() if g < 4]
    assert first == [i % 4 for i in range(18)]
    assert np.bincount(groups, minlength=18).sum() == 18
    assert order.passes() == pytest.approx([9 / 4, 18 * 0.2 / 9, 18 * 0.3 / 5])
    assert Pattern([1 / 3, 1 / 3, 1 / 3]).shares == [1, 1, 1]
