from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tigon.data import Examples, Mixture, Window, pack_documents, pack_examples
from tigon.data.collate import collate_rows
from tigon.data.packing import MAX_KEY_COPIES, TruncationStats, pack_best_fit


def mixture(examples: Examples, size: int = 2**16) -> Mixture:
    """Windows of examples in memory."""
    return Mixture([[examples]], size=size)


def window(examples: Examples) -> Window:
    """All of them, in order."""
    return mixture(examples).window(0)


def make(lengths, supervised=None, *, per_example=None, groups=None, **per_token) -> Examples:
    """Examples whose token ids are their places, from 1."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(offsets[-1], dtype=bool) if supervised is None else np.array(supervised)
    origin = np.stack([np.zeros(len(lengths)), np.arange(1, len(lengths) + 1)], axis=1)
    return Examples(
        np.arange(1, offsets[-1] + 1, dtype=np.int32),
        offsets,
        origin.astype(np.int32),
        ("f",),
        {"supervised": mask, **per_token},
        {} if per_example is None else per_example,
        groups,
    )


def test_best_fit_is_the_textbook_algorithm():
    lengths = np.random.default_rng(0).integers(1, 60, size=300)
    bins = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        space = [64 - sum(lengths[b]) for b in bins]
        fitting = [s for s in space if s >= lengths[i]]
        if fitting:
            bins[space.index(min(fitting))].append(i)
        else:
            bins.append([i])
    ours = pack_best_fit(lengths, 64)
    # Bins that are equally full may change places; how full they are may not
    assert sorted(sum(lengths[b]) for b in ours) == sorted(sum(lengths[b]) for b in bins)


def of_prompts(groups) -> Examples:
    """Groups of sequences, each a prompt and an answer, of which the latter is learned."""
    each = [pair for group in groups for pair in group]
    examples = make(
        [len(prompt + answer) for prompt, answer in each],
        [place >= len(p) for p, a in each for place in range(len(p + a))],
        groups=np.cumsum([0, *map(len, groups)]),
    )
    tokens = np.array([i for prompt, answer in each for i in prompt + answer], dtype=np.int32)
    return replace(examples, tokens=tokens)


# The second has nothing to learn within 4 tokens, the third nothing behind its first
LATE = make([4, 6, 3], np.array([0, 0, 1, 1, *(0, 0, 0, 0, 1, 1), 1, 0, 0], dtype=bool))
# Groups of two, one of them with an answer of one token, which has no target
GROUPS = make([3, 9, 2, 4, 1, 9, 8, 7], groups=np.array([0, 2, 4, 6, 8]))
CUT_GROUPS = [[0, 3], [3, 8], [12, 14], [14, 18], [28, 32], [36, 40]]
LONG_PROMPT = list(range(1, 301))
PAIR = of_prompts([[(LONG_PROMPT, [7] * 20), (LONG_PROMPT, [8] * 20)]])
SHARED = {"share_prompts": True}
LIMITS = [
    (make([4, 9, 3]), 6, {}, [[0, 4], [4, 10], [13, 16]], {"row_cuts": 1}),
    (make([4, 9, 3]), 6, {"truncate": False}, [[0, 4], [13, 16]], {"row_drops": 1}),
    (LATE, 4, {}, [[0, 4]], {"row_drops": 1, "unlearned": 1}),
    (LATE, 2, {}, [], {"row_drops": 2, "unlearned": 1}),
    (
        LATE,
        6,
        {"max_length": 4},
        [[0, 4]],
        {"max_length_drops": 1, "unlearned": 1, "min_seq_len": 4},
    ),
    (GROUPS, 8, {}, CUT_GROUPS, {"row_cuts": 2, "unlearned": 1, "min_seq_len": 15}),
    (
        *(GROUPS, 8, {"truncate": False}, [[12, 14], [14, 18]]),
        {"row_drops": 2, "unlearned": 1, "min_seq_len": 15},
    ),
    (GROUPS, 8, {"max_length": 6}, CUT_GROUPS, {"row_cuts": 2, "unlearned": 1, "min_seq_len": 12}),
    (
        *(GROUPS, 12, {"max_length": 6}, None),
        {"max_length_cuts": 2, "unlearned": 1, "min_seq_len": 12},
    ),
    # Each has a line of its own
    (
        *(GROUPS, 8, {"packing": False}),
        [[0, 3], [3, 11], [12, 14], [14, 18], [28, 36], [36, 43]],
        {"row_cuts": 1, "unlearned": 1},
    ),
    # A pair that shares its prompt has to fit with one of it
    (PAIR, 512, SHARED, [[0, 320], [619, 640]], {"min_seq_len": 341}),
    (PAIR, 341, SHARED, [[0, 320], [619, 640]], {"min_seq_len": 341}),
    (PAIR, 340, SHARED, [[0, 319], [619, 639]], {"row_cuts": 1, "min_seq_len": 341}),
    (PAIR, 512, {}, [], {"row_drops": 1, "min_seq_len": 640}),
    (PAIR, 640, {}, [[0, 320], [320, 640]], {"min_seq_len": 640}),
]


@pytest.mark.parametrize(("examples", "seq_len", "options", "spans", "counts"), LIMITS)
def test_long_examples_are_cut_or_left_out_and_counted(examples, seq_len, options, spans, counts):
    options = {"packing": examples.groups is not None} | options
    rows = pack_examples(window(examples), seq_len, **options)
    longest = int(np.diff(examples.offsets).max())
    counts = {"longest": longest, "min_seq_len": longest} | counts
    assert rows.truncation == TruncationStats(**counts)
    assert spans is None or sorted(rows.spans.tolist()) == spans


def test_text_is_joined_and_cut_without_loss():
    examples = make([5, 3, 9, 1])
    rows = pack_documents(window(examples), 4)
    assert [rows[i].tolist() for i in range(len(rows))] == [
        [[0, 4]],
        [[4, 5], [5, 8]],
        [[8, 12]],
        [[12, 16]],
        [[16, 17], [17, 18]],
    ]
    edges = [0, 4, 5, 8, 12, 16, 17, 18]
    unpacked = pack_documents(window(examples), 4, packing=False)
    rows = [unpacked[i].tolist() for i in range(len(unpacked))]
    assert rows == [[[a, b]] for a, b in pairwise(edges)]


def test_groups_share_a_row_and_keep_their_order():
    lengths = np.random.default_rng(2).integers(2, 40, size=200)
    examples = make(lengths, groups=np.arange(0, 201, 2))
    rows = pack_examples(window(examples), 100)
    assert len(rows) < 100 and (rows.truncation.truncated, rows.truncation.dropped) == (0, 0)
    seen = []
    for i in range(len(rows)):
        starts = examples.index(rows[i][:, 0])
        assert (starts[::2] % 2 == 0).all() and (starts[1::2] == starts[::2] + 1).all()
        assert np.diff(rows[i]).sum() <= 100
        seen += starts.tolist()
    assert sorted(seen) == list(range(200))
    apart = pack_examples(window(examples), 100, packing=False)
    assert len(apart) == 100 and apart[3].tolist() == apart.spans[6:8].tolist()


def test_groups_cannot_be_split():
    with pytest.raises(ValueError, match="groups of examples cannot be split"):
        pack_documents(window(GROUPS), 8)


def test_prompts_of_a_group_are_there_once():
    one, two = [1, 2, 3, 4], [5, 6]
    groups = [
        [(one, [7]), (one, [8, 9])],
        # The last goes on from the one before it: it has nothing in common with the first
        [(two, [7, 7]), (two, [7, 8]), ([9, *two], [1]), ([9, *two], [2])],
        [([5], [7]), ([5], [8])],  # the token that predicts the answer is there twice
    ]
    examples = of_prompts(groups)
    rows = pack_examples(window(examples), 40, share_prompts=True)
    assert len(rows) == 1 and rows.truncation.truncated == 0
    assert rows.shared.tolist() == [0, 1, 0, 2, 0, 3, 0, 0]
    twice = pack_examples(window(examples), 40)
    assert rows.spans.shape == twice.spans.shape
    assert (rows.spans[:, 0] - rows.shared).tolist() == twice.spans[:, 0].tolist()
    assert rows.spans[:, 1].tolist() == twice.spans[:, 1].tolist() and not twice.shared.any()
    corpus = mixture(examples).corpus
    batch = collate_rows(corpus, [(corpus, rows, 0)])
    starts = batch.host_spans[:, 0].tolist()
    prefixes = batch.prefixes[: len(starts)]
    for own, shared, (first, end), start in zip(
        rows.spans, rows.shared, prefixes, starts, strict=True
    ):
        assert end - first == shared
        ids = batch.input_ids[0, first:end].tolist() + batch.input_ids[0, start:].tolist()
        wanted = examples.tokens[own[0] - shared : own[1]].tolist()
        assert ids[: len(wanted)] == wanted
        assert batch.position_ids[0, start] == shared
    assert batch.prefixes[len(starts) :].tolist() == [[0, 0]]  # padding


def test_short_prompts_and_lines_of_one_sequence_are_not_shared():
    examples = of_prompts([[([1, 2], [3] * 90), ([1, 2], [4] * 90)]])
    assert not pack_examples(window(examples), 200, share_prompts=True).shared.any()
    examples = of_prompts([[([1, 2, 3, 4], [3]), ([1, 2, 3, 4], [4])]])
    assert not pack_examples(window(examples), 200, packing=False, share_prompts=True).shared.any()
    assert pack_examples(window(examples), 200, share_prompts=True).shared.tolist() == [0, 3]


LATER = [([1, 2], [3, 4, 5, 6, 7]), ([1, 2], [3, 4, 5, 6, 8])]  # they part at token 7
SHORTER = [([1, 2], [3, 4]), ([1, 2], [3, 4, 5, 6, 7])]
EARLY = [([1, 2], [3, 4, 5, 6, 7]), ([1, 2], [9, 4, 5, 6, 7])]


@pytest.mark.parametrize(
    ("seq_len", "options", "groups", "counts"),
    [
        (13, {}, [0, 1, 2], {}),
        (
            13,
            {"max_length": 6},
            [1, 2],
            {"max_length_cuts": 2, "max_length_drops": 1, "min_seq_len": 11},
        ),
        (
            13,
            {"max_length": 4},
            [2],
            {"max_length_cuts": 1, "max_length_drops": 2, "min_seq_len": 7},
        ),
        (12, {}, [1, 2], {"row_cuts": 1, "row_drops": 1}),
        (12, {"distinct": False}, [0, 1, 2], {"row_cuts": 2}),
        (13, {"max_length": 4, "truncate": False}, [], {"max_length_drops": 3, "min_seq_len": 0}),
    ],
)
def test_groups_that_are_equal_once_cut_are_left_out(seq_len, options, groups, counts):
    examples = of_prompts([LATER, SHORTER, EARLY])
    options = {"distinct": True, "share_prompts": True} | options
    rows = pack_examples(window(examples), seq_len, **options)
    starts = examples.index(rows.spans[:, 0] - rows.shared)
    assert sorted({int(i) // 2 for i in starts}) == groups
    dropped = 0 if options.get("truncate") is False else 3 - len(groups)
    counts = {"longest": 7, "min_seq_len": 13, "duplicates": dropped} | counts
    assert rows.truncation == TruncationStats(**counts)


def answers_to(prompts, draw, most: int) -> Examples:
    """Groups of one answer, 1 to 9 of them to each prompt of a number of tokens."""
    each = [
        [(list(range(9 * i, 9 * i + size)), draw(9, size=draw(1, most)).tolist())]
        for i, size in enumerate(prompts)
        for _ in range(draw(1, 10))
    ]
    return of_prompts(each)


@pytest.mark.parametrize("options", [{}, {"max_length": 50}, {"max_length": 50, "truncate": False}])
def test_answers_share_the_prompt_of_those_in_their_row(options):
    draw = np.random.default_rng(3).integers
    examples = answers_to(draw(20, 23, size=80), draw, 30)
    rows, alone = (
        pack_examples(window(examples), 90, share_prompts=s, **options) for s in (True, False)
    )
    assert rows.truncation == alone.truncation
    own = rows.spans - np.stack([rows.shared, np.zeros_like(rows.shared)], axis=1)
    assert sorted(own.tolist()) == sorted(alone.spans.tolist())
    assert rows.shared.sum() > 0.2 * np.diff(own).sum() and len(rows) < 0.8 * len(alone)
    prompts = [examples.tokens[a:b][~examples.supervised[a:b]].tolist() for a, b in own.tolist()]
    for row in range(len(rows)):
        spans, shared = rows.line(row)
        assert 0 < np.diff(spans).sum() <= 90
        first: list[int] = []
        for i, before in enumerate(shared.tolist(), int(rows.offsets[row])):
            first = prompts[i] if before == 0 else first
            assert first == prompts[i] and before in (0, len(first) - 1)


def test_answers_that_a_row_has_no_place_for_are_in_several():
    """Those to one prompt are two thirds of a row, and would leave the rest of it empty."""
    each = [[([i] * 10, [7] * 10)] for i in range(8) for _ in range(5)]  # 9 + 5 x 11 tokens
    assert len(pack_examples(window(of_prompts(each)), 100, share_prompts=True)) == 6
    assert len(pack_examples(window(of_prompts(each)), 100)) == 8


@pytest.mark.parametrize("entries", [[[0, 1], [2]], [[0], [1], [2]]])
def test_answers_of_a_mixture_are_brought_together(entries):
    draw = np.random.default_rng(4).integers
    parts = [answers_to([20] * 6, draw, 10) for _ in range(3)]
    mixture = Mixture(
        [[parts[i] for i in e] for e in entries], size=500, weights=[1] * len(entries)
    )
    examples = mixture.window(0)
    before = np.diff(pack_examples(examples, 200).spans).sum()
    assert np.diff(pack_examples(examples, 200, share_prompts=True).spans).sum() < 0.5 * before


def test_keys_that_are_copied_are_a_few_for_each_token():
    """Of a long prompt, of which a row would take any number of short answers."""
    examples = of_prompts([[(list(range(500)), [7])] for _ in range(60)])
    rows = pack_examples(window(examples), 1000, share_prompts=True)
    for row in range(len(rows)):
        spans, shared = rows.line(row)
        assert 3.5 < shared.sum() / np.diff(spans).sum() <= MAX_KEY_COPIES
