"""append_attention's kernels compiled: 16 bits, real sizes, CUDA graphs."""

import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.support import captured, no_waiting
from tigon.kernels import use
from tigon.kernels.attention.decode import (
    KVBuffers,
    append_attention,
    append_attention_ref,
    append_tokens,
)
from tigon.kernels.rope.rope import rope

pytestmark = pytest.mark.gpu
OWN = sys.modules["tigon.kernels.attention.decode"]
NAN = float("nan")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
INT8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    with use("triton"):
        yield
    torch.set_default_device(None)


def empty(shape: tuple[int, ...], dtype: torch.dtype, int8: bool) -> KVBuffers:
    """[B, K, R, D] that hold nothing but NaN, or what it makes of int8."""
    if int8:
        full = [torch.full(shape, 77, dtype=torch.int8) for _ in range(2)]
        return KVBuffers(*full, *(torch.full(shape[:3], NAN) for _ in range(2)))
    return KVBuffers(*(torch.full(shape, NAN, dtype=dtype) for _ in range(2)))


def filled(lengths: Tensor, shape: tuple[int, ...], dtype: torch.dtype, int8: bool) -> KVBuffers:
    buffers = empty(shape, dtype, int8)
    b, kv_heads, _, d = shape
    rows = torch.arange(b).repeat_interleave(lengths.long())
    at = torch.cat([torch.arange(n) for n in lengths.tolist()])
    k, v = torch.randn(2, len(rows), kv_heads, d, dtype=dtype)
    append_tokens(k, v, buffers, rows, at, lengths.long()[rows])
    return buffers


def copy(buffers: KVBuffers) -> KVBuffers:
    return KVBuffers(*(x if x is None else x.clone() for x in buffers))


def exact(buffers: KVBuffers) -> KVBuffers:
    """In fp32, where int8 and its scales are these very numbers."""
    if buffers.key_scales is not None:
        return copy(buffers)
    return KVBuffers(*(x.float() for x in buffers[:2]))


