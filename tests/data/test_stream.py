"""In memory, from the cache and streamed: the same micro-batches, bit for bit."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.rows import Count, File, Killed, write_rows
from tests.support.examples import join
from tigon.data import (
    Examples,
    Loader,
    MicroBatch,
    Mixture,
    Stream,
    pack_documents,
    pack_examples,
    tokenize,
)
from tigon.data.mixture import DrawPattern

SHAPE = {"batch_size": 8, "micro_batch_size": 2, "seed": 1}
ROWS = partial(pack_examples, seq_len=40)
SIZE = 12  # groups in a window


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def entries(tmp_path):
    first = [write_rows(tmp_path / f"a{i}.jsonl", 20 + i, i) for i in range(2)]
    return [first, [write_rows(tmp_path / "b.jsonl", 30, 5, groups=True)]]


def encoded(source: File) -> Examples:
    encoder = Count()
    return join([encoder(block) for block in source.blocks()])


def in_memory(entries, weights=None) -> Mixture:
    parts = [[encoded(source) for source in sources] for sources in entries]
    return Mixture(parts, size=SIZE, weights=weights)


def from_cache(entries, weights=None, workers: int = 0) -> Mixture:
    parts = [tokenize(sources, Count(), workers=workers) for sources in entries]
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
        assert a.counts(step) == b.counts(step) and a.location(step) == b.location(step)


def common(data: Loader, weights) -> int:
    """Steps that are the same in a stream: with weights, its first epoch never ends."""
    assert data.steps_per_epoch is not None and isinstance(data.windows, Mixture)
    if weights is None:
        return 2 * data.steps_per_epoch + 2
    rows = [len(data.pack(data.windows.window(n))) for n in range(data.windows.per_epoch - 1)]
    assert sum(rows) // 8 > 2
    return sum(rows) // 8


DOCUMENTS = partial(pack_documents, seq_len=12)


@pytest.mark.parametrize("rows", [ROWS, partial(ROWS, packing=False), DOCUMENTS])
@pytest.mark.parametrize(("weights", "size"), [(None, 12), ([0.7, 0.3], 12), ([1.0, 0.1], 2)])
def test_memory_cache_and_stream_are_the_same(entries, weights, size, rows, monkeypatch):
    """Also where an entry has no place in some windows."""
    monkeypatch.setattr("tests.data.test_stream.SIZE", size)
    if rows is DOCUMENTS:  # which have no groups
        entries = [[source] for source in entries[0]]
    memory, cache, stream = (
        Loader(windows(entries, weights), rows, **SHAPE)
        for windows in (in_memory, from_cache, streamed)
    )
    assert memory.steps_per_epoch is not None and memory.steps_per_epoch > 3
    assert_same_steps(memory, cache, range(2 * memory.steps_per_epoch))
    assert_same_steps(memory, stream, range(common(memory, weights)))
    stream.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_stream_without_anything_to_learn_ends(entries, weights, monkeypatch):
    monkeypatch.setattr("tigon.data.loader.MAX_EMPTY_EXAMPLES", 100)
    data = Loader(streamed(entries, weights), partial(pack_examples, seq_len=1), **SHAPE)
    with pytest.raises(ValueError, match="has anything to learn within seq_len 1"):
        data.micro_batches(0)
    data.close()


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
        ranks = [
            Loader(
                streamed(entries, weights, cursor=cursor),
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


def test_identity_of_a_stream_is_of_its_content(entries):
    first, path = streamed(entries).identity(), Path(entries[0][0].name)
    text = path.read_text()
    path.write_text(text.replace("1", "2"))
    assert streamed(entries).identity() != first
    path.write_text(text)
    assert streamed(entries).identity() == first
    path.write_text(text + text)
    assert streamed(entries).identity() != first


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_can_go_back(entries, workers):
    stream = streamed(entries, workers=workers)
    data = Loader(stream, ROWS, **{**SHAPE, "batch_size": 4})
    memory = Loader(in_memory(entries), ROWS, **{**SHAPE, "batch_size": 4})
    for step in range(80):
        data.micro_batches(step)
    assert_same_steps(memory, data, range(1, 4))
    data.close()


def test_killed_process_of_a_stream_is_one_line(entries):
    stream = Stream(entries, Killed(), size=SIZE, workers=1)
    with pytest.raises(ChildProcessError, match="a process that tokenizes was killed"):
        stream.window(0)
    stream.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_row_of_a_stream_is_named(entries, workers):
    bad = Path(entries[1][0].name)
    bad.write_text(bad.read_text() + '{"bad": "no sense"}\n')
    data = Loader(streamed(entries, workers=workers), ROWS, **SHAPE)
    with pytest.raises(ValueError, match=r"^[^\n]*b\.jsonl:31: no sense$"):
        for step in range(40):
            data.micro_batches(step)
    data.close()


def test_entries_have_their_shares_of_every_stretch():
    """Against the definition: the j-th of entry i comes at (j + 1/2) / w_i."""
    weights = [0.5, 0.2, 0.3]
    keys = sorted(((j + 0.5) / w, i, j) for i, w in enumerate(weights) for j in range(300))
    pattern = DrawPattern(weights)
    entry, index = pattern(np.arange(400))
    assert list(zip(entry.tolist(), index.tolist(), strict=True)) == [k[1:] for k in keys[:400]]
    for start in (0, 7, 123):
        drawn = pattern.count_drawn(start)
        assert drawn.tolist() == [sum(k[1] == i for k in keys[:start]) for i in range(3)]
    tokens = [np.zeros(n, np.int32) for n in (4, 9, 5)]  # an example each
    parts = [Examples(x, np.arange(len(x) + 1), np.zeros((len(x), 2)), ("",), {}) for x in tokens]
    mixture = Mixture([[part] for part in parts], size=18, weights=weights)
    # The second epoch goes on where the first has ended
    drawn = np.concatenate([mixture.window(epoch).starts for epoch in range(2)])
    assert [g for g in drawn.tolist() if g < 4] == [i % 4 for i in range(18)]
    assert len(drawn) == 36
    assert mixture.passes() == pytest.approx([9 / 4, 18 * 0.2 / 9, 18 * 0.3 / 5])
    assert DrawPattern([1 / 3, 1 / 3, 1 / 3]).shares == [1, 1, 1]
