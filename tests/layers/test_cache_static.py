import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tigon.kernels.attention.api import attention
from tigon.kernels.attention.mask import AttentionMask
from tigon.layers import Attention, BlockInputs, StateSpec, StaticCache

B, H, K, D, W, CHUNK = 3, 4, 2, 16, 5, 4
SHAPES = [(K, D, None), (1, 8, W)]


def make(rows: int = B, capacity: int = 40, **options: Any) -> StaticCache:
    options = {"chunk": CHUNK, "dtype": torch.float32, "device": "cpu", **options}
    layers = [Attention(8, 2 * k, k, d, window=w) for k, d, w in options.pop("shapes", SHAPES)]

    def states(spec: StateSpec) -> list[Any]:
        return [layer.make_state(spec) for layer in layers]

    return StaticCache(states, StateSpec(rows, capacity, **options))


def attend(cache: StaticCache, mask: AttentionMask, *parts: Any) -> list[Tensor]:
    """What all layers answer to their q, k and v, which are then held."""
    states = cache.open(None, parts[0][0], mask)
    ctx = BlockInputs(torch.zeros(1, mask.tokens).long(), mask, append=cache.append)
    outs = [
        state.read(q, state.store(k, v, ctx, shape[2]), ctx, shape[2])
        for state, (q, k, v), shape in zip(states, parts, SHAPES, strict=False)
    ]
    cache.end(mask)
    return outs