def assert_same(a: KVBuffers, b: KVBuffers) -> None:
    for x, y in zip(a, b, strict=True):
        if x is not None:
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def check(
    lengths: list[int],
    shape: tuple[int, ...],
    heads: int,
    t: int,
    dtype: torch.dtype,
    int8: bool = False,
    **options: float | None,
) -> None:
    """Output against the definition in fp32, buffers against the definition bit by bit."""
    b, kv_heads, _, d = shape
    n = torch.tensor(lengths, dtype=torch.int32)
    buffers = filled(n, shape, dtype, int8)
    q, k, v = (torch.randn(b, t, h, d, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    wanted = exact(buffers)
    expected = append_attention_ref(*(x.float() for x in (q, k, v)), wanted, n, **options)
    again = copy(buffers)
    out = append_attention(q, k, v, buffers, n, **options)
    eps = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert out.isfinite().all()
    assert (out - expected).norm() <= eps * expected.norm()
    assert_same(exact(buffers), wanted)
    assert torch.equal(out, append_attention(q, k, v, again, n, **options))
    assert_same(buffers, again)


@INT8
@DTYPES
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_sizes(dim: int, dtype: torch.dtype, int8: bool) -> None:
    for groups, t in itertools.product((1, 4, 8), (1, 2, 5, 16)):
        check([0, 300, 77], (3, 2, 320, dim), 2 * groups, t, dtype, int8)


@INT8
@DTYPES
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("window", "slots"), [(None, 5000), (1, 16), (128, 143), (1000, 2000)])
def test_windows(
    window: int | None, slots: int, softcap: float | None, dtype: torch.dtype, int8: bool
) -> None:
    for t in (1, 3, 16):
        lengths = [0, 1, 127, 128, 129, 1800, slots - 16 if window is None else 4444]
        check(lengths, (7, 2, slots, 64), 4, t, dtype, int8, window=window, softcap=softcap)


@INT8
@DTYPES
@pytest.mark.parametrize(("dim", "rotated"), [(128, 128), (80, 20), (256, 256)])
def test_angles(dim: int, rotated: int, dtype: torch.dtype, int8: bool) -> None:
    """As `rope` before it, but for the last bit where a product and a sum are rounded once."""
    for t, batch in itertools.product((1, 5), (1, 3)):
        lengths = torch.tensor([0, 300, 77], dtype=torch.int32)
        buffers = filled(lengths, (3, 2, 320, dim), dtype, int8)
        other = copy(buffers)
        q, k, v = torch.randn(3, t, 12, dim, dtype=dtype).split((8, 2, 2), 2)
        turns = torch.randn(batch, t, rotated // 2)
        angles = turns.cos().to(dtype), turns.sin().to(dtype)
        expected = append_attention(*rope(q, k, *angles), v, other, lengths)
        found = append_attention(q, k, v, buffers, lengths, angles=angles)
        eps = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert (found - expected).norm() <= eps * expected.norm()
        keys, wanted = (x.keys.float().nan_to_num(7) for x in (buffers, other))
        assert (keys - wanted).norm() <= eps * wanted.norm()
        assert_same(buffers._replace(keys=other.keys), other)


@INT8
@pytest.mark.parametrize(
    ("rows", "context"), [(1, 1024), (1, 60_000), (2, 300), (8, 8000), (64, 1024), (300, 200)]
)
def test_a_model_of_8b(rows: int, context: int, int8: bool) -> None:
    lengths = torch.randint(context // 2, context, (rows,)).tolist()
    for t in (1, 6):
        check(lengths, (rows, 8, context + 16, 128), 32, t, torch.bfloat16, int8)


@INT8
@pytest.mark.parametrize(("window", "slots"), [(None, 600), (100, 107)])
def test_a_graph_follows_the_lengths(window: int | None, slots: int, int8: bool) -> None:
    """Captured at other lengths than those that it is replayed at; nothing waits."""
    lengths = torch.tensor([0, 3, 500, 90], dtype=torch.int32)
    buffers = filled(lengths, (4, 2, slots, 64), torch.bfloat16, int8)
    eager, eager_lengths = copy(buffers), lengths.clone()
    q, k, v = (torch.randn(4, 2, h, 64, dtype=torch.bfloat16) for h in (8, 2, 2))

    def step() -> Tensor:
        out = append_attention(q, k, v, buffers, lengths, window=window)
        lengths.add_(2)
        return out

    start, before = lengths.clone(), copy(buffers)
    with no_waiting():
        step()
    graph, out = captured(step, warm_ups=0)
    lengths.copy_(start)
    for x, y in zip(buffers, before, strict=True):
        if x is not None:
            x.copy_(y)
    for _ in range(45):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert torch.equal(out, append_attention(q, k, v, eager, eager_lengths, window=window))
        eager_lengths += 2
    assert torch.equal(lengths, eager_lengths)
    assert_same(buffers, eager)


def test_offsets_past_32_bits() -> None:
    slots, lengths = 2**19, torch.tensor([5, 0, 0, 9, 300_000], dtype=torch.int32)
    buffers = KVBuffers(*(torch.zeros(5, 8, slots, 128, dtype=torch.bfloat16) for _ in range(2)))
    for x in buffers[:2]:
        x[4, 6:, :300_000].normal_()
    q, k, v = (torch.randn(5, 1, h, 128, dtype=torch.bfloat16) for h in (8, 8, 8))
    last = KVBuffers(*(x[4:, 6:].clone() for x in buffers[:2]))
    out = append_attention(q, k, v, buffers, lengths)
    part = (x[4:, :, 6:] for x in (q, k, v))
    expected = append_attention_ref(*part, last, lengths[4:])
    torch.testing.assert_close(out[4:, :, 6:], expected, rtol=1e-2, atol=1e-4)
    assert torch.equal(buffers.keys[4:, 6:], last.keys)
    assert torch.equal(buffers.values[4:, 6:], last.values)
    assert torch.equal(buffers.values[3, :, 9], v[3, 0])


def test_other_lengths_and_batches_compile_nothing() -> None:
    kernels = OWN._append_attention_kernel, OWN.combine_kernel
    counts = []
    # Of more than 66 rows each is one share, whose sum is another variant of the kernel
    for rows, slots in ((64, 1024), (64, 2048), (48, 4096), (24, 1280)):
        check([7] * rows, (rows, 8, slots, 64), 8, 1, torch.bfloat16, window=100)
        counts.append([len(kernel.device_caches[0][0]) for kernel in kernels])
    assert counts[1:] == counts[:-1]
