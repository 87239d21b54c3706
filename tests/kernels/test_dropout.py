"""Dropout by position: the kernel's bits, how much it drops, and that nothing repeats."""

import math

import pytest
import torch
from torch import Tensor

from tests.train.test_rounding import WORD, splitmix64
from tigon.kernels.linear.dropout import Dropout, apply_dropout, apply_dropout_ref, keep_mask_ref
from tigon.kernels.linear.lora import low_rank_product

N, C = 256, 512


def keys(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 70])
def test_definition(columns: int, dtype: torch.dtype) -> None:
    """Also of a matrix with other columns beside it, and back."""
    dropout = Dropout(keys(3, 5), -(2**62) - 1, 0.3)
    wide = torch.randn(3, 5, columns + 2).to(dtype)
    for x in (wide[..., 1:-1], wide[..., 1:-1].clone().requires_grad_()):
        y, expected = apply_dropout(x, dropout), apply_dropout_ref(x, dropout)
        assert torch.equal(y, expected)
        assert (y == 0).any() or columns == 1
    dy = torch.randn(3, 5, columns).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, apply_dropout_ref(dy, dropout))


def test_bits_are_splitmix64s() -> None:
    key, place = int(keys(1)), 2**40 + 3
    words = splitmix64((key + place) & WORD, 3)
    sixteens = [word >> 16 * i & 0xFFFF for word in words for i in range(4)]
    for p in (0.2, 0.5, 0.7):
        dropout = Dropout(torch.tensor([key]), place, p)
        assert apply_dropout(torch.ones(1, 11), dropout)[0].tolist() == [
            s >= round(p * 2**16) for s in sixteens[:11]
        ]


@pytest.mark.kernel
def test_of_a_low_rank_product(kernels_only: None) -> None:
    dropout = Dropout(keys(37), 9, 0.4)
    u, a = torch.randn(37, 4), torch.randn(4, 70)
    given = u, [a], [0], [1.0], 70, None, True
    y = low_rank_product(*given, dropout.keys, dropout.seed, dropout.threshold)
    assert torch.equal(y, apply_dropout_ref(low_rank_product(*given), dropout))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.5, 0.9])
def test_rate(p: float) -> None:
    """Within five deviations of what independent draws give: of all, of rows, and of columns."""
    found = keep_mask_ref(Dropout(keys(N), 1, p), C).double()
    for dims, count in (((0, 1), N * C), (1, C), (0, N)):
        far = (1 - found.mean(dims) - p).abs().max()
        assert far < 5 * math.sqrt(p * (1 - p) / count) + 2**-16, dims


@pytest.mark.parametrize("p", [0.0, 1e-7])
def test_nothing_is_dropped(p: float) -> None:
    assert apply_dropout(torch.ones(8, 70), Dropout(keys(8), 1, p)).all()


def test_masks_agree_by_chance_alone() -> None:
    """Of other layers, neighbouring keys, other rows, and other columns of a row."""
    base = Dropout(keys(N), 1, 0.5)
    first = keep_mask_ref(base, C)
    others = {
        "place": keep_mask_ref(base._replace(seed=2), C),
        "key": keep_mask_ref(base._replace(keys=base.keys + 2), C),
        "row": first.roll(1, 0),
        "column": first.roll(1, 1),
        "word": first.roll(4, 1),
    }
    for name, other in others.items():
        agree = (first == other).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(N * C), name


def test_wrong_keys() -> None:
    for wrong in (keys(4), keys(3, 5).int()):
        with pytest.raises(ValueError, match=r"are not one int64 for each row of \(3, 5, 8\)"):
            Dropout(wrong, 1, 0.5).check(torch.zeros(3, 5, 8))
    assert keep_mask_ref(Dropout(keys(3, 5), 1, 0.5), 8).shape == (3, 5, 8)
