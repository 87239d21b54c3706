"""Random bits by position, and the rounding to bfloat16 that uses them."""

import math

import torch

from tests.support.numbers import neighbours
from tigon.train.optim import low_precision
from tigon.utils.random import GOLDEN, WORD, random_bits, take_16_bits


def draw(seed: int, step: int, at: torch.Tensor) -> torch.Tensor:
    return random_bits(low_precision.stream_seed(seed, step), at)


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as it is published."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        found.append(z ^ (z >> 31))
    return found


def test_draws_are_splitmix64s_by_position():
    seed, step = 1234567, 89
    (inner,) = splitmix64(seed, 1)
    (start,) = splitmix64(inner + step, 1)
    expected = splitmix64(start, 1000)
    found = draw(seed, step, torch.arange(1000))
    assert [x & WORD for x in found.tolist()] == expected
    assert torch.equal(draw(seed, step, torch.arange(700, 750)), found[700:750])
    far = draw(seed, step, torch.arange(4) + (1 << 40))  # positions beyond 32 bits
    jump = (start + (1 << 40) * GOLDEN) & WORD
    assert [x & WORD for x in far.tolist()] == splitmix64(jump, 4)
    for other in ((seed + 1, step), (seed, step + 1)):
        assert not set(draw(*other, torch.arange(1000)).tolist()) & set(found.tolist())
    halves = [take_16_bits(found, i) for i in range(4)]
    assert all(h.min() >= 0 and h.max() < 1 << 16 for h in halves)
    joined = sum(h.long() << (16 * i) for i, h in enumerate(halves[:3])) + (halves[3].long() << 48)
    assert torch.equal(joined, found)


VALUES = [1.001, -1.001, 3.14159, -2.7e-5, 1.7e30, 1e-38, 3e-40, -9e-41, 0.9999, 255.3]


def test_rounding_is_unbiased_between_the_two_neighbours():
    """The mean over all 65536 draws is exact; over drawn ones, within 4 standard errors."""
    x = torch.tensor(VALUES)
    low, high = neighbours(x)
    assert torch.equal(low.bfloat16().double(), low)
    every = torch.arange(1 << 16, dtype=torch.int32).view(-1, 1).expand(-1, len(x))
    rounded = low_precision.round_stochastically(x.expand(1 << 16, -1), every).double()
    assert ((rounded == low) | (rounded == high)).all()
    assert torch.equal(rounded.mean(0), x.double())

    count = 1 << 16
    bits = draw(3, 5, torch.arange(count * len(x)).view(count, -1))
    share = ((x.double() - low) / (high - low)).clamp(0, 1)
    for index in range(3):
        drawn = low_precision.round_stochastically(x.expand(count, -1), take_16_bits(bits, index))
        above = (drawn.double() == high).double().mean(0)
        error = (share * (1 - share) / count).sqrt()
        assert ((above - share).abs() <= 4 * error).all(), (index, above, share)


def test_what_bfloat16_has_stays():
    inf, nan = math.inf, math.nan
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-133, inf, -inf, 3.3895e38])
    exact[-1] = torch.finfo(torch.bfloat16).max
    most = torch.full_like(exact, 0xFFFF, dtype=torch.int32)
    found = low_precision.round_stochastically(exact, most)
    assert torch.equal(found.float(), exact)
    assert torch.equal(found.float().signbit(), exact.signbit())
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert low_precision.round_stochastically(nans, most[:3]).isnan().all()
    tiny = torch.full((4,), 2.0**-149)  # the least denormal: most draws leave zero
    bits = torch.tensor([0, 0xFFFE, 0xFFFF, 1], dtype=torch.int32)
    assert low_precision.round_stochastically(tiny, bits).tolist() == [0, 0, 2.0**-133, 0]
    assert low_precision.round_stochastically(torch.tensor([nan]), bits[:1]).isnan().all()
