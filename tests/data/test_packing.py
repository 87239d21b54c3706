import numpy as np
import pytest

from tigon.data import Examples, split, whole
from tigon.data.packing import best_fit


def make(lengths, supervised=None) -> Examples:
    """Examples whose token ids are their places, from 1."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(offsets[-1], dtype=bool) if supervised is None else np.array(supervised)
    origin = np.stack([np.zeros(len(lengths)), np.arange(1, len(lengths) + 1)], axis=1)
    return Examples(
        np.arange(1, offsets[-1] + 1, dtype=np.int32),
        mask,
        offsets,
        origin.astype(np.int32),
        ("f",),
    )


def test_best_fit_is_the_textbook_algorithm():
    lengths = np.random.default_rng(0).integers(1, 60, size=300)
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        space = [64 - sum(lengths[b]) for b in bins]
        fitting = [s for s in space if s >= lengths[i]]
        if fitting:
            bins[space.index(min(fitting))].append(i)
        else:
            bins.append([i])
    ours = best_fit(lengths, 64)
    # Bins that are equally full may change places; how full they are may not
    assert sorted(sum(lengths[b]) for b in ours) == sorted(sum(lengths[b]) for b in bins)


def test_packing_splits_no_example_and_loses_none():
    lengths = np.random.default_rng(1).integers(2, 100, size=500)
    examples = make(lengths)
    rows = whole(examples, 100)
    assert sorted(rows.spans[:, 0].tolist()) == examples.offsets[:-1].tolist()
    assert sorted(rows.spans[:, 1].tolist()) == examples.offsets[1:].tolist()
    assert max(int((r[:, 1] - r[:, 0]).sum()) for r in (rows[i] for i in range(len(rows)))) <= 100
    assert (rows.truncated, rows.dropped) == (0, 0)
    one_each = whole(examples, 100, packing=False)
    assert one_each.spans.tolist() == list(
        map(list, zip(examples.offsets[:-1], examples.offsets[1:], strict=True))
    )
    assert len(one_each) == 500


def test_long_examples_are_cut_or_left_out_and_counted():
    examples = make([4, 9, 3])
    cut = whole(examples, 6, packing=False)
    assert (cut.truncated, cut.dropped) == (1, 0)
    assert cut.spans.tolist() == [[0, 4], [4, 10], [13, 16]]
    left_out = whole(examples, 6, packing=False, truncate=False)
    assert (left_out.truncated, left_out.dropped) == (0, 1)
    assert left_out.spans.tolist() == [[0, 4], [13, 16]]


def test_examples_with_nothing_left_to_learn_are_left_out():
    within, beyond, only_its_first = [0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [1, 0, 0]
    mask = np.array([*within, *beyond, *only_its_first], dtype=bool)
    examples = make([4, 6, 3], mask)
    rows = whole(examples, 4)
    assert rows.spans.tolist() == [[0, 4]]
    assert (rows.truncated, rows.dropped) == (0, 2)
    with pytest.raises(ValueError, match="no example of f has anything to learn within seq_len 2"):
        whole(examples, 2)


def test_text_is_joined_and_cut_without_loss():
    examples = make([5, 3, 9, 1])
    rows = split(examples, 4)
    assert [rows[i].tolist() for i in range(len(rows))] == [
        [[0, 4]],
        [[4, 5], [5, 8]],
        [[8, 12]],
        [[12, 16]],
        [[16, 17], [17, 18]],
    ]
    apart = split(examples, 4, packing=False)
    assert [apart[i].tolist() for i in range(len(apart))] == [
        [[0, 4]],
        [[4, 5]],
        [[5, 8]],
        [[8, 12]],
        [[12, 16]],
        [[16, 17]],
        [[17, 18]],
    ]
