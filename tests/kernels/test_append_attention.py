import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels.attention import kv_buffers
from tigon.kernels.attention.decode import MAX_QUERY_TOKENS, append_attention, append_attention_ref
from tigon.kernels.attention.kv_buffers import KVBuffers, append_tokens
from tigon.kernels.rope.rope import rope

OWN = sys.modules["tigon.kernels.attention.decode"]
CUDA = torch.cuda.is_available()
# The interpreter has no bf16 products; fp16 is right everywhere
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
H, K, D = 6, 2, 16
NAN = float("nan")
int8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


def dequantized(x: Tensor) -> Tensor:
    """In fp32, whose roundings decide between two codes."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = largest / largest.new_full((), 127.0)  # by a plain 127 torch does not divide on GPUs
    return (x.float() / scales.where(scales > 0, 1)).round().double() * scales.double()


class Rows:
    """A cache beside all the tokens it was ever given."""

    def __init__(
        self,
        lengths: list[int],
        slots: int,
        *,
        heads: int = H,
        kv_heads: int = K,
        dim: int = D,
        int8: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        b, total = len(lengths), max(lengths) + 160
        shape = b, kv_heads, slots, dim
        self.heads, self.int8, self.dtype = heads, int8, dtype
        if int8:
            full = [torch.full(shape, 77, dtype=torch.int8) for _ in range(2)]
            self.buffers = KVBuffers(*full, *(torch.full(shape[:3], NAN) for _ in range(2)))
        else:
            self.buffers = KVBuffers(*(torch.full(shape, NAN, dtype=dtype) for _ in range(2)))
        # Keys of very different sizes, so that a token too many or too few is noticed
        k, v = torch.randn(2, b, total, kv_heads, dim)
        self.k, self.v = (2 * k).to(dtype), v.to(dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        ids = torch.arange(b).repeat_interleave(torch.tensor(lengths))
        at = torch.cat([torch.arange(n) for n in lengths])
        ends = torch.tensor(lengths)[ids]
        append_tokens(self.k[ids, at], self.v[ids, at], self.buffers, ids, at, ends)

    def new(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        at = self.lengths[:, None] + torch.arange(t)
        rows = torch.arange(len(self.k))[:, None]
        q = torch.randn(len(self.k), t, self.heads, self.k.shape[-1]).to(self.dtype)
        return q, self.k[rows, at], self.v[rows, at]

    def exact(self, q: Tensor, first: list[int] | None = None, **options: Any) -> Tensor:
        """Every row by itself in float64, from its first token on: concatenate, mask, softmax."""
        out = []
        for row, n in enumerate(self.lengths.tolist()):
            here = slice(0 if first is None else first[row], n + q.shape[1])
            k, v = self.k[row, here].double(), self.v[row, here].double()
            if self.int8:
                k, v = dequantized(k), dequantized(v)
            out.append(plain(q[row].double(), k, v, **options))
        return torch.stack(out)

    def check(self, t: int, **options: Any) -> None:
        """Appends t tokens."""
        q, k, v = self.new(t)
        before, again = self.lengths.clone(), copied(self.buffers)
        out = append_attention(q, k, v, self.buffers, self.lengths, **options)
        expected = self.exact(q, **options)
        assert out.dtype == q.dtype and torch.equal(self.lengths, before)
        limit = 5e-6 if self.dtype == torch.float32 else torch.finfo(self.dtype).eps
        assert (out.double() - expected).norm() <= limit * expected.norm()
        if self.dtype == torch.float32 and int(self.lengths.max()) <= 200:
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=5e-6)
        if CUDA:
            assert torch.equal(out, append_attention(q, k, v, again, self.lengths, **options))
            assert_same(self.buffers, again)
        self.lengths += t

    def check_buffers(self) -> None:
        """Every slot holds the last token that belongs there, and what held none is untouched."""
        slots = torch.arange(self.buffers.keys.shape[2])
        for row, n in enumerate(self.lengths.tolist()):
            at = (n - 1 - slots) // len(slots) * len(slots) + slots
            pairs = zip(self.buffers[:2], self.buffers[2:], (self.k, self.v), strict=True)
            for held, scales, given in pairs:
                found, expected = held[row].transpose(0, 1), given[row, at.clamp(min=0)]
                if scales is not None:
                    found = found * scales[row].transpose(0, 1)[..., None].double()
                    expected = dequantized(expected)
                expected = expected.where((at >= 0)[:, None, None], NAN)
                torch.testing.assert_close(found, expected, equal_nan=True)


def copied(buffers: KVBuffers) -> KVBuffers:
    return KVBuffers(*(x if x is None else x.clone() for x in buffers))


def assert_same(a: KVBuffers, b: KVBuffers) -> None:
    for x, y in zip(a, b, strict=True):
        if x is not None:
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def plain(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [S, K, D]
    v: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    t, s = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(s - t, s)[:, None] - torch.arange(s)
    seen = (behind >= 0) & (behind < (window or s))
    if chunked and window:
        seen &= torch.arange(s - t, s)[:, None] // window == torch.arange(s) // window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, t, 1)), -1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :s], v)


@pytest.mark.parametrize(
    ("window", "slots", "softcap", "int8"),
    [
        (None, 64, None, True),
        (None, 90, 3.0, False),
        (1, 16, 3.0, True),
        (5, 20, None, False),
        (20, 35, 3.0, False),
        (20, 35, None, True),
        (20, 64, None, False),
    ],
)
def test_tokens_are_appended_and_seen(
    window: int | None, slots: int, softcap: float | None, int8: bool
) -> None:
    """Ragged rows, some empty; rings go around; unused slots hold NaN."""
    rows = Rows([0, 37, 15], slots, int8=int8)
    for t in (1, 16, 3):
        rows.check(t, window=window, softcap=softcap)
    rows.check_buffers()


@int8
@pytest.mark.parametrize(("window", "slots"), [(5, 20), (20, 35), (20, 200), (16, 31)])
@pytest.mark.parametrize("splits", [1, 3])
def test_chunks(
    splits: int, window: int, slots: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows begin at, before and behind the end of a chunk, and steps cross it."""
    monkeypatch.setattr(OWN, "_num_splits", lambda *_: splits)
    rows = Rows([0, 15, 16, 19, 37], slots, int8=int8)
    for t in (1, 16, 3, 1, 4):
        rows.check(t, window=window, chunked=True)
    rows.check_buffers()


