import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tigon.kernels.attention.decode import (
    MAX_QUERY_TOKENS,
    KVBuffers,
    append_attention,
    append_attention_ref,
    append_tokens,
)
from tigon.kernels.rope.rope import rope

OWN = sys.modules["tigon.kernels.attention.decode"]
CUDA = torch.cuda.is_available()
# The interpreter has no bf16 products; fp16 is right everywhere
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
H, K, D = 6, 2, 16
NAN = float("nan")
int8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


def dequantised(x: Tensor) -> Tensor:
    scales = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scales.where(scales > 0, 1)).round() * scales


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
        total: int = 200,
    ) -> None:
        b = len(lengths)
        shape = b, kv_heads, slots, dim
        self.heads, self.int8 = heads, int8
        if int8:
            full = [torch.full(shape, 77, dtype=torch.int8) for _ in range(2)]
            scales = [torch.full(shape[:3], NAN) for _ in range(2)]
            self.buffers = KVBuffers(*full, *scales)
        else:
            self.buffers = KVBuffers(*(torch.full(shape, NAN, dtype=dtype) for _ in range(2)))
        # Keys of very different sizes, so that a token too many or too few is noticed
        k, v = torch.randn(2, b, total, kv_heads, dim)
        self.k, self.v = (2 * k).to(dtype), v.to(dtype)
        self.lengths = torch.zeros(b, dtype=torch.int32)
        ids = torch.arange(b).repeat_interleave(torch.tensor(lengths))
        at = torch.cat([torch.arange(n) for n in lengths])
        ends = torch.tensor(lengths)[ids]
        append_tokens(self.k[ids, at], self.v[ids, at], self.buffers, ids, at, ends)
        self.lengths += torch.tensor(lengths)

    def new(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        at = self.lengths[:, None] + torch.arange(t)
        rows = torch.arange(len(self.k))[:, None]
        q = torch.randn(len(self.k), t, self.heads, self.k.shape[-1]).to(self.k.dtype)
        return q, self.k[rows, at], self.v[rows, at]

    def exact(self, q: Tensor, **options: Any) -> Tensor:
        """Every row by itself in float64: concatenate, mask, softmax."""
        out = []
        for row, n in enumerate(self.lengths.tolist()):
            total = n + q.shape[1]
            k, v = self.k[row, :total].double(), self.v[row, :total].double()
            if self.int8:
                k, v = dequantised(k), dequantised(v)
            out.append(plain(q[row].double(), k, v, **options))
        return torch.stack(out)

    def step(self, t: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Appends t tokens: what comes out, and what should."""
        q, k, v = self.new(t)
        before = self.lengths.clone()
        out, expected = (
            append_attention(q, k, v, self.buffers, self.lengths, **options),
            self.exact(q, **options),
        )
        assert out.dtype == q.dtype
        assert torch.equal(self.lengths, before)
        self.lengths += t
        return out.double(), expected

    def check(self, t: int, **options: Any) -> None:
        torch.testing.assert_close(*self.step(t, **options), rtol=1e-5, atol=5e-6)

    def check_buffers(self) -> None:
        """Every slot holds the last token that belongs there, and what held none is untouched."""
        slots = self.buffers.keys.shape[2]
        for row, n in enumerate(self.lengths.tolist()):
            pairs = zip(self.buffers[:2], self.buffers[2:], (self.k, self.v), strict=True)
            for held, scales, given in pairs:
                for slot in range(slots):
                    at = (n - 1 - slot) // slots * slots + slot
                    found = held[row, :, slot]
                    if scales is None:
                        expected = given[row, at] if at >= 0 else torch.full_like(found, NAN)
                    else:
                        found = found * scales[row, :, slot, None].double()
                        expected = (
                            dequantised(given[row, at]) if at >= 0 else torch.full_like(found, NAN)
                        )
                    torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{slot}")


def plain(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [S, K, D]
    v: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    t, s = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(s - t, s)[:, None] - torch.arange(s)
    seen = (behind >= 0) & (behind < (window or s))
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


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
@pytest.mark.parametrize(("groups", "t"), [(1, 1), (8, 2), (3, 16)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_sizes(dim: int, groups: int, t: int, int8: bool) -> None:
    rows = Rows([33], 64, heads=2 * groups, dim=dim, int8=int8)
    rows.check(t, scale=0.1)


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
        last = rows.lengths[:, None] + t - 1
        for row, j in itertools.product(range(3), range(t)):
            n = int(rows.lengths[row]) + j
            first = max(int(last[row]) - 31, 0)
            k, v = rows.k[row, first : n + 1].double(), rows.v[row, first : n + 1].double()
            if int8:
                k, v = dequantised(k), dequantised(v)
            expected = plain(q[row, j : j + 1].double(), k, v)[0]
            torch.testing.assert_close(out[row, j].double(), expected, rtol=1e-5, atol=5e-6)
        rows.lengths += t
    rows.check_buffers()


@int8
def test_grouping_of_tokens_into_calls_does_not_matter(int8: bool) -> None:
    together = Rows([0, 40], 50, heads=3, kv_heads=1, int8=int8)
    q, k, v = together.new(3)
    alone = KVBuffers(*(x if x is None else x.clone() for x in together.buffers))
    out = append_attention(q, k, v, together.buffers, together.lengths)
    for j in range(3):
        here = slice(j, j + 1)
        part = append_attention(q[:, here], k[:, here], v[:, here], alone, together.lengths + j)
        torch.testing.assert_close(part, out[:, here], rtol=1e-5, atol=1e-6)
    for a, b in zip(together.buffers, alone, strict=True):
        if a is not None:
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


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
        expected = KVBuffers(*(x if x is None else x.clone() for x in rows.buffers))
        wanted = append_attention(*rope(q, k, *angles), v, expected, rows.lengths)
        found = append_attention(*heads, rows.buffers, rows.lengths, angles=angles)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(rows.buffers, expected, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_angles_that_do_not_fit() -> None:
    rows = Rows([5, 0, 12], 40)
    for tokens, dims, said in (2, D // 2, r"are not \[B or 1"), (1, D, f"rotates {2 * D} dims"):
        angles = torch.zeros(1, tokens, dims), torch.zeros(1, tokens, dims)
        with pytest.raises(ValueError, match=said):
            append_attention(*rows.new(1), rows.buffers, rows.lengths, angles=angles)


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
    q, k, v = (x[1:4].transpose(1, 3).contiguous().transpose(1, 3) for x in whole.new(1))
    spread = whole.lengths[1:4].repeat_interleave(2)[::2]
    out = append_attention(q, k, v, part, spread)
    whole.lengths = lengths - 0
    full = torch.zeros(5, 1, H, D)
    full[1:4] = q
    torch.testing.assert_close(out.double(), whole.exact(full)[1:4], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@int8
def test_half_precision(dtype: torch.dtype, int8: bool) -> None:
    rows = Rows([60, 0], 80, heads=8, dim=64, int8=int8, dtype=dtype)
    eps = torch.finfo(dtype).eps
    out, expected = rows.step(3, window=50)
    assert (out - expected).norm() <= eps * expected.norm()
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
    write = OWN.write_tokens  # whose order a GPU does not promise

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
        patch.setattr(OWN, "write_tokens", backwards)
        append_tokens(k.requires_grad_(), v, rows.buffers, ids, at, rows.lengths[ids])
    assert not rows.buffers.keys.requires_grad
    rows.check_buffers()
    rows.check(1, window=16)
    rows.check(3, window=14)


def z(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def kv(*more: Tensor, dtype: torch.dtype = torch.float32) -> KVBuffers:
    return KVBuffers(*z(2, 2, K, 8, D, dtype=dtype), *more)


INT8 = torch.int8
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q of three dims": ({"q": z(2, 6, D)}, r"q \(2, 6, 16\) is not \[B, T, H, D\]"),
    "q of another batch": ({"q": z(3, 1, H, D)}, r"q \(3, 1, 6, 16\) is not \(2, 1, 6"),
    "k of another head": ({"k": z(2, 1, 3, D)}, r"k \(2, 1, 3, 16\) is not \(2, 1, 2"),
    "v of more tokens": ({"v": z(2, 2, K, D)}, r"v \(2, 2, 2, 16\) is not \(2, 1, 2"),
    "q in half": ({"q": z(2, 1, H, D).half()}, "q is torch.float16, k is torch.float32"),
    "heads that do not group": ({"q": z(2, 1, 5, D)}, "5 query heads cannot share 2 key/value"),
    "float lengths": ({"lengths": z(2)}, r"lengths \(2,\) torch.float32 are not 2 int"),
    "a length too many": ({"lengths": z(3).int()}, "are not 2 integers"),
    "more tokens than slots": (
        {n: z(2, 9, h, D) for n, h in (("q", H), ("k", K), ("v", K))},
        "9 new tokens do not fit into 8 slots",
    ),
    "buffers in half": (
        {"buffers": kv(dtype=torch.float16)},
        "keys are torch.float16, values torch.float16: they must be torch.float32",
    ),
    "int8 without scales": ({"buffers": kv(dtype=INT8)}, "they must be torch.float32"),
    "scales of keys alone": (
        {"buffers": kv(z(2, K, 8), dtype=INT8)},
        "give scales of keys and of values",
    ),
    "scales of a wrong shape": (
        {"buffers": kv(*z(2, 2, K, 8, 1), dtype=INT8)},
        r"scales are not \(2, 2, 8\)",
    ),
    "scales of floats": ({"buffers": kv(*z(2, 2, K, 8))}, "they must be torch.int8"),
    "values of other slots": (
        {"buffers": KVBuffers(z(2, K, 8, D), z(2, K, 9, D))},
        r"values \(2, 2, 9, 16\) are not \[B, K, R, D\]",
    ),
    "heads apart": (
        {"buffers": KVBuffers(*z(2, 2, K, D, 8).transpose(-1, -2))},
        "must be adjacent",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    changed, message = ERRORS[case]
    given = {"q": z(2, 1, H, D), "k": z(2, 1, K, D), "v": z(2, 1, K, D), "buffers": kv()}
    given |= {"lengths": z(2).int()} | changed
    device = torch.get_default_device()
    given = tree_map_only(Tensor, lambda x: x.to(device), given)
    with pytest.raises(ValueError, match=message):
        append_attention(**given)


def test_errors_of_append() -> None:
    buffers = KVBuffers(*torch.zeros(2, 2, K, 8, D))
    at = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"k \(4, 2, 16\) and v \(3, 2, 16\) are not \(3, 2, 16\)"):
        append_tokens(torch.zeros(4, K, D), torch.zeros(3, K, D), buffers, at, at, at)
    with pytest.raises(ValueError, match="they must be"):
        append_tokens(*torch.zeros(2, 3, K, D).half(), buffers, at, at, at)


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
        args = (*rows.new(2), *rows.buffers, rows.lengths, 5, 2.0, 0.3, *angles)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(OWN._forward.op, args, test_utils=tests)
