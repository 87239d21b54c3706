"""Our attention kernels at the head dims that they are for, beside fp32; test_attention.py has them
at small ones under every mask.

# B rows, T query tokens, N of all sequences, H query heads, K kv heads, D head dim
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import CUDA
from tests.support.flash import on_hopper
from tests.support.numbers import assert_as_near
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention import wide

__all__ = ["on_hopper"]
pytestmark = pytest.mark.usefixtures("on_hopper")
H, K = 4, 1
NAMES = ("out", "dq", "dk", "dv")
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16  # the interpreter has no bf16 products
NEAR = {"rtol": 1e-2, "atol": 5e-3} if CUDA else {"rtol": 1e-4, "atol": 1e-5}  # of float32: tf32


@pytest.fixture(autouse=True)
def path() -> Iterator[None]:
    """The kernels alone: on the GPU, if there is one."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


class Case(NamedTuple):
    """Sequences, packed in one row if there are several."""

    lengths: tuple[int, ...]
    head_dim: int = 512
    dtype: torch.dtype = DTYPE
    past: int = 0
    causal: bool = True
    window: int | None = None

    def mask(self, backend: str) -> AttentionMask:
        given: dict[str, Any] = {"past": self.past, "causal": self.causal, "backend": backend}
        if len(self.lengths) > 1:
            lengths = torch.tensor(self.lengths)
            given["segment_ids"] = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
            given["cu_seq_lens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            given["longest"] = max(self.lengths)
        return AttentionMask(sum(self.lengths), **given)


CASES = {
    "rows": Case((150,)),
    "packed, one without tokens, one with a single one": Case((70, 0, 1, 64)),
    "packed, no power of two": Case((40, 41), 320),
    "fp16": Case((9, 72), dtype=torch.float16),
    "past": Case((20,), past=75),
    "both sides": Case((66, 15), causal=False),
    "no multiple of 16 in a window": Case((100,), 264, window=30),
    "both sides in a window, past": Case((90,), 264, past=10, causal=False, window=20),
}


def tensors(case: Case) -> list[Tensor]:
    t = sum(case.lengths)
    sizes = (t, H), (case.past + t, K), (case.past + t, K)
    return [torch.randn(1, *size, case.head_dim, dtype=case.dtype) for size in sizes]


def results(function: Any, case: Case, given: list[Tensor], up: Tensor, backend: str) -> Any:
    """The output and all gradients by their names."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = function(*leaves, mask=case.mask(backend), window=case.window)
    return dict(zip(NAMES, (out, *torch.autograd.grad(out, leaves, up.to(out.dtype))), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_as_near_to_fp32_as_sdpa(name: str) -> None:
    case = CASES[name]
    given = tensors(case)
    up = torch.randn_like(given[0])
    ours = results(attention, case, given, up, "triton")
    peer = results(attention, case, given, up, "sdpa")
    truth = results(attention_ref, case, [x.float() for x in given], up, "reference")
    for what in NAMES:  # each by itself
        assert_as_near(ours[what], peer[what], truth[what].double())


def test_every_sequence_of_a_batch_of_rows() -> None:
    case = Case((50,))
    rows = [tensors(case) for _ in range(2)]
    up = torch.randn(2, 50, H, 512, dtype=DTYPE)
    both = results(attention, case, [torch.cat(x) for x in zip(*rows, strict=True)], up, "triton")
    for i, given in enumerate(rows):
        alone = results(attention, case, given, up[i : i + 1], "triton")
        for what in NAMES:
            assert torch.equal(both[what][i], alone[what][0]), what


def test_padding_may_hold_anything() -> None:
    """A row's padding is a sequence of its own."""
    given, up = tensors(Case((100,))), torch.randn(1, 100, H, 512, dtype=DTYPE)
    real = torch.arange(100) < 70
    up[:, 70:] = 0
    found = []
    for fill in (0.0, float("nan")):
        leaves = [x.clone() for x in given]
        for x in leaves:
            x[:, 70:] = fill
            x.requires_grad_()
        mask = AttentionMask(100, key_mask=real[None], backend="triton")
        out = attention(*leaves, mask=mask)
        found.append([x[:, :70] for x in (out, *torch.autograd.grad(out, leaves, up))])
    for clean, dirty in zip(*found, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


def test_keys_without_queries_and_queries_without_keys() -> None:
    """Of a sequence, beside one that has both."""
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((9, H), (12, K), (12, K)))
    bounds = torch.tensor([0, 0, 5, 9]).int(), torch.tensor([0, 7, 12, 12]).int()
    out = wide.wide_attention(q, k, v, bounds, (5, 7), scale=None, reach=(None, 0))
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    both = q[None, :5], k[None, 7:], v[None, 7:]
    expected = attention_ref(*both, mask=AttentionMask(5))
    torch.testing.assert_close(out[:5], expected[0], **NEAR)
    for x in (out[5:], dq[5:], dk[:7], dv[:7]):
        assert not x.any()


def test_no_tokens() -> None:
    leaves = [torch.zeros(1, 0, n, 16, requires_grad=True) for n in (H, K, K)]
    out = attention(*leaves, mask=AttentionMask(0, backend="triton"))
    out.sum().backward()
    assert out.shape == (1, 0, H, 16) and all(x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("packed", [False, True])
def test_operators(packed: bool) -> None:
    """Schemas and shapes as torch wants them, for tensors in other orders too."""
    q, k, v = torch.randn(18, H + 2 * K, 16).split((H, K, K), 1)
    cu = torch.tensor([0, 4, 18]).int() if packed else None
    how = cu, cu, *((14, 14) if packed else (9, 9)), 0.3, 1 << 30, 0
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(wide._forward.op, (q, k, v, *how))
    out, lse = wide._forward(q, k, v, *how)
    torch.library.opcheck(wide._backward.op, (torch.randn_like(out), q, k, v, out, lse, *how))


@pytest.mark.traced
def test_compiled() -> None:
    case = CASES["packed, no power of two"]
    given = tensors(case)
    up = torch.randn_like(given[0])

    def call(*leaves: Tensor, mask: AttentionMask, window: int | None) -> Tensor:
        return attention(*leaves, mask=mask, window=window)

    expected = results(call, case, given, up, "triton")
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = results(compiled, case, given, up, "triton")
    for what in NAMES:
        assert torch.equal(found[what], expected[what]), what


def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which size a GPU likes is no matter of the result."""
    case = Case((70, 30), dtype=torch.float32, head_dim=40)
    given = tensors(case)
    up = torch.randn_like(given[0])
    truth = results(attention_ref, case, given, up, "reference")
    for queries, keys in ((16, 32), (32, 16)):
        for name in ("FORWARD", "DQ", "DK", "DV"):
            monkeypatch.setattr(wide, name, wide.Launch(queries, keys, 4, 1))
        found = results(attention, case, given, up, "triton")
        for what in NAMES:
            torch.testing.assert_close(found[what], truth[what], **NEAR)