def heads(rows: int, tokens: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    q = torch.randn(rows, tokens, 2 * kv_heads, dim)
    return q, torch.randn(rows, tokens, kv_heads, dim), torch.randn(rows, tokens, kv_heads, dim)


class Text:
    """What all layers are given over time, and what they should answer, each row by itself."""

    def __init__(self, rows: int = B, tokens: int = 40):
        self.parts = [heads(rows, tokens, *shape[:2]) for shape in SHAPES]
        self.answers = [
            attention(*part, mask=AttentionMask(tokens, backend="reference"), window=shape[2])
            for part, shape in zip(self.parts, SHAPES, strict=True)
        ]

    def feed(
        self,
        cache: StaticCache,
        starts: list[int],
        tokens: int,
        rows: list[int] | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        """Give the next tokens to every layer and compare what comes back."""
        rows = list(range(len(starts))) if rows is None else rows
        held = cache.begin(len(rows), tokens)
        mask = AttentionMask(tokens, past=held if isinstance(held, int) else 0)
        at = torch.tensor(starts)[:, None] + torch.arange(tokens)
        index = torch.tensor(rows)[:, None], at
        outs = attend(cache, mask, *([x[index] for x in part] for part in self.parts))
        for out, answer in zip(outs, self.answers, strict=True):
            torch.testing.assert_close(out, answer[index], rtol=tolerance, atol=tolerance)


def filled(lengths: tuple[int, ...] = (7, 7, 7), **options: Any) -> tuple[StaticCache, Text]:
    cache, text = make(**options), Text()
    for row, n in enumerate(lengths):
        text.feed(cache.rows(row, row + 1), [0], n, [row])
    assert cache.lengths.tolist() == list(lengths)
    return cache, text


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_memory(quantize: Any) -> None:
    cache = make(dtype=torch.bfloat16, quantize=quantize)
    full, ring = B * K * 40, B * 1 * (W + CHUNK - 1)  # token slots of all heads
    for buffers, size, dim in zip(
        (s.buffers for s in cache.states), (full, ring), (D, 8), strict=True
    ):
        assert buffers.keys.numel() == buffers.values.numel() == size * dim
    if quantize:
        assert cache.nbytes == 2 * (full * (D + 4) + ring * (8 + 4))
    else:
        assert cache.nbytes == 2 * 2 * (full * D + ring * 8)
    assert make(capacity=6).states[1].buffers.keys.shape[2] == 6  # smaller than the ring


def test_lengths_that_only_the_device_knows() -> None:
    cache, text = filled((7, 7, 7), capacity=12)
    cache._host_lengths.fill_(-1)
    assert cache.length is None
    text.feed(cache, [7, 7, 7], 4)
    assert cache.length is None
    with pytest.raises(ValueError, match=r"13 tokens of a row do not fit .* capacity=12"):
        cache.begin(B, 2)
    with pytest.raises(ValueError, match="that hold an unknown number of tokens"):
        cache.begin(B, 5)
    cache.refresh()
    assert cache.length == 11
    text.feed(cache, [11] * B, 1)


def test_a_view_shares_memory_and_lengths() -> None:
    cache, text = make(), Text()
    first, rest = cache.rows(0, 1), cache.rows(1, 3)
    text.feed(rest, [0, 0], 9, [1, 2])
    assert (cache.length, first.length, rest.length) == (None, 0, 9)
    text.feed(first, [0], 9, [0])
    assert cache.length == 9
    text.feed(cache, [9] * B, 4)
    assert (first.length, rest.length) == (13, 13)
    text.feed(rest.rows(1, 2), [13], 14, [2])
    assert cache.lengths.tolist() == [13, 13, 27]
    text.feed(cache, [13, 13, 27], 1)


def test_a_deep_copy_leaves_the_model_out() -> None:
    """As of a prompt's cache from which several calls go on."""

    class Model(nn.ModuleList):
        def make_states(self, spec: StateSpec) -> list[Any]:
            return [layer.make_state(spec) for layer in self]

    model = Model(Attention(8, 2 * k, k, d, window=w) for k, d, w in SHAPES)
    cache = StaticCache(model.make_states, StateSpec(B, 12, torch.float32, "cpu", CHUNK))
    text, copied = Text(), dict[int, Any]()
    text.feed(cache, [0] * B, 7)
    twin = copy.deepcopy(cache, copied)
    assert id(model) not in copied
    twin.grow(40)
    text.feed(twin, [7] * B, 9)
    assert (cache.length, twin.length) == (7, 16)


def test_select_keeps_and_reorders_rows() -> None:
    cache, text = filled((3, 12, 1))
    view = cache.rows(0, 3)
    cache.select(torch.tensor([2, 1]))
    text.feed(cache, [1, 12], 4, [2, 1])
    assert view.lengths.tolist() == [3, 12, 1]  # the selected rows are copies
    text.feed(view, [3, 12, 1], 2)
    cache.select(torch.tensor([1]))
    assert cache.length == 16
    text.feed(cache, [16], 11, [1])


@pytest.mark.parametrize("known", [True, False])
def test_crop_forgets(known: bool) -> None:
    cache, text = filled((9, 12, 20))
    text.feed(cache, [9, 12, 20], 4)
    if not known:
        cache._host_lengths.fill_(-1)
    cache.crop(torch.tensor([9, 14, 99], dtype=torch.int32))  # all of them, half, none
    assert cache.lengths.tolist() == [9, 14, 24]
    starts = [9, 14, 24]
    for n in (4, 1, 2):
        text.feed(cache, starts, n)
        starts = [s + n for s in starts]


def test_crop_goes_back_as_far_as_rings_hold() -> None:
    cache, text = filled((8, 8, 8))  # not one token more than the ring holds
    cache.crop(torch.tensor([0, 8, 3]))
    text.feed(cache, [0, 8, 3], 4)
    cache, text = filled((9, 9, 9))
    for lengths in ([4, 9, 9], [9, 9, -1], [0, 4, 9]):
        first = rf"\[{lengths[0]}, {lengths[1]}, "
        with pytest.raises(ValueError, match=rf"crop to lengths {first}.*chunk=4"):
            cache.crop(torch.tensor(lengths))
    assert cache.length == 9
    cache.crop(torch.tensor([0, 9, 9]))  # nothing earlier is in view then
    text.feed(cache, [0, 9, 9], 4)
    full = make(shapes=SHAPES[:1])
    full.lengths.fill_(30)
    full.crop(torch.tensor([2, 0, 30]))
    assert full.lengths.tolist() == [2, 0, 30]
    with pytest.raises(ValueError, match=r"crop to lengths \[1, -1, 30\]: they are negative"):
        full.crop(torch.tensor([1, -1, 30]))


def test_crops_add_up() -> None:
    """A ring has lost what is before all of the tokens that were dropped, one by one or at once."""
    cache, text = filled((12, 12, 12))
    for lengths in ([10, 12, 0], [8, 12, 0]):
        cache.crop(torch.tensor(lengths))
    for held in (cache, cache.rows(0, 1)):
        with pytest.raises(ValueError, match=r"crop to lengths \[7.*more than the 4 tokens back"):
            held.crop(torch.tensor([7, 12, 0][: len(held.lengths)]))
    text.feed(cache, [8, 12, 0], 2)
    cache.select(torch.tensor([2, 1, 0]))
    with pytest.raises(ValueError, match=r"crop to lengths \[0, 12, 7\]"):
        cache.crop(torch.tensor([0, 12, 7]))
    cache.crop(torch.tensor([1, 10, 8]))  # of the row that was emptied, one of two
    text.feed(cache, [1, 10, 8], 4, [2, 1, 0])
    cache.reset(2, 3)
    text.feed(cache, [5, 14, 0], 3, [2, 1, 0])
    cache.crop(torch.tensor([8, 17, 1]))


def test_int8_is_as_exact_as_its_scales() -> None:
    cache = make(quantize="int8")
    text = Text()
    for row, n in enumerate((5, 12, 1)):
        text.feed(cache.rows(row, row + 1), [0], n, [row])  # prompts see exact keys
    buffers = cache.states[0].buffers
    assert buffers.key_scales is not None and buffers.value_scales is not None
    for i, (stored, scales) in enumerate(
        ((buffers.keys, buffers.key_scales), (buffers.values, buffers.value_scales)), 1
    ):
        given = text.parts[0][i][1, :12].transpose(0, 1)  # [K, T, D]
        error = (stored[1, :, :12] * scales[1, :, :12, None] - given).abs()
        limit = given.abs().amax(-1, keepdim=True) / 254
        assert (error <= 1.001 * limit).all()
        assert error.max() > 0.5 * limit.min()
    starts = [5, 12, 1]
    for n in (1, 4, 4):
        text.feed(cache, starts, n, tolerance=0.05)
        starts = [s + n for s in starts]
    text.feed(cache.rows(1, 2), [starts[1]], 9, [1], tolerance=0.05)


@pytest.mark.parametrize("selected", [False, True])
def test_made_in_inference_mode_and_used_outside(selected: bool) -> None:
    text, rows = Text(), [1, 0, 2] if selected else [0, 1, 2]
    with torch.inference_mode():
        cache = make()
        text.feed(cache, [0] * B, 9)
        if selected:
            cache.select(torch.tensor(rows))
    with torch.no_grad():
        text.feed(cache, [9] * B, 4, rows)
        cache.crop(torch.tensor([10, 9, 13]))
        text.feed(cache, [10, 9, 13], 4, rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0: a StaticCache needs at least 1"),
        ({"capacity": 0}, "capacity=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"quantize": "int4"}, "quantize='int4' is not None or 'int8'"),
    ],
    ids=str,
)
def test_bad_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_rows() -> None:
    cache = make()
    for start, stop in ((0, 4), (-1, 2), (2, 2)):
        with pytest.raises(ValueError, match=rf"rows\({start}, {stop}\) of a cache of 3 rows"):
            cache.rows(start, stop)
    with pytest.raises(ValueError, match=r"select \(2, 1\): give an index"):
        cache.select(torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"select \(0,\)"):
        cache.expand(0)
    with pytest.raises(ValueError, match=r"crop to lengths \(2,\) of a cache of 3 rows"):
        cache.crop(torch.tensor([0, 0]))


def test_no_gradients() -> None:
    cache, (q, k, v) = make(), heads(B, 2, K, D)
    for leaf in (q, k, v):
        cache.begin(B, 2)
        leaf.requires_grad_()
        with pytest.raises(ValueError, match=r"StaticCache keeps no gradients.*no_grad"):
            attend(cache, AttentionMask(2), (q, k, v))
        leaf.requires_grad_(False)