@int8
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (3, 20)])
def test_sinks(
    splits: int, window: int | None, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted once, however many programs share the tokens, and where a row has none yet."""
    monkeypatch.setattr(OWN, "_num_splits", lambda *_: splits)
    rows, sinks = Rows([0, 37, 15], 90, int8=int8), torch.linspace(-2, 6, H)
    for t in (1, 16, 3, 18):
        rows.check(t, window=window, sinks=sinks, scale=0.1)


@int8
@pytest.mark.parametrize(("groups", "t"), [(1, 1), (8, 2), (3, 16)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
def test_sizes(dim: int, groups: int, t: int, int8: bool) -> None:
    rows = Rows([33], 64, heads=2 * groups, dim=dim, int8=int8)
    rows.check(t, scale=0.1)


def check_latents(rows: int, heads: int, dim: int, int8: bool, dtype: torch.dtype) -> None:
    """Keys that are the values too, in the same memory."""
    cache = Rows([0] * rows, 64, heads=heads, kv_heads=1, dim=dim, int8=int8, dtype=dtype)
    keys, _, scales, _ = cache.buffers
    cache.v, cache.buffers = cache.k, KVBuffers(keys, keys, scales, scales)
    again, lengths = copied(cache.buffers), cache.lengths.clone()
    for t in (16, 1, 3):
        q, k, v = cache.new(t)
        out = append_attention(q, k, v, cache.buffers, cache.lengths, scale=0.05)
        apart = append_attention(q, k, v, again, cache.lengths, scale=0.05)
        assert torch.equal(out, apart)
        exact, limit = cache.exact(q, scale=0.05), 1e-5 if dtype == torch.float32 else 4e-3
        assert (out.double() - exact).norm() <= 2 * limit * exact.norm()
        cache.lengths += t
    assert int(lengths.sum()) == 0
    assert_same(KVBuffers(keys, keys, scales, scales), again)


@int8
@pytest.mark.parametrize(("heads", "dim"), [(5, 36), (20, 320), (3, 576)])
def test_latents(heads: int, dim: int, int8: bool) -> None:
    check_latents(2, heads, dim, int8, torch.float32)


@pytest.mark.gpu
@int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 32, 320), (3, 128, 576), (2, 20, 576)])
def test_latents_in_half_precision(
    rows: int, heads: int, dim: int, dtype: torch.dtype, int8: bool, kernels_only: None
) -> None:
    check_latents(rows, heads, dim, int8, dtype)


@pytest.mark.gpu
@int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256, 512])
def test_sizes_in_half_precision(
    dim: int, dtype: torch.dtype, int8: bool, kernels_only: None
) -> None:
    for groups, t in itertools.product((1, 4, 8), (1, 2, 5, 16)):
        Rows([0, 300, 77], 320, heads=2 * groups, dim=dim, int8=int8, dtype=dtype).check(t)


@pytest.mark.gpu
@int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("window", "slots"), [(None, 5000), (1, 16), (128, 143), (1000, 2000)])
def test_windows_of_long_rows(
    window: int | None, slots: int, softcap: float | None, dtype: torch.dtype, int8: bool,
    kernels_only: None,
) -> None:  # fmt: skip
    lengths = [0, 1, 127, 128, 129, 1800, slots - 16 if window is None else 4444]
    for t in (1, 3, 16):
        rows = Rows(lengths, slots, heads=4, dim=64, int8=int8, dtype=dtype)
        rows.check(t, window=window, softcap=softcap)


@pytest.mark.gpu
@int8
@pytest.mark.parametrize(
    ("rows", "context"), [(1, 1024), (1, 60_000), (2, 300), (8, 8000), (64, 1024), (300, 200)]
)
def test_a_model_of_8b(rows: int, context: int, int8: bool, kernels_only: None) -> None:
    lengths = torch.randint(context // 2, context, (rows,)).tolist()
    sizes: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": torch.bfloat16}
    for t in (1, 6):
        Rows(lengths, context + 16, int8=int8, **sizes).check(t)


@pytest.mark.parametrize(
    ("splits", "window", "slots"),
    [(1, None, 200), (2, None, 200), (7, None, 200), (2, 70, 85), (7, 70, 85), (7, 5, 20)],
)
def test_shares(
    splits: int, window: int | None, slots: int, kernels_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token, of nothing at all, and with queries that see nothing of a share."""
    monkeypatch.setattr(OWN, "_num_splits", lambda *_: splits)
    rows = Rows([0, 16, 17, 170], slots, heads=3, kv_heads=1)
    for t in (16, 1):
        rows.check(t, window=window)


def test_how_many_shares() -> None:
    for groups, blocks in itertools.product((1, 3, 8, 64, 100, 512, 10_000), (1, 4, 16, 2000)):
        splits = OWN._num_splits(groups, blocks, 396)
        assert 1 <= splits <= blocks
        assert splits == blocks or splits * groups >= 0.75 * 396  # the device is busy
    assert OWN._num_splits(8, 2000, 396) * 8 <= 396  # once
    assert OWN._num_splits(10_000, 2000, 396) == 1


@int8
def test_an_overfull_cache_sees_its_last_tokens(int8: bool) -> None:
    rows = Rows([80, 3, 31], 32, int8=int8)
    for t in (1, 7):
        q, k, v = rows.new(t)
        out = append_attention(q, k, v, rows.buffers, rows.lengths)
        first = [max(n + t - 32, 0) for n in rows.lengths.tolist()]
        expected = rows.exact(q, first)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=5e-6)
        rows.lengths += t
    rows.check_buffers()


