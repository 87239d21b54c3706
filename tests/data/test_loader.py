from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.data.test_packing import make, mixture, window
from tigon.data import Loader, MicroBatch, pack_documents, pack_examples
from tigon.data.collate import BatchLine, collate

LENGTHS = np.random.default_rng(0).integers(2, 30, size=103)
EXAMPLES = make(LENGTHS, np.random.default_rng(1).random(LENGTHS.sum()) < 0.7)
SHAPE = {"batch_size": 8, "micro_batch_size": 2}


def loader(
    rank: int = 0, world: int = 1, packing: bool = True, size: int = 1000, **kwargs
) -> Loader:
    """Of windows of `size` examples."""
    rows = partial(pack_examples, seq_len=32, packing=packing)
    windows = mixture(EXAMPLES, size)
    return Loader(windows, rows, rank=rank, world=world, **{**SHAPE, "seed": 3, **kwargs})


def all_rows(data: Loader) -> list[list[list[int]]]:
    """The spans of every row of the first epoch, in the order of the windows."""
    found = []
    for number in range(data.windows.per_epoch or 0):
        rows = data.pack(data.windows.window(number))
        found += [rows[i].tolist() for i in range(len(rows))]
    return found


def taken(data: Loader, step: int) -> list[list[list[int]]]:
    """The spans of the rows of a step, in order."""
    slices = data._window_slices(step)
    return [packed.rows[i].tolist() for packed, chosen in slices for i in chosen]


def tensors(batch: MicroBatch) -> dict[str, torch.Tensor]:
    named = vars(batch) | {f"per token: {k}": v for k, v in batch.per_token.items()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def assert_equal(a: MicroBatch, b: MicroBatch) -> None:
    assert tensors(a).keys() == tensors(b).keys()
    assert all(torch.equal(value, tensors(b)[name]) for name, value in tensors(a).items())


def dropout_keys(data: Loader, step: int) -> dict[tuple[int, ...], list[int]]:
    """Of each sequence in this rank's part of a step, by its tokens."""
    found = {}
    for batch in data.micro_batches(step):
        ids, keys = (t.flatten().tolist() for t in (batch.input_ids, batch.dropout_keys))
        found |= {tuple(ids[a:b]): keys[a:b] for a, b in batch.host_spans.tolist()}
    return found


def numbered(data: Loader, keys: dict[tuple[int, ...], list[int]]) -> list[list[int]]:
    """In the order of the first step."""
    return [keys[tuple(EXAMPLES.tokens[a:b])] for row in taken(data, 0) for a, b in row]


def test_keys_of_dropout():
    """The same for a sequence of a step, however it is dealt; no two tokens of any share one."""
    one = loader(dropout_seed=1)
    first = dropout_keys(one, 0)
    assert len(first) > 8  # several in a row
    for other in ({"micro_batch_size": 4}, {"micro_batch_size": 8}):
        assert dropout_keys(loader(dropout_seed=1, **other), 0) == first
    shares = [dropout_keys(loader(rank, 2, dropout_seed=1), 0) for rank in (0, 1)]
    assert shares[0] | shares[1] == first and not shares[0].keys() & shares[1].keys()
    # By the sequence's number in the step, whatever it is
    data = loader(dropout_seed=1, packing=False)
    padded = dropout_keys(data, 0)
    both = zip(numbered(one, first), numbered(data, padded), strict=False)
    assert all(x == y for own, other in both for x, y in zip(own, other, strict=False))
    seen = [key for keys in first.values() for key in keys]
    for data, step in ((one, 1), (loader(dropout_seed=2), 0)):
        seen += [key for keys in dropout_keys(data, step).values() for key in keys]
    assert len(set(seen)) == len(seen)
    assert all(batch.dropout_keys is None for batch in loader().micro_batches(0))


def sequences(batch: MicroBatch) -> list[list[int]]:
    """The sequences of a batch, told apart as the model tells them: where positions restart."""
    found = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        for token, position in zip(ids.tolist(), positions.tolist(), strict=True):
            if position == 0:
                found.append([])
            assert position == len(found[-1])
            found[-1].append(token)
    return [s for s in found if any(s)]  # the others are padding


def check_bounds(batch: MicroBatch) -> None:
    first = batch.position_ids == 0
    bounds = [*first.flatten().nonzero().flatten().tolist(), first.numel()]
    assert batch.cu_seq_lens.dtype == torch.int32 and batch.cu_seq_lens.tolist() == bounds
    assert batch.longest == max(np.diff(bounds))
    flat = batch.input_ids.flatten()
    assert {end for span in batch.spans.tolist() for end in span} <= set(bounds)
    assert [flat[a:b].tolist() for a, b in batch.spans.tolist()] == sequences(batch)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("size", [1000, 20])
def test_what_batches_hold(packing, size):
    """Every example once an epoch, in another order; bounds, masks, columns and counts."""
    data = loader(packing=packing, size=size)
    expected = [list(range(a + 1, b + 1)) for row in all_rows(data) for a, b in row]
    orders = []
    for epoch in range(2):
        orders.append([])
        for step in range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch):
            batches, tokens, targets = data.micro_batches(step), 0, 0
            for batch in batches:
                ids, supervised = batch.input_ids, batch.per_token["supervised"]
                real = ids != 0
                assert torch.equal(
                    real,
                    torch.ones_like(real) if batch.attention_mask is None else batch.attention_mask,
                )
                learned = torch.from_numpy(EXAMPLES.supervised)[ids - 1]
                assert torch.equal(supervised, learned & real)
                check_bounds(batch)
                orders[-1] += sequences(batch)
                tokens += int(real.sum())
                targets += int((supervised & (batch.position_ids != 0)).sum())
            assert (tokens, targets) == data.counts(step)
            if not packing:  # the ranks have about the same work at a time
                longest = [batch.input_ids.shape[1] for batch in batches]
                assert longest == sorted(longest, reverse=True)
        assert sorted(orders[-1]) == sorted(expected)
    assert orders[0] != orders[1]
    filler = collate(data.windows.corpus, [], 32 if packing else None)
    assert filler.cu_seq_lens.tolist() == [0, filler.input_ids.shape[1]]


