"""append_attention's kernels compiled: angles, CUDA graphs, and what compiles anew."""

import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.support import captured, no_waiting
from tests.kernels.test_append_attention import Rows, assert_same, copied
from tigon.kernels import use
from tigon.kernels.attention.decode import append_attention
from tigon.kernels.rope.rope import rope

pytestmark = pytest.mark.gpu
OWN = sys.modules["tigon.kernels.attention.decode"]
INT8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    with use("triton"):
        yield
    torch.set_default_device(None)


@INT8
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize(("dim", "rotated"), [(128, 128), (80, 20), (256, 256)])
def test_angles(dim: int, rotated: int, dtype: torch.dtype, int8: bool) -> None:
    """As `rope` before it, but for the last bit where a product and a sum are rounded once."""
    for t, batch in itertools.product((1, 5), (1, 3)):
        rows = Rows([0, 300, 77], 320, dim=dim, int8=int8, dtype=dtype)
        lengths, buffers, other = rows.lengths, rows.buffers, copied(rows.buffers)
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
@pytest.mark.parametrize(("window", "slots"), [(None, 600), (100, 107)])
def test_a_graph_follows_the_lengths(window: int | None, slots: int, int8: bool) -> None:
    """Captured at other lengths than those that it is replayed at; nothing waits."""
    rows = Rows([0, 3, 500, 90], slots, dim=64, int8=int8, dtype=torch.bfloat16)
    lengths, buffers = rows.lengths, rows.buffers
    eager, eager_lengths = copied(buffers), lengths.clone()
    q, k, v = (torch.randn(4, 2, h, 64, dtype=torch.bfloat16) for h in (8, 2, 2))

    def step() -> Tensor:
        out = append_attention(q, k, v, buffers, lengths, window=window)
        lengths.add_(2)
        return out

    start, before = lengths.clone(), copied(buffers)
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


def test_other_lengths_and_batches_compile_nothing() -> None:
    kernels = OWN._append_attention_kernel, OWN.combine_kernel
    counts = []
    # Of more than 66 rows each is one share, whose sum is another variant of the kernel
    for rows, slots in ((64, 1024), (64, 2048), (48, 4096), (24, 1280)):
        sizes = {"heads": 8, "kv_heads": 8, "dim": 64}
        Rows([7] * rows, slots, **sizes, dtype=torch.bfloat16).check(1, window=100)
        counts.append([len(kernel.device_caches[0][0]) for kernel in kernels])
    assert counts[1:] == counts[:-1]
