import numpy as np
import pytest
import torch

from tests.data.test_packing import make
from tigon.data import Loader, split, whole

LENGTHS = np.random.default_rng(0).integers(2, 30, size=103)
EXAMPLES = make(LENGTHS, np.random.default_rng(1).random(LENGTHS.sum()) < 0.7)
SHAPE = {"batch_size": 8, "micro_batch_size": 2}


def loader(rank: int = 0, world: int = 1, packing: bool = True, **kwargs) -> Loader:
    rows = whole(EXAMPLES, 32, packing=packing)
    return Loader(
        EXAMPLES, rows, packing=packing, rank=rank, world=world, **SHAPE, **{"seed": 3, **kwargs}
    )


def sequences(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The sequences of a batch, told apart as the model tells them: where positions restart."""
    found: list[list[int]] = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        for token, position in zip(ids.tolist(), positions.tolist(), strict=True):
            if position == 0:
                found.append([])
            assert position == len(found[-1])
            found[-1].append(token)
    return [s for s in found if any(s)]  # the others are padding


def test_every_example_once_per_epoch_in_another_order():
    data = loader()
    wanted = [list(range(a + 1, b + 1)) for a, b in data.rows.spans]
    orders = []
    for epoch in range(2):
        steps = range(epoch * data.steps_per_epoch, (epoch + 1) * data.steps_per_epoch)
        seen = [s for step in steps for batch in data.micro_batches(step) for s in sequences(batch)]
        assert sorted(seen) == sorted(wanted)
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_stream_depends_on_seed_and_step_alone():
    used = loader()
    for step in (7, 0, 30, 3):
        used.micro_batches(step)
    for step in (5, 40):
        for a, b in zip(used.micro_batches(step), loader().micro_batches(step), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
    assert not np.array_equal(loader(seed=4).row_indices(5), used.row_indices(5))
    assert loader(seed=None).row_indices(1).tolist() == list(range(8, 16))


def test_the_order_is_the_same_with_every_numpy():
    data = Loader(EXAMPLES, split(EXAMPLES, 100), batch_size=20, micro_batch_size=1, seed=0)
    assert data.row_indices(0).tolist() == [
        11,
        3,
        13,
        2,
        15,
        1,
        8,
        6,
        0,
        7,
        14,
        4,
        10,
        12,
        16,
        5,
        9,
    ]


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
            assert all(torch.equal(a[name], b[name]) for name in a)
        fillers += two[len(one) :]
    for filler in fillers:  # a rank without rows runs along on padding
        assert (filler["labels"] == -100).all()
        assert not filler["attention_mask"].any()
    assert len(fillers) == -(-len(alone.rows) // 2) % 2


def test_labels_and_counts():
    for packing in (True, False):
        data = loader(packing=packing)
        for step in range(data.steps_per_epoch):
            tokens = targets = 0
            for batch in data.micro_batches(step):
                ids, labels = batch["input_ids"], batch["labels"]
                supervised = torch.from_numpy(EXAMPLES.supervised)[ids - 1]
                inside = labels != -100
                assert torch.equal(labels[inside], ids[inside])
                real = ids != 0
                if "attention_mask" in batch:
                    assert torch.equal(batch["attention_mask"], real)
                else:
                    assert real.all()
                if packing:
                    first = batch["position_ids"] == 0
                else:
                    first = torch.arange(ids.shape[1]).expand_as(ids) == 0
                assert torch.equal(inside, supervised & real)
                tokens += int(real.sum())
                targets += int((inside & ~first).sum())
            assert (tokens, targets) == data.counts(step)


@pytest.mark.parametrize("packing", [True, False])
def test_bounds_of_sequences(packing):
    data = loader(packing=packing)
    for batch in [b for step in range(data.steps_per_epoch) for b in data.micro_batches(step)]:
        shape = batch["input_ids"].shape
        if packing:
            first = batch["position_ids"] == 0
        else:
            first = torch.zeros(shape, dtype=torch.bool)
            if "attention_mask" in batch:
                first[:, 1:] = batch["attention_mask"].diff() != 0
            first[:, 0] = True
        bounds = [*first.flatten().nonzero().flatten().tolist(), first.numel()]
        assert batch["cu_seq_lens"].dtype == torch.int32
        assert batch["cu_seq_lens"].tolist() == bounds
    filler = data._collate(np.array([], dtype=np.int64))
    assert filler["cu_seq_lens"].tolist() == [0, filler["input_ids"].shape[1]]


def test_where_names_the_examples_of_a_step():
    data = loader(packing=False)
    rows = data.row_indices(2)
    kept = [int(np.searchsorted(EXAMPLES.offsets, data.rows[r][0, 0])) + 1 for r in rows]
    assert data.where(2) == [f"f:{line}" for line in kept]


def test_batch_size_must_divide():
    with pytest.raises(ValueError, match=r"batch_size 8 must be a multiple of .* 2 x 3 ranks"):
        loader(world=3)