def test_the_stream_depends_on_seed_and_step_alone():
    used = loader()
    for step in (7, 0, 30, 3):
        used.micro_batches(step)
    for step in (5, 40):
        for a, b in zip(used.micro_batches(step), loader().micro_batches(step), strict=True):
            assert_equal(a, b)
    assert taken(loader(seed=4), 5) != taken(used, 5)
    assert taken(loader(seed=None), 1) == all_rows(used)[8:16]


def test_the_order_is_the_same_with_every_numpy():
    windows, rows = mixture(EXAMPLES), partial(pack_documents, seq_len=100)
    data = Loader(windows, rows, batch_size=20, micro_batch_size=1, seed=0)
    first, second = ([rows[0][0] // 100 for rows in taken(data, epoch)] for epoch in range(2))
    assert first == [11, 3, 13, 2, 15, 1, 8, 6, 0, 7, 14, 4, 10, 12, 16, 5, 9]
    assert second == [7, 10, 4, 11, 15, 12, 5, 1, 16, 9, 8, 13, 6, 2, 0, 3, 14]


def test_rows_are_shuffled_within_windows():
    data, in_order = loader(size=20), loader(seed=None, size=20)
    rows, expected = (
        [row for i in range(d.steps_per_epoch) for row in taken(d, i)] for d in (data, in_order)
    )
    assert expected == all_rows(data) and rows != expected
    ends = np.cumsum([0, *(len(data.pack(data.windows.window(n))) for n in range(6))])
    for begin, end in pairwise(ends):
        assert sorted(rows[begin:end]) == sorted(expected[begin:end])


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_share_the_micro_batches_of_one_rank(packing):
    alone = loader(packing=packing)
    ranks = [loader(rank, 2, packing) for rank in range(2)]
    fillers = []
    for step in range(alone.steps_per_epoch):
        one = alone.micro_batches(step)
        first, second = (rank.micro_batches(step) for rank in ranks)
        two = [batch for pair in zip(first, second, strict=True) for batch in pair]
        assert len(two) - len(one) in (0, 1)
        for a, b in zip(one, two, strict=False):
            assert_equal(a, b)
        fillers += two[len(one) :]
    for filler in fillers:  # a rank without rows runs along on padding
        assert not filler.attention_mask.any()
        assert not filler.per_token["supervised"].any() and len(filler.spans) == 0
    assert len(fillers) == -(-len(all_rows(alone)) // 2) % 2


@pytest.mark.parametrize("packing", [True, False])
def test_columns_of_any_kind_follow_their_tokens_and_examples(packing):
    """Floats, vectors per token, a value per example, and groups of three in one micro-batch."""
    lengths = LENGTHS[:99]
    count, groups = lengths.sum(), np.arange(0, 100, 3)
    weights = np.random.default_rng(4).random(count).astype(np.float32)
    teacher = np.stack([np.arange(1, count + 1), -np.arange(1, count + 1)], axis=1)
    rewards = np.arange(99, dtype=np.float32)
    columns = {"weights": weights, "teacher": teacher}
    examples = make(lengths, groups=groups, per_example={"reward": rewards}, **columns)
    rows = partial(pack_examples, seq_len=96, packing=packing)
    data = Loader(mixture(examples), rows, batch_size=4, micro_batch_size=2, seed=5)
    seen = []
    for batch in [b for step in range(data.steps_per_epoch) for b in data.micro_batches(step)]:
        ids, real = batch.input_ids, batch.input_ids != 0
        assert batch.per_token["weights"].dtype == torch.float32
        expected = torch.from_numpy(weights)[ids - 1] * real
        assert torch.equal(batch.per_token["weights"], expected)
        assert torch.equal(batch.per_token["teacher"], torch.stack([ids, -ids], dim=-1))
        rewards_of_batch = batch.per_example["reward"].int().reshape(-1, 3)
        first = rewards_of_batch[:, :1]
        assert (first % 3 == 0).all() and torch.equal(rewards_of_batch, first + torch.arange(3))
        begins = ids.flatten()[batch.spans[:, 0]] - 1  # tokens are numbered from 1
        assert torch.equal(
            torch.from_numpy(examples.index(begins.numpy())), rewards_of_batch.flatten().long()
        )
        seen += rewards_of_batch.flatten().tolist()
        if not packing:
            assert len(ids) == len(batch.spans)
    assert sorted(seen) == sorted(examples.index(rows(window(examples)).spans[:, 0]).tolist())
    filler = collate(data.windows.corpus, [], None)
    assert filler.per_example["reward"].shape == (0,)
    assert filler.per_token["teacher"].shape == (*filler.input_ids.shape, 2)


@pytest.mark.parametrize(
    ("most", "seq_len", "learned", "limits"),
    [
        (None, 4, [], "seq_len 4"),
        (2, 9, [3, 9, 12], "max_length"),  # the last token of each example is all that it teaches
        (9, 2, [3, 9, 12], "seq_len 2: seq_len=6 takes all"),
        (3, 2, [3, 9, 12], "max_length and seq_len 2: seq_len=3 takes all"),
    ],
)
def test_limits_within_which_nothing_is_to_be_learned(most, seq_len, learned, limits):
    examples = make([4, 6, 3], np.isin(np.arange(13), learned))
    rows = partial(pack_examples, seq_len=seq_len, max_length=most)
    data = Loader(mixture(examples), rows, batch_size=1, micro_batch_size=1)
    with pytest.raises(ValueError, match=f"no example of f has anything to learn within {limits}$"):
        _ = data.steps_per_epoch


def test_a_window_without_rows_in_the_middle_of_a_batch():
    examples = make([4] * 4, [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0])
    data = Loader(
        mixture(examples, 1), partial(pack_examples, seq_len=4), batch_size=4, micro_batch_size=1
    )
    for step in range(2):
        assert taken(data, step) == [[[0, 4]], [[8, 12]], [[12, 16]]]
        assert data.counts(step) == (12, 4)
        assert sum(len(batch.spans) for batch in data.micro_batches(step)) == 3


def test_batch_size_must_divide():
    with pytest.raises(ValueError, match=r"batch_size 8 must be a multiple of .* 2 x 3 ranks"):
        loader(world=3)


def test_some_sequences_of_a_batch_in_one_line():
    """As if the others had not been there, with all columns."""
    rng = np.random.default_rng(3)
    lengths = [5, 3, 7, 2, 6]
    per_example = {"kind": np.array([1, 0, 1, 1, 0])}
    examples = make(lengths, per_example=per_example, noise=rng.random(sum(lengths)))
    corpus = mixture(examples).corpus
    spans = np.stack([examples.offsets[:-1], examples.offsets[1:]], axis=1)
    packed = collate(corpus, [BatchLine(corpus, spans[:3]), BatchLine(corpus, spans[3:])], 16)
    padded = collate(corpus, [BatchLine(corpus, span[None]) for span in spans])
    for batch in (packed, padded):
        assert batch.host_column("kind").tolist() == [1, 0, 1, 1, 0]
        for keep in ([1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]):
            chosen = np.array(keep, dtype=bool)
            found = batch.select(chosen)
            expected = collate(corpus, [BatchLine(corpus, spans[chosen])])
            for name in ("input_ids", "position_ids", "cu_seq_lens", "spans", "parts"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
            assert found.attention_mask is None and found.longest == expected.longest
            assert torch.equal(found.per_token["noise"], expected.per_token["noise"])
            assert torch.equal(found.per_example["kind"], expected.per_example["kind"])
            assert found.origins == expected.origins
            numbers = np.arange(5)
            keys = batch.with_dropout(1, 2, numbers).select(chosen).dropout_keys
            assert torch.equal(keys, expected.with_dropout(1, 2, numbers[chosen]).dropout_keys)
        none = batch.select(np.zeros(5, dtype=bool))
        assert none.input_ids.tolist() == [[0]] and none.cu_seq_lens.tolist() == [0, 1]
        assert not none.attention_mask.any() and len(none.spans) == len(none.sources) == 0