@int8
def test_grouping_of_tokens_into_calls_does_not_matter(int8: bool) -> None:
    together = Rows([0, 40], 50, heads=3, kv_heads=1, int8=int8)
    q, k, v = together.new(3)
    alone = copied(together.buffers)
    out = append_attention(q, k, v, together.buffers, together.lengths)
    for j in range(3):
        here = slice(j, j + 1)
        part = append_attention(q[:, here], k[:, here], v[:, here], alone, together.lengths + j)
        torch.testing.assert_close(part, out[:, here], rtol=1e-5, atol=1e-6)
    assert_same(together.buffers, alone)


def test_int8_is_that_of_the_definition(kernels_only: None) -> None:
    """Bit for bit, halves to even, zeros and the smallest numbers too."""
    k = torch.randn(1, 4, 2, 64)
    k[0, 0, 0] = 0
    halves = torch.cat((torch.tensor([127.0, -127.0]), torch.arange(62) - 30.5))
    for i, scale in enumerate((1, 3, 41, 47)):  # by whose inverses to multiply is not to divide
        k[0, 1 + i // 2, i % 2] = scale * halves
    k[0, 3] *= 1e-38
    q = torch.randn(1, 4, 2, 64)
    found, expected = (
        KVBuffers(*torch.zeros(2, 1, 2, 4, 64, dtype=torch.int8), *torch.zeros(2, 1, 2, 4).unbind())
        for _ in range(2)
    )
    lengths = torch.zeros(1, dtype=torch.int32)
    append_attention(q, k, k.flip(1), found, lengths)
    append_attention_ref(q, k, k.flip(1), expected, lengths)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert found.keys.abs().amax() == 127


@pytest.mark.parametrize(
    ("t", "rotated"),
    [
        *((1, 0), (1, 6), (3, D)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, D), (3, 6))),
        pytest.param(MAX_QUERY_TOKENS + 2, 6, marks=pytest.mark.slow),
    ],
)
@int8
def test_angles(int8: bool, rotated: int, t: int) -> None:
    """As `rope` before it, for views of one projection; each row has its own angles, or all rows
    have the same ones."""
    for batch, dtype in (3, torch.float32), (1, torch.float16):
        rows = Rows([5, 0, 12], 40, int8=int8)
        q, k, v = rows.new(t)
        packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
        heads = packed.unflatten(-1, (H + 2 * K, D)).split((H, K, K), 2)
        turns = torch.randn(batch, t, rotated // 2)
        angles = turns.cos().to(dtype), turns.sin().to(dtype)
        expected = copied(rows.buffers)
        wanted = append_attention(*rope(q, k, *angles), v, expected, rows.lengths)
        found = append_attention(*heads, rows.buffers, rows.lengths, angles=angles)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(rows.buffers, expected, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


@int8
def test_views(int8: bool) -> None:
    """Rows of a larger cache, of one laid out [B, R, K, D]; q, k and v of one projection."""
    whole = Rows([4, 9, 0, 21, 7], 40, int8=int8)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole.buffers[:2]]
    whole.buffers = KVBuffers(*swapped, *whole.buffers[2:])
    before = [x if x is None else x.clone() for x in whole.buffers]
    q, k, v = whole.new(3)
    expected = whole.exact(q)
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    heads = packed.unflatten(-1, (H + 2 * K, D)).split((H, K, K), 2)
    part = KVBuffers(*(x if x is None else x[1:4] for x in whole.buffers))
    out = append_attention(*(x[1:4] for x in heads), part, whole.lengths[1:4])
    torch.testing.assert_close(out.double(), expected[1:4], rtol=1e-5, atol=5e-6)
    for a, b in zip(whole.buffers, before, strict=True):
        if a is not None:  # the other rows are as they were
            assert torch.equal(a[[0, 4]].nan_to_num(7), b[[0, 4]].nan_to_num(7))
    lengths = whole.lengths.clone()
    lengths[1:4] += 3
    whole.lengths = lengths
    # Numbers that are not adjacent, and lengths that are not either
    q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in whole.new(1))
    spread = whole.lengths[1:4].repeat_interleave(2)[::2]
    out = append_attention(*(x[1:4] for x in (q, k, v)), part, spread)
    torch.testing.assert_close(out.double(), whole.exact(q)[1:4], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@int8
def test_half_precision(dtype: torch.dtype, int8: bool) -> None:
    rows = Rows([60, 0], 80, heads=8, dim=64, int8=int8, dtype=dtype)
    rows.check(3, window=50)
    if not int8:
        rows.check_buffers()


def test_offsets_beyond_int32() -> None:
    far = torch.empty(2**31 + 2**12, dtype=torch.float16)
    for shape, strides in (((3, 2, 4, D), (2**30, 64, D)), ((2, 2, 5, D), (256, 64, 2**29))):
        buffers = KVBuffers(far.as_strided(shape, (*strides, 1)), torch.zeros(shape).half())
        q, k, v = torch.randn(3, shape[0], 6, K, D).half()
        lengths = torch.zeros(shape[0], dtype=torch.int32)
        for j in range(6):
            step = (x[:, j : j + 1] for x in (q, k, v))
            out = append_attention(*step, buffers, lengths + j, window=4)
            for row in range(shape[0]):
                part = (x[row, : j + 1].double() for x in (k, v))
                expected = plain(q[row, j : j + 1].double(), *part, window=4)
                torch.testing.assert_close(out[row].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("window", "slots", "int8"), [(None, 70, True), (20, 51, False)])
def test_more_tokens_than_the_kernel_takes(
    window: int | None, slots: int, int8: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "triton":
        monkeypatch.delattr(OWN, "append_attention_ref")
    rows = Rows([5, 12, 0], slots, int8=int8)
    for t in (MAX_QUERY_TOKENS + 4, 2 * MAX_QUERY_TOKENS, 1):
        rows.check(t, window=window)
    rows.check_buffers()


def test_nothing_to_do() -> None:
    rows = Rows([5, 12], 20)
    q, k, v = rows.new(1)
    none = KVBuffers(*(x[:0] for x in rows.buffers[:2]))
    assert append_attention(q[:0], k[:0], v[:0], none, rows.lengths[:0]).shape == (0, 1, H, D)
    out = append_attention(q[:, :0], k[:, :0], v[:, :0], rows.buffers, rows.lengths)
    assert out.shape == (2, 0, H, D)
    rows.check_buffers()


@int8
def test_append(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed prompts, longer ones than a ring holds, behind what rows hold already."""
    write = kv_buffers.write_tokens  # whose order a GPU does not promise

    def backwards(k: Tensor, v: Tensor, buffers: KVBuffers, *where: Tensor) -> None:
        write(k.flip(0), v.flip(0), buffers, *(x.flip(0) for x in where))

    rows = Rows([3, 0, 50], 16, int8=int8)
    rows.check_buffers()
    more = torch.tensor([40, 2, 17])
    ids = torch.arange(3).repeat_interleave(more)
    at = torch.cat([n + torch.arange(m) for n, m in zip(rows.lengths, more, strict=True)])
    rows.lengths += more
    k, v = rows.k[ids, at], rows.v[ids, at]
    with monkeypatch.context() as patch:
        patch.setattr(kv_buffers, "write_tokens", backwards)
        append_tokens(k.requires_grad_(), v, rows.buffers, ids, at, rows.lengths[ids])
    assert not rows.buffers.keys.requires_grad
    rows.check_buffers()
    rows.check(1, window=16)
    rows.check(3, window=14)


def test_no_gradient() -> None:
    rows = Rows([5], 20)
    q, k, v = rows.new(1)
    k.requires_grad_()
    with pytest.raises(RuntimeError, match="append_attention has no gradient: call it inside"):
        append_attention(q, k, v, rows.buffers, rows.lengths)
    with torch.no_grad():
        append_attention(q, k, v, rows.buffers, rows.lengths)
    rows.lengths += 1
    rows.check_buffers()


@pytest.mark.traced
@int8
def test_registered_op(path: str, int8: bool) -> None:
    if path == "triton":
        rows = Rows([5, 12], 20, int8=int8)
        for x in rows.buffers:  # NaN is never equal to itself
            if x is not None and x.is_floating_point():
                x.nan_to_num_()
        angles = (None, None) if int8 else torch.randn(2, 1, 2, D // 2).unbind()
        args = (
            *rows.new(2),
            *rows.buffers,
            rows.lengths,
            5,
            True,
            2.0,
            0.3,
            *angles,
            torch.randn(H),
        )
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(OWN._forward.op, args, test_utils=tests)
