"""Micro-batches made ahead by a thread: the loader's own, its errors, and its end."""

import threading
import time
from functools import partial

import pytest
import torch

from tests.data.rows import Count, File, write_rows
from tests.data.test_loader import assert_equal, loader
from tigon.data import Loader, Stream, pack_examples
from tigon.train import main
from tigon.train.logging import read_metrics
from tigon.train.prefetch import Prefetcher

CPU = torch.device("cpu")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_prefetcher_returns_the_loaders_batches():
    data = loader()
    with Prefetcher(loader(), CPU) as feed:
        for step in (0, 1, 2, 7, 8, 3, 4):  # a run may pass over rows, or go back
            for a, b in zip(feed(step), data.micro_batches(step), strict=True):
                assert_equal(a, b)
        assert len(threads()) == 1
    assert not threads()


def test_next_step_is_prefetched(monkeypatch):
    data = loader()
    make = data.micro_batches

    def slow(step):
        time.sleep(0.3)
        return make(step)

    monkeypatch.setattr(data, "micro_batches", slow)
    with Prefetcher(data, CPU) as feed:
        feed(0)
        assert feed.seconds > 0.25
        while not feed._pending[0].done():  # a step that takes longer than making the next
            time.sleep(0.01)
        feed(1)
        assert feed.seconds < 0.25


def test_thread_error_is_raised_by_the_step(monkeypatch):
    data = loader()
    make = data.micro_batches

    def bad(step):
        if step == 2:
            raise ValueError("a.jsonl:7: no sense")
        return make(step)

    monkeypatch.setattr(data, "micro_batches", bad)
    with pytest.raises(ValueError, match=r"a\.jsonl:7: no sense"), Prefetcher(data, CPU) as feed:
        for step in range(2):
            feed(step)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"a\.jsonl:7: no sense"):
                feed(2)
        feed(2)
    assert not threads()


def test_a_run_logs_how_long_it_waits(workspace):

    main(workspace.settings("fed", steps=3))
    rows = read_metrics(workspace.root / "fed/metrics.jsonl")
    for row in rows[:3]:
        assert 0 <= row["data_seconds"] <= row["step_seconds"]
        assert row["data_share"] == pytest.approx(row["data_seconds"] / row["step_seconds"])
    assert not threads()


@pytest.mark.timeout(200)
def test_stalled_stream_does_not_block_the_end(tmp_path, monkeypatch):
    """The thread waits for it, reading ahead."""
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tigon.train.prefetch.QUEUE_SIZE", 100)
    go_on, stalled = threading.Event(), threading.Event()
    path = write_rows(tmp_path / "a.jsonl", 60)

    class Stalled(File):
        def blocks(self, *bounds):
            for number, block in enumerate(super().blocks(*bounds)):
                if number == 5:
                    stalled.set()
                    go_on.wait()
                yield block

    stream = Stream([[Stalled(path.name, path.format)]], Count(), size=8, workers=0)
    data = Loader(stream, partial(pack_examples, seq_len=40), batch_size=2, micro_batch_size=2)
    with Prefetcher(data, CPU) as feed:
        feed(0)
        assert stalled.wait(60)
        time.sleep(0.3)  # what there is is read
    assert not threads()
    go_on.set()
